"""What the monitors share: when to log, and that rank 0 writes."""

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["IntervalCallback"]


class IntervalCallback(Callback):
    """Calls `measure` at the optimizer steps that are logged, on every rank, and writes what rank 0 gets from it.

    Args:
        every_n_steps: optimizer steps between two measurements; None for the trainer's `log_every_n_steps`.

    Attributes:
        last: the last figures, by name; empty until the first interval is over.

    Raises:
        ValueError: `every_n_steps` is no positive whole number.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and (not isinstance(every_n_steps, int) or every_n_steps < 1):
            raise ValueError(f"every_n_steps must be a whole number of at least 1, or None: got {every_n_steps!r}.")
        self.every_n_steps = every_n_steps
        self.last: dict[str, float] = {}
        self._logged_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the first interval."""
        self._logged_step = trainer.global_step

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """The figures of the interval that ends now, by name; may use collectives."""
        raise NotImplementedError

    def log_if_due(self, trainer: Trainer) -> None:
        """To be called after each batch: measures once an interval of optimizer steps is over."""
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        step = trainer.global_step
        if every == 0 or step == self._logged_step or step % every:
            return
        self._logged_step = step
        self.last = self.measure(trainer)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(self.last, step=step)
