"""`cp`, `ddp+cp`, `fsdp+cp` and `hsdp+cp`: the sequences of a batch split over ranks that have the same samples.

Before the first of the repeated blocks every rank has whole activations; from there on they are DTensors [batch, time,
...] of the whole shape, of which each rank has a part of the time, until the loss. What a module derives from a length
(positions, masks, shifts) is that of the whole sequence. Parameters are whole on each rank, or sharded by FSDP2 over
the ranks with other samples; the axis `cp` of the mesh is innermost, where links are fastest.

Communication per micro-batch over the ranks of `cp`, with activations of A bytes:
1. attention, forward: an all-to-all each of queries, keys and values, from parts of the time to some of the heads, and
   one of the result, back: each A / ranks. Backward: the same in the other direction;
2. the gradient of the first block's input: an all-gather of A;
3. per optimizer step: an all-reduce of the gradient of each parameter.
Then the collectives of `fsdp` or `hsdp`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ...choices import Axis
from ..options import CPOptions, DDPCPOptions, FSDPCPOptions, HSDPCPOptions
from ..units import named_blocks
from .sequence_functions import SequenceFunctions, cut, recomputed_alike
from .strategy import TensorParallel
from .styles import replicate

__all__ = ["ContextParallel"]


class ContextParallel(TensorParallel):
    """Sequences split over the axis `cp` of the mesh, and `fully_shard` on the others, if there are any.

    Args:
        options: `CPOptions` for the axis `cp` alone, `FSDPCPOptions` for two, `HSDPCPOptions` or `DDPCPOptions` for
            three axes.
        launcher: suffix of the flag, see `flags.LAUNCHERS`.
        comm_hook: none; the registry says why.
    """

    capabilities = dataclasses.replace(TensorParallel.capabilities, unsupported_repeat="context parallelism")
    split_axis: Axis = "cp"
    _names = MappingProxyType(
        {CPOptions: "cp", DDPCPOptions: "ddp+cp", FSDPCPOptions: "fsdp+cp", HSDPCPOptions: "hsdp+cp"}
    )

    @property
    def _refusal(self) -> str:
        return (
            "this can't be done with a sequence that is split over ranks: in torch's DTensor, which says of each"
            " function how parts of its arguments make parts of its result, this one has no rule. Choose another"
            " strategy, such as 'fsdp', or have the module compute it without torch's own kernel for it."
        )

    @property
    def _splits_sequences(self) -> bool:
        return True

    def _make_plan(self, module: nn.Module) -> "_Plan":
        blocks = set(named_blocks(module))
        if not blocks:
            raise ValueError(
                f"no blocks of {type(module).__name__} are known, at which its sequences could be split: there is no"
                " ModuleList or Sequential of several blocks of one class. Give the module a method shard_units() that"
                " returns them, or choose another strategy, such as 'fsdp'."
            )
        names = [name for name, submodule in module.named_modules() if submodule in blocks]
        self._entry = SplitSequence()
        return _Plan(self.layout.cp, dict.fromkeys(names, self._entry))

    def _run_or_replicate(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs `step`. After the first of training, says so if there was no sequence to split."""
        with SequenceFunctions():
            result = step(*args, **kwargs)
        if step.__name__ == "training_step" and step.__name__ not in self._has_run:
            self._has_run.add(step.__name__)
            if not self._entry.has_split:
                rank_zero_info(
                    f"No block of {type(self.lightning_module).__name__} was called with a tensor [batch, time, ...],"
                    " whose sequence could be split: every rank of cp computes all of a step. Choose another strategy,"
                    " such as 'fsdp'."
                )
        return result

    def check_run(self, *, compiles: bool, callbacks: Sequence[Callback]) -> None:
        """See `DistributedStrategy`."""
        super().check_run(compiles=compiles, callbacks=callbacks)
        if compiles:
            raise ValueError(
                f"strategy {self!r} can't be compiled: the functions of a split sequence are chosen while they run."
                " Leave out compile=True, or choose another strategy, such as 'fsdp' with activation_checkpointing."
            )

    def setup(self, trainer: Trainer) -> None:
        """Splits the sequences from here on; see `TensorParallel`."""
        self._while_running.enter_context(recomputed_alike())
        super().setup(trainer)


@dataclasses.dataclass(frozen=True)
class _Plan:
    num_ranks: int
    styles: dict[str, ParallelStyle]

    def __str__(self) -> str:
        names = list(self.styles)
        return f"Sequences split over {self.num_ranks} ranks, from {names[0]} to {names[-1]} and after it."


class SplitSequence(ParallelStyle):
    """Blocks whose first input [batch, time, width] is split along time, if it is not already.

    Attributes:
        has_split: whether one of them was called with such an input.
    """

    has_split = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate(module, device_mesh)
        module.forward = functools.partial(self._run, module.forward, device_mesh)
        return module

    def _run(self, forward: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        place = next((place for place, arg in named.items() if _has_time(arg)), None)
        if place is not None:
            self.has_split = True
            named[place] = cut(named[place], mesh)
        # Entered here, too: where a block is computed again, in backward, no mode is active.
        with SequenceFunctions():
            return forward(*(named[i] for i in range(len(args))), **{name: named[name] for name in kwargs})


def _has_time(arg: Any) -> bool:
    return isinstance(arg, Tensor) and arg.is_floating_point() and arg.ndim == 3 and arg.shape[1] > 1
