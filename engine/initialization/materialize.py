"""Real weights for a module that was built on the meta device, equal to those it would have been built with.

A module's constructor builds its children first and then draws its own weights; calling `reset_parameters` in that same
order, children before parents, draws the same numbers from the same seed. (A module that copies finished children, as
`nn.TransformerEncoder` does, has layers that are alike; here each is drawn afresh.) Each sub-module is handed on as
soon as it is complete, so that a strategy can shard it before the next one takes memory.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .stored_weights import check_stored, is_stored

__all__ = ["has_meta_tensors", "materialize"]


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer of `module` has a shape but no memory."""
    return any(tensor.is_meta for tensor in _tensors(module, recurse=True))


def materialize(
    module: nn.Module, on_complete: Callable[[nn.Module], None] = lambda _: None, *, draws: bool = True
) -> None:
    """Gives every meta tensor of `module` memory on the CPU and its first value; tied tensors stay tied.

    Those that are to be read from files (`read_weights`) are left as they are. A tensor that several modules share has
    the value of the first that holds it, or that a parent of theirs draws.

    Args:
        module: changed in place; what is not on the meta device keeps its values.
        on_complete: called with each sub-module, children before parents, once its weights are there.
        draws: whether they are drawn; else another rank has them, and what is given here has no meaning yet.

    Raises:
        ValueError: a sub-module holds meta tensors and its ``reset_parameters()`` is missing or leaves one out.
    """
    check_stored(module)
    real: dict[Tensor, Tensor] = {}  # by meta tensor: one that two modules share is made once

    def visit(name: str, part: nn.Module) -> bool:
        num_before = len(real)
        was_meta = [visit(f"{name}.{child}" if name else child, sub) for child, sub in part.named_children()]
        own_name = f"{name or type(part).__name__} ({type(part).__name__})"
        shared = _give_memory(part, real)
        if shared is not None or any(was_meta):
            if draws:
                _reset(part, own_name, must=shared is not None, real=real)
            for table, key, tensor in shared or ():
                table[key] = tensor  # its own draw, which a constructor makes too, is thrown away
        on_complete(part)
        _forget_replaced(part, real, num_before)
        return shared is not None or any(was_meta)

    visit("", module)


_Slot = tuple[dict[str, Any], str, Tensor]


def _give_memory(part: nn.Module, real: dict[Tensor, Tensor]) -> list[_Slot] | None:
    """Replaces the meta tensors that `part` itself holds, by NaN where it can tell that it was left out.

    Returns:
        None if it holds none; else where those belong that another module holds already, which have a substitute now.
    """
    shared: list[_Slot] = []
    found = False
    tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
    for table in tables:
        for key, tensor in table.items():
            if tensor is None or not tensor.is_meta or is_stored(part, key):
                continue
            found = True
            empty = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device="cpu")
            fresh = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            if tensor in real:
                shared.append((table, key, real[tensor]))
            else:
                real[tensor] = fresh
            table[key] = fresh
    return shared if found else None


def _forget_replaced(part: nn.Module, real: dict[Tensor, Tensor], num_before: int) -> None:
    """Lets go of tensors that were made within `part` and that shards have taken the place of: no one else has them."""
    held = {id(tensor) for tensor in _tensors(part, recurse=True)}
    for meta in list(real)[num_before:]:
        if id(real[meta]) not in held:
            del real[meta]


def _reset(part: nn.Module, name: str, *, must: bool, real: dict[Tensor, Tensor]) -> None:
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    remedy = "to give its tensors their first values: mend that, or build the module on the CPU."
    if not callable(reset):
        if must:
            raise ValueError(f"{name} was built on the meta device and has no method reset_parameters() {remedy}")
        return
    made = {id(tensor) for tensor in real.values()}
    own = {id(tensor) for tensor in _tensors(part, recurse=False)}
    loaded = [(t, t.detach().clone()) for t in _tensors(part, recurse=True) if id(t) not in made | own]
    with torch.no_grad():
        reset()
        for tensor, value in loaded:  # pretrained, say: a parent that draws its children anew must not touch them
            tensor.copy_(value)
    for key, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
        if must and tensor.isnan().any():
            raise ValueError(
                f"{name} was built on the meta device, and its reset_parameters() leaves out {key!r} {remedy}"
            )


def _tensors(module: nn.Module, recurse: bool) -> Iterator[Tensor]:
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)
