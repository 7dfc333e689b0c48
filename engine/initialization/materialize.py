"""Gives a module that was built on the meta device the weights that it would have got on the CPU.

A module's constructor builds its children first and then draws its own weights; calling `reset_parameters` in that same
order, children before parents, draws the same numbers from the same seed. (A module that copies finished children, as
`nn.TransformerEncoder` does, has identical layers; here each is drawn separately.) The caller gets each sub-module as
soon as it is complete, so that a strategy can shard it before the next one takes memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..attachments import carry_over
from .stored_weights import check_stored, is_stored

__all__ = ["check_shapes", "has_meta_tensors", "materialize"]


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer of `module` has a shape but no memory."""
    return any(tensor.is_meta for tensor in _tensors(module, recurse=True))


def check_shapes(module: nn.Module) -> None:
    """Checks that lazy modules have run.

    Raises:
        ValueError: a parameter or buffer of `module` gets its shape from the first batch, which ranks would draw apart.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"{name} of {type(module).__name__}, a parameter of {owner}, gets its shape from the first batch, but"
                " all ranks need it before: call the module on a batch in its constructor, such as"
                " self(torch.zeros(1, 28, 28)), or give the layer its sizes, or choose strategy='single'."
            )


def materialize(
    module: nn.Module,
    on_complete: Callable[[nn.Module], None] = lambda _: None,
    *,
    draws: bool = True,
    replace: Callable[[Tensor, Tensor], None] = carry_over,
) -> None:
    """Gives every meta tensor of `module` memory on the CPU and its first value; tied tensors stay tied.

    Tensors that are to be read from files (`read_weights`) stay on the meta device. A tensor that several modules share
    gets its value from the first of them, or from a common parent.

    Args:
        module: changed in place; tensors that are not on the meta device keep their values.
        on_complete: called with each sub-module, children before parents, when it has its weights.
        replace: called with each tensor on the meta device, and the one that replaces it.
        draws: whether values are drawn; otherwise another rank has them, and the values here are arbitrary.

    Raises:
        ValueError: a sub-module holds meta tensors and its ``reset_parameters()`` is missing or leaves one out.
    """
    check_stored(module)
    real: dict[Tensor, Tensor] = {}  # by meta tensor, so that a shared tensor is created once

    def visit(name: str, submodule: nn.Module) -> bool:
        num_before = len(real)
        was_meta = [visit(f"{name}.{child}" if name else child, sub) for child, sub in submodule.named_children()]
        own_name = f"{name or type(submodule).__name__} ({type(submodule).__name__})"
        shared = _give_memory(submodule, real, replace)
        if shared is not None or any(was_meta):
            if draws:
                _reset(submodule, own_name, must=shared is not None, real=real)
            for table, key, tensor in shared or ():
                table[key] = tensor  # its own draw is discarded, as in a constructor
        on_complete(submodule)
        _forget_replaced(submodule, real, num_before)
        return shared is not None or any(was_meta)

    visit("", module)


_Slot = tuple[dict[str, Any], str, Tensor]


def _give_memory(
    submodule: nn.Module, real: dict[Tensor, Tensor], replace: Callable[[Tensor, Tensor], None]
) -> list[_Slot] | None:
    """Replaces the module's own meta tensors, by NaN where possible: it shows later which tensor got no value.

    Returns:
        None if it has no meta tensors; otherwise the slots of tensors that another module has materialized before.
    """
    shared: list[_Slot] = []
    has_meta = False
    tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
    for table in tables:
        for key, tensor in table.items():
            if tensor is None or not tensor.is_meta or is_stored(submodule, key):
                continue
            has_meta = True
            empty = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device="cpu")
            fresh = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            if tensor in real:
                shared.append((table, key, real[tensor]))
            else:
                real[tensor] = fresh
                replace(tensor, fresh)
            table[key] = fresh
    return shared if has_meta else None


def _forget_replaced(submodule: nn.Module, real: dict[Tensor, Tensor], num_before: int) -> None:
    """Drops tensors that were created within `submodule` and that shards have replaced."""
    held = {id(tensor) for tensor in _tensors(submodule, recurse=True)}
    for meta in list(real)[num_before:]:
        if id(real[meta]) not in held:
            del real[meta]


def _reset(submodule: nn.Module, name: str, *, must: bool, real: dict[Tensor, Tensor]) -> None:
    reset = getattr(submodule, "reset_parameters", None) or getattr(submodule, "_reset_parameters", None)
    remedy = "to give its tensors their first values: mend that, or build the module on the CPU."
    if not callable(reset):
        if must:
            raise ValueError(f"{name} was built on the meta device and has no method reset_parameters() {remedy}")
        return
    materialized = {id(tensor) for tensor in real.values()}
    own = {id(tensor) for tensor in _tensors(submodule, recurse=False)}
    loaded = [(t, t.detach().clone()) for t in _tensors(submodule, recurse=True) if id(t) not in materialized | own]
    with torch.no_grad():
        reset()
        for tensor, value in loaded:  # a parent's reset must not change loaded values, such as pretrained weights
            tensor.copy_(value)
    for key, tensor in (*submodule.named_parameters(recurse=False), *submodule.named_buffers(recurse=False)):
        if must and tensor.isnan().any():
            raise ValueError(
                f"{name} was built on the meta device, and its reset_parameters() leaves out {key!r} {remedy}"
            )


def _tensors(module: nn.Module, recurse: bool) -> Iterator[Tensor]:
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)
