"""State that each rank makes of its own samples, such as running means: told by name, where ranks have other values.

Looked at are the module's buffers, the numbers and tensors in its attributes by which a later step may depend on an
earlier one, the orders that samplers have drawn, of which each rank reads its part, and what data sets count as they
read. Learning rates and the like, and steps that one rank alone leaves out, are an error, since the weights of the
ranks would differ.
"""

import dis
import types
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import has_iterable_dataset
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import Metric

from .._compat.torch import tree_leaves
from ..data.epoch_position import order_of
from ..strategies import own_buffers
from .module_copy import is_data
from .sample_history import SampleHistory
from .step_sums import StepSums

__all__ = ["OwnState"]

_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "torchmetrics.", "polyphase.")
_GROWS = ("append", "appendleft", "extend", "clear")
_OUTSIDE_STEPS = ("on_", "setup", "teardown", "validation_", "test_", "predict_")
"""The beginnings of the names of hooks, and of steps in which nothing is trained."""


class OwnState:
    """Compares such state of the ranks after a run's first step, and after each epoch.

    Costs a gather between hosts, and a read of the device, each time; only the gather for a module without any.

    Args:
        trainer: the trainer of the module.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self.told: set[str] = set()
        """The names that a warning had in this run."""
        self._before: dict[str, str] = {}
        self._histories: list[tuple[DataLoader, SampleHistory]] = []
        self._steps: StepSums | None = None
        self.is_first_step_due = True
        """Whether no step of this run was looked at."""

    def begin_run(self) -> None:
        """Begins a run, whose first step is looked at."""
        self.told, self.is_first_step_due = set(), True
        self._before = _digests(_attributes(self._trainer.lightning_module)) if self._is_compared else {}
        reads = self._is_compared and self._trainer.is_global_zero
        loaders = _indexed(self._trainer.fit_loop._combined_loader) if reads else []
        self._histories = [(loader, SampleHistory(loader)) for loader in loaders]
        self.begin_sums()

    def begin_sums(self) -> None:
        """Adds up what steps use from now on; called on all ranks after the same step."""
        self.close()
        # A rank that trains alone may leave out a step of its own, and that of its schedules, by `nonfinite="skip"`.
        steps_together = self._is_compared and not self._trainer.engine_strategy.capabilities.steps_alone
        self._steps = StepSums(self._trainer.strategy.optimizers) if steps_together else None

    def close(self) -> None:
        """Removes what is still attached; called however a run ends."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    def after_first_step(self) -> None:
        """Compares the state after a run's first step."""
        self.is_first_step_due = False
        for loader, history in self._histories:
            self._tell_history(loader, history)
        self._histories = []
        self.compare()

    def _tell_history(self, loader: DataLoader, history: SampleHistory) -> None:
        latest = order_of(loader).passes.latest  # type: ignore[union-attr]
        if latest is not None and len(latest.order) and (names := history.decisive(_plain_index(latest.order[-1]))):
            rank_zero_warn(
                f"A sample of {type(loader.dataset).__name__} depends on what was read before it: {names} changed with"
                f" the first batch, and the same sample has other values since. Under {self._trainer.engine_strategy!r}"
                " each rank reads its part of the samples, so the result is not that of one process. Let a sample"
                " depend on its index and the epoch, or count in the module (on_train_batch_start)."
            )

    @property
    def _is_compared(self) -> bool:
        # Ranks that do not keep step are at different steps.
        return self._trainer.data_size > 1 and self._trainer.engine_strategy.capabilities.keeps_step

    def compare(self) -> None:
        """Compares the state; all ranks call it after the same step.

        Raises:
            RuntimeError: optimizers step with other rates, or other gradients.
        """
        if not self._is_compared:
            return
        trainer, module = self._trainer, self._trainer.lightning_module
        strategy = trainer.engine_strategy
        buffers = {} if strategy.averages_buffers else own_buffers(module)
        attributes = _digests(_attributes(module))
        changed = {name: digest for name, digest in attributes.items() if self._before.get(name) != digest}
        steps = {} if self._steps is None else self._steps.as_texts()
        own = _digests(buffers), changed, _orders(trainer.fit_loop._combined_loader), steps
        by_rank = trainer.data_ranks.all_gather_object(own)
        names = [_unequal(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
        if trainer.data_size != trainer.world_size:  # pipeline stages have different parts
            of_all = trainer.all_ranks.all_gather_object(names)
            names = [set().union(*of_stages) for of_stages in zip(*of_all, strict=True)]
        names[1] = {name for name in names[1] if _decides(module, name)}
        of_buffers, of_attributes, of_samplers, of_optimizers = (sorted(unequal - self.told) for unequal in names)
        self.told.update(of_buffers, of_attributes, of_samplers)
        differ = f"Under {strategy!r} the ranks have different values of"
        if of_optimizers:
            raise RuntimeError(
                f"{differ} {' and '.join(of_optimizers)}, and train apart: a scheduler, hook or callback has decided by"
                " what its rank alone has, such as a loss or its `global_rank`. Decide on all ranks alike: by"
                " `self.trainer.strategy.reduce(value)`, or by what is logged with `sync_dist=True`."
            )
        if of_buffers:
            option = strategy.option_to_average_buffers
            remedy = f", or set {option}, which averages floating-point buffers after each step" if option else ""
            rank_zero_warn(
                f"{differ} {', '.join(map(repr, of_buffers))}: the module updates these buffers by the samples of its"
                " own rank, and rank 0's values are evaluated and saved, so the result is not that of one process."
                f" Reduce what they are made of over the ranks in the module (torch.distributed.all_reduce){remedy}."
            )
        if of_attributes:
            rank_zero_warn(
                f"{differ} {', '.join(map(repr, of_attributes))}: the module keeps in these attributes what it has seen"
                " of the samples of its own rank, so what it computes with them is not what one process computes."
                " Reduce what they are made of over the ranks (`self.all_gather(value).mean(0)`)."
            )
        if of_samplers:
            rank_zero_warn(
                f"The ranks have drawn different orders of {' and '.join(of_samplers)}, of which each reads its part:"
                " some samples were trained on by several ranks, and others by none. It decides by something that each"
                " rank has of its own, such as losses, or random numbers of another generator. Make that equal on all"
                " ranks (`self.all_gather`, a seed), or give the sampler a `torch.Generator`."
            )


def _unequal(by_rank: tuple[dict[str, str], ...]) -> set[str]:
    return {name for name in set().union(*by_rank) if len({of_rank.get(name) for of_rank in by_rank}) > 1}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}" if path else name: value
        for path, part in module.named_modules()
        if not isinstance(part, Metric)  # each rank's own until it is computed
        for name, value in vars(part).items()
        if name != "training" and is_data(value) and _may_last(value)
    }


