"""Finds the rank that alone has frozen or unfrozen parameters, before gradients are mixed up or shards stay behind."""

from operator import attrgetter
from typing import Any

from lightning.pytorch import Trainer

from ..distributed.job_store import Fields
from ..reliability.same_call import SameCall

__all__ = ["SameTraining"]

_REQUIRES_GRAD = attrgetter("requires_grad")
_FIELDS: Fields = {"batch": int, "trained": str}
_WAIT = "the agreement on which parameters are trained"
_NUM_LOOKS = 2
"""Reports, a second apart, that must say so: what one of them has is not all of the same moment."""


class SameTraining:
    """Compares `requires_grad` of all parameters before each batch; asks the other ranks if it has changed.

    Args:
        trainer: of the run, whose strategy is set up.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, trainer: Trainer, timeout_s: float) -> None:
        self._trainer: Any = trainer
        self._parameters = list(trainer.lightning_module.parameters())
        self._trained: list[bool] | None = None
        self._looks: dict[int, int] = {}
        self._same = SameCall("trained", _FIELDS, _WAIT, timeout_s)

    def check(self) -> None:
        """Called between the hooks at the start of a batch and its passes.

        Raises:
            RuntimeError: another rank trains other parameters.
        """
        trained = list(map(_REQUIRES_GRAD, self._parameters))
        if trained != self._trained:
            self._ask(trained)
            self._trained = trained

    def _ask(self, trained: list[bool]) -> None:
        place = self._trainer.heartbeat.place()
        batch = place["batch"]
        call = {"batch": batch, "trained": "".join("01"[is_trained] for is_trained in trained)}
        self._looks.clear()

        def differs(rank: int, other: dict[str, Any] | None, other_rank: int | None) -> str:
            before = self._trained if other is None else [bit == "1" for bit in other["trained"]]
            names = [name for name, _ in self._trainer.lightning_module.named_parameters()]
            changed = [n for n, now, was in zip(names, trained, before or trained, strict=True) if now != was]
            what = f"freezes or unfreezes {', '.join(changed[:3])}" if changed else "has another batch"
            what += f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            who = "the other ranks do" if other_rank is None else f"rank {other_rank} does"
            return (
                f"all ranks must train the same parameters: rank {rank} {what} before batch {batch}, and {who} not."
                " This step has changed no weights. Decide it on all ranks alike: by the step, or by a value that all"
                " have (`self.all_gather`, `trainer.strategy.reduce_boolean_decision`), not by `global_rank` or by the"
                " rank's own samples."
            )

        self._same.ask(call, differs, lambda: self._ahead(batch, place["step"]))

    def _ahead(self, batch: int, step: int) -> list[int]:
        """Returns the ranks that have begun the passes of the batch."""
        for rank, report in self._trainer.heartbeat.positions_of_all().items():
            is_in_passes = report["phase"] in ("train", "optimizer")
            has_begun = (report["batch"], report["step"], is_in_passes) > (batch, step, False)
            self._looks[rank] = self._looks.get(rank, 0) + 1 if has_begun else 0
        return [rank for rank, number in self._looks.items() if number >= _NUM_LOOKS]
