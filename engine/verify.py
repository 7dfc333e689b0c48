"""An equivalence certificate: the same steps once in one process and once under the flags, compared tensor by tensor.

The reference is stock Lightning on one device in float32, on the global batches: none of this package's strategies,
loops, precisions or hooks takes part in it. It can't step several optimizers on one loss: there the reference is the
Engine on one device, which the tests compare with a plain loop.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from ._compat.torch import _muon

__all__ = ["Certificate", "Recorder", "certify", "exact_arithmetic", "reference_steps"]

_States = list[dict[str, Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Certificate:
    """The result of `Engine.verify`."""

    differences: tuple[float, ...]
    """Largest absolute difference of any tensor after each optimizer step."""
    tolerance: float
    """The largest difference that counts as equal."""
    rounding: tuple[float, ...] = ()
    """The number that is added to the tolerance after each optimizer step, where Muon rounds to bfloat16: 2^-8 of its
    longest steps so far."""
    step: int | None = None
    """The first step after which a tensor differs by more; None if none does."""
    tensor: str | None = None
    """The first such tensor, in the module's order."""
    differs_by: str | None = None
    """The flag of a strategy that computes something else by design; None for all others."""

    @property
    def equal(self) -> bool:
        """Whether all tensors stayed within the tolerance."""
        return self.step is None

    def __str__(self) -> str:
        table = "\n".join(f"  after step {k + 1:3d}: {d:.2e}" for k, d in enumerate(self.differences))
        reason = (
            f"strategy {self.differs_by!r} computes something else by design"
            if self.differs_by
            else "dropout and other random layers differ by design; so do a precision below float32, and BatchNorm"
            " without sync_batchnorm=True"
        )
        last = len(self.differences) if self.step is None else self.step
        bound = f"{self.tolerance:g}"
        if self.rounding and self.rounding[last - 1]:
            bound += f" and {self.rounding[last - 1]:.1e}, by which Muon rounds in {last} steps"
        verdict = (
            f"equal to one process within {bound}"
            if self.equal
            else f"differs from one process: first {self.tensor!r}, after step {self.step}, by"
            f" {self.differences[last - 1]:.2e}, more than {bound}"
            f" ({reason})"
        )
        return f"{verdict}\nlargest difference of any parameter or buffer\n{table}"


class _BySamples(Callback):
    """Weighs the micro-batches of a step by their samples; stock Lightning divides by their planned number."""

    def __init__(self, num_samples: int, batch_size: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Computes the weight of the micro-batch from its share of the step's samples."""
        full = trainer.accumulate_grad_batches
        first = batch_idx - batch_idx % full
        last = min(first + full, int(trainer.num_training_batches))
        sizes = [min(self._batch_size, self._num_samples - i * self._batch_size) for i in range(first, last)]
        self._factor = full * sizes[batch_idx - first] / sum(sizes)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Scales the gradients of this micro-batch."""
        factor = self._factor
        if factor != 1:
            loss.register_hook(lambda gradient: gradient * factor)


class Recorder(Callback):
    """Keeps the whole weights after each optimizer step, and writes them to `path` on rank 0 at the end, and the
    number of optimizers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounding: list[float] = []
        """See `Certificate`."""
        self._num_optimizers = 1
        self._states: _States = []
        self._step = 0
        self._rounded = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes arithmetic exact in this process as well: `exact_arithmetic` may have run in another one."""
        _be_exact()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Adds up by how much Muon rounds: two gradients that differ in the last digit may be two bfloat16."""
        if type(optimizer) is torch.optim.Muon:
            steps = [
                _muon._adjust_lr(float(group["lr"]), group["adjust_lr_fn"], p.shape)
                for group in optimizer.param_groups
                for p in group["params"]
            ]
            self._rounded += 2**-8 * max(steps, default=0.0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the optimizers that step on one loss."""
        self._num_optimizers = len(trainer.optimizers) if pl_module.automatic_optimization else 1

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Gathers the weights, with collectives if they are sharded."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.rounding.append(self._rounded)
            state = trainer.strategy.lightning_module_state_dict()
            self._states.append({name: tensor.detach().cpu().clone() for name, tensor in state.items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the states for the process that started the run, which may be another one."""
        if trainer.is_global_zero:
            torch.save((self._states, self._num_optimizers), self.path)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Makes GPUs compute in float32, and convolve by algorithms that depend only on their input.

    By default cuDNN rounds to TF32, and may choose another algorithm for another batch size: both cause differences
    above the tolerance.
    """
    cudnn: Any = torch.backends.cudnn
    parts = cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul
    flags, precisions = (cudnn.deterministic, cudnn.benchmark), [backend.fp32_precision for backend in parts]
    matmul = "highest"
    with suppress(RuntimeError):  # torch refuses to read it if the newer flags have been set; those are restored below
        matmul = torch.get_float32_matmul_precision()
    _be_exact()
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = flags
        cudnn.allow_tf32 = precisions[0] == "tf32"
        torch.set_float32_matmul_precision(matmul)
        for backend, precision in zip(parts, precisions, strict=True):
            backend.fp32_precision = precision


def _be_exact() -> None:
    cudnn = torch.backends.cudnn
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = True, False, False
    torch.set_float32_matmul_precision("highest")


def reference_steps(
    module: LightningModule,
    loader: DataLoader,
    batch_size: int,
    flags: Mapping[str, Any],
    make: Callable[..., Trainer] | None = None,
) -> tuple[_States, list[float]]:
    """The weights after each step of stock Lightning in one process, on batches of all ranks together; the `rounding`.

    With `make`, of the trainer that it makes of Lightning's flags, which weighs micro-batches by itself.

    The caller restores the random state, and that of the user's generator, from before the engine's run.
    """
    if loader.batch_size is None:
        raise ValueError("verify needs a DataLoader with a batch_size, to join the batches of all ranks.")
    joined = DataLoader(
        loader.dataset,
        batch_size=batch_size,
        sampler=loader.sampler,
        generator=loader.generator,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
    )
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "reference.pt")
        by_samples = [] if make else [_BySamples(len(loader.sampler), batch_size)]  # type: ignore[arg-type]
        reference_flags = {"strategy": "auto", "devices": 1, "callbacks": [*by_samples, recorder]}
        trainer = (make or Trainer)(**{**flags, **reference_flags, "use_distributed_sampler": False})
        trainer.fit(module, joined)
        return torch.load(recorder.path, weights_only=True)[0], recorder.rounding


def certify(
    states: _States, reference: _States, tolerance: float, rounding: list[float], differs_by: str | None = None
) -> Certificate:
    """Compares two lists of states, one entry a step; for `rounding` and `differs_by` see `Certificate`."""
    differences = []
    first: tuple[int, str] | None = None
    for step, (state, expected, rounded) in enumerate(zip(states, reference, rounding, strict=True), start=1):
        by_name = {name: _difference(state[name], tensor) for name, tensor in expected.items()}
        differences.append(max(by_name.values(), default=0.0))
        beyond = [name for name, difference in by_name.items() if not difference <= tolerance + rounded]
        first = first or ((step, beyond[0]) if beyond else None)
    return Certificate(
        differences=tuple(differences),
        tolerance=tolerance,
        rounding=tuple(rounding),
        step=first[0] if first else None,
        tensor=first[1] if first else None,
        differs_by=differs_by,
    )


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