def _may_last(value: Any) -> bool:
    """Whether it is something that steps compute with: a number, or tensors without a graph."""
    leaves = tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return all(tensor.grad_fn is None for tensor in tensors) and (bool(tensors) or isinstance(value, (int, float)))


def _orders(combined: CombinedLoader) -> dict[str, str]:
    """Returns a checksum of what each sampler has drawn of the present pass."""
    orders = [order_of(loader) for loader in combined.flattened if isinstance(loader, DataLoader)]
    drawn = [(number, order, order.passes.latest) for number, order in enumerate(orders) if order is not None]
    return {
        f"sampler {number} ({type(order.sampler).__name__})": str(latest.digest(len(latest.order)))
        for number, order, latest in drawn
        if latest is not None and order.num_replicas > 1  # otherwise the user gives each rank an order of its own
    }


def _indexed(combined: CombinedLoader) -> list[DataLoader]:
    """Returns the loaders whose samples this process reads by indices, of an order that is dealt to the ranks."""
    loaders = [loader for loader in combined.flattened if isinstance(loader, DataLoader)]
    dealt = [loader for loader in loaders if (order := order_of(loader)) is not None and order.num_replicas > 1]
    return [loader for loader in dealt if loader.num_workers == 0 and not has_iterable_dataset(loader)]


def _plain_index(index: Any) -> Any:
    return index.item() if isinstance(index, np.generic) else index


def _digests(values: dict[str, Any]) -> dict[str, str]:
    """Returns a text for each value: two sums of each tensor, which are read from the device together, and the rest."""
    leaves = {name: tree_leaves(value) for name, value in values.items()}
    tensors = [leaf for of_value in leaves.values() for leaf in of_value if _is_summed(leaf)]
    parts = [tensor.detach().float() for tensor in tensors]
    sums = [torch.stack([part.sum(), part.square().sum()]) for part in parts]
    read = iter(torch.stack([s.to(sums[0].device) for s in sums]).tolist() if sums else ())
    return {
        name: repr(
            [next(read) if _is_summed(leaf) else None if isinstance(leaf, Tensor) else leaf for leaf in of_value]
        )
        for name, of_value in leaves.items()
    }


def _is_summed(leaf: Any) -> bool:
    is_plain = isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
    return is_plain and not (leaf.is_meta or leaf.is_complex() or leaf.is_sparse)


def _decides(module: nn.Module, name: str) -> bool:
    """Whether a step may depend on what an earlier one has left in an attribute, by the code of the part that has it.

    It does if a method reads the attribute before it writes it, and no other method writes it first: what one leaves
    for another in the same step, such as an auxiliary loss, is nothing that lasts.
    """
    path, _, attribute = name.rpartition(".")
    reads = writes = False
    for cls in type(module.get_submodule(path)).__mro__:
        if f"{cls.__module__}.".startswith(_LIBRARIES):
            continue
        for method, function in vars(cls).items():
            if isinstance(function, types.FunctionType) and not method.startswith(_OUTSIDE_STEPS):
                first = _first_use(function.__code__, attribute, function.__code__.co_varnames[:1])
                reads |= first == "LOAD_ATTR"
                writes |= first == "STORE_ATTR" and not any(word in method for word in ("init", "reset", "clear"))
    return reads and not writes


def _first_use(code: types.CodeType, attribute: str, me: tuple[str, ...]) -> str | None:
    """Returns the first operation on ``self.attribute``, other than to append to it, also in functions inside.

    Args:
        code: of a method, or of a function inside.
        attribute: the name.
        me: the name of `self`.
    """
    instructions = [*dis.get_instructions(code)]
    owner: Any = None
    for instruction, following in zip(instructions, [*instructions[1:], None], strict=True):
        grows = following is not None and following.argval in _GROWS
        is_of_self = instruction.argval == attribute and owner in me and not grows
        if is_of_self and instruction.opname in ("LOAD_ATTR", "STORE_ATTR"):
            return instruction.opname
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):  # from Python 3.13 on, it may load two variables
            names = instruction.argval
            owner = names[-1] if isinstance(names, tuple) else names
        else:
            owner = None
    inner = (_first_use(constant, attribute, me) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return next((use for use in inner if use is not None), None)
