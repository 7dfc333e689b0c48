"""Writes of a step into parameters: a bound on the norm of a weight, a scale that is initialised from the first batch.

In a pipeline a step runs once for each micro-batch. A write that leaves the same values each time is as in one process;
any other is refused by the parameter's name, in whichever batch it happens. Trial runs leave no writes behind. A step
that puts another parameter in the place of one is refused: optimizer and other stages keep the earlier one.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules

from ..._compat.torch import TorchDispatchMode
from ...data.samples import tensors_in
from ...distributed.buckets import local_part
from ..callers import CutError, is_of_fsdp, users_line
from ..contents import begin_count, end_count, put_values
from .reachable_state import sums

__all__ = [
    "KeptValues",
    "ParameterWrites",
    "advances_text",
    "between_passes_text",
    "new_parameter_text",
    "no_new_parameters",
    "note_writes",
]

_LIKE_ONE = "set microbatches=1 with schedule=gpipe, which is as in one process (one stage works at a time)"


def advances_text(what: str, number: int) -> str:
    """Returns the message for state that advances once a micro-batch.

    Args:
        what: the state, in words.
        number: number of micro-batches of a batch.
    """
    return (
        f"{what} is changed by each micro-batch, and the next one finds it changed: in a pipeline it advances {number}"
        f" times a batch, in one process once. Such a step is refused: change it in a hook that is called once a batch,"
        f" such as on_train_batch_start; {_LIKE_ONE}; or choose another strategy, such as 'fsdp'."
    )


def new_parameter_text(line: str, name: str) -> str:
    """Returns the message for a line of the step that puts another parameter in the place of `name`."""
    return (
        f"{line} assigns another parameter to {name!r} within the step: the optimizer and the other pipeline stages do"
        " not have it. Create parameters in the constructor or in configure_model; write values into the one that is"
        " there, in a hook such as on_train_batch_start, as in `weight.data.copy_(values)`; or choose another strategy,"
        " such as 'ddp'."
    )


def between_passes_text(name: str) -> str:
    """Returns the message for a hook that changes the parameter `name`, which the step uses."""
    return (
        f"a hook writes into the parameter {name!r}, or freezes or unfreezes it, when gradients are zeroed or before"
        " backward (on_before_zero_grad, optimizer_zero_grad, on_before_backward): in one process that is after the"
        " forward of the batch and before its backward, but a pipeline runs the two in turns, for each micro-batch."
        " Such a hook is refused: do this in another one, such as on_train_batch_start or on_train_batch_end, or choose"
        " another strategy, such as 'fsdp'."
    )


@contextmanager
def note_writes(module: nn.Module, written: list[str]) -> Iterator[None]:
    """Context of hooks; adds the names of the parameters that they have written or (un)frozen, as all ranks see."""
    named = dict(module.named_parameters())
    with _counted(named.values()):
        before = {name: _mark(parameter) for name, parameter in named.items()}
        yield
        written += [name for name, parameter in named.items() if _mark(parameter) != before[name]]


@contextmanager
def _counted(parameters: Iterable[Tensor]) -> Iterator[None]:
    counted = list(parameters)
    for parameter in counted:
        begin_count(parameter)
    try:
        yield
    finally:
        for parameter in counted:
            end_count(parameter)


def _mark(parameter: Any) -> Any:
    """Returns what differs after a write; writes through `data` of split parameters are seen by values alone."""
    writes = sums(local_part(parameter)) if isinstance(parameter, DTensor) else _count(parameter)
    return writes, parameter.requires_grad


class ParameterWrites:
    """Compares what the micro-batches of a batch write into the parameters of this rank's stages.

    Args:
        parameters: the parameters of each stage of this rank.
        name_of: returns the name of one of them.
    """

    def __init__(self, parameters: Mapping[int, list[nn.Parameter]], name_of: Callable[[Tensor], str]) -> None:
        self._parameters, self._name_of = parameters, name_of
        self._counts: dict[int, list[tuple[int, int]]] = {}
        """For each stage, the writes into each of its parameters, and those through `data`, after its last forward."""
        self._first: dict[int, dict[int, Any]] = {}
        """For each stage, the sums of what its first micro-batch has written, by the parameter's number."""
        self.used: set[nn.Parameter] = set()
        """The parameters that trial runs have used."""

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Context of a batch."""
        with _counted(chain.from_iterable(self._parameters.values())):
            self._counts = {stage: list(map(_count, parameters)) for stage, parameters in self._parameters.items()}
            try:
                yield
            finally:
                self._counts.clear()
                self._first.clear()

    def check(self, stage: int, number: int) -> None:
        """Called after the forward of a micro-batch.

        Args:
            stage: the stage that has run.
            number: number of micro-batches of the batch.

        Raises:
            CutError: it has written other values than the one before it, or in place what the backward of that needs.
        """
        if (before := self._counts.get(stage)) is None:
            return
        parameters = self._parameters[stage]
        self._counts[stage] = now = list(map(_count, parameters))
        is_first = stage not in self._first
        first = self._first.setdefault(stage, {})
        if now == before:
            return
        for index, (earlier, later) in enumerate(zip(before, now, strict=True)):
            if earlier == later:
                continue
            parameter = parameters[index]
            if is_first:
                first[index] = sums(parameter)
            elif index not in first or first[index] != sums(parameter):
                raise CutError(advances_text(f"the parameter {self._name_of(parameter)!r}", number))
            elif earlier[0] != later[0] and torch.is_grad_enabled():
                raise CutError(
                    f"each micro-batch writes in place into the parameter {self._name_of(parameter)!r}, whose values"
                    " the backward of the one before it needs: write into its `data`, as in"
                    f" `weight.data.clamp_(-1, 1)`; write in a hook, such as on_train_batch_end; {_LIKE_ONE}; or choose"
                    " another strategy, such as 'fsdp'."
                )


def _count(parameter: Any) -> tuple[int, int]:
    return parameter._version, sum(view._version for view in getattr(parameter, "data_views", ()))


class KeptValues(TorchDispatchMode):
    """A mode that keeps the values of parameters from before they are first written, and can put them back.

    Args:
        parameters: the parameters.
        used: gets those that an operation has read or written.
    """

    def __init__(self, parameters: Mapping[int, list[nn.Parameter]], used: set[nn.Parameter] | None = None) -> None:
        super().__init__()
        every = {parameter for of_stage in parameters.values() for parameter in of_stage}
        self._by_storage: dict[int, nn.Parameter] = {_storage(p): p for p in every if p.layout == torch.strided}
        self._kept: dict[int, Tensor] = {}
        self._used = used

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation, below autograd."""
        if func._schema.is_mutable or self._used is not None:
            for tensor in tensors_in((args, kwargs or {})):
                parameter = self._by_storage.get(_storage(tensor)) if tensor.layout == torch.strided else None
                if parameter is None:
                    continue
                if self._used is not None:
                    self._used.add(parameter)
                if func._schema.is_mutable and id(parameter) not in self._kept:
                    self._kept[id(parameter)] = parameter.detach().clone()
        return func(*args, **(kwargs or {}))

    def undo(self) -> None:
        """Puts the values back."""
        for parameter in self._by_storage.values():
            if (values := self._kept.get(id(parameter))) is not None:
                put_values(parameter, values)
        self._kept.clear()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def no_new_parameters(names: Mapping[nn.Module, str]) -> Iterator[None]:
    """Context of a step, in which no part of a module may get another parameter.

    Args:
        names: the names of all parts of the module.
    """

    def refuse(part: nn.Module, name: str) -> None:
        whole = ".".join(filter(None, (names[part], name)))
        raise CutError(new_parameter_text(users_line(), whole))

    def see_parameter(part: nn.Module, name: str, parameter: Any) -> None:
        is_new = parameter is not None and part._parameters.get(name) is not parameter
        if is_new and part in names and not is_of_fsdp(sys._getframe(1)):
            refuse(part, name)

    def see_module(part: nn.Module, name: str, child: Any) -> None:
        if part in names and isinstance(child, nn.Module) and child not in names:
            for inner, _ in child.named_parameters():
                refuse(part, f"{name}.{inner}")

    handles = (
        modules.register_module_parameter_registration_hook(see_parameter),
        modules.register_module_module_registration_hook(see_module),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
