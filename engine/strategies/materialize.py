"""Real weights for a module that was built on the meta device, equal to those it would have been built with.

A module's constructor builds its children first and then draws its own weights; calling `reset_parameters` in that same
order, children before parents, draws the same numbers from the same seed. (A module that copies finished children, as
`nn.TransformerEncoder` does, has layers that are alike; here each is drawn afresh.) Each sub-module is handed on as
soon as it is complete, so that a strategy can shard it before the next one takes memory.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

__all__ = ["has_meta_tensors", "materialize"]


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer of `module` has a shape but no memory."""
    return any(tensor.is_meta for tensor in _tensors(module, recurse=True))


def materialize(module: nn.Module, on_complete: Callable[[nn.Module], None] = lambda _: None) -> None:
    """Gives every meta tensor of `module` memory on the CPU and its initial value; tied tensors stay tied.

    Args:
        module: changed in place; what is not on the meta device keeps its values.
        on_complete: called with each sub-module, children before parents, once its weights are there.

    Raises:
        ValueError: a sub-module holds meta tensors and has no ``reset_parameters()`` to fill them.
    """
    real: dict[int, Tensor] = {}  # by identity of the meta tensor: one that two modules share is made once
    kept: list[Tensor] = []  # keeps the meta tensors alive, and with them their identities

    def visit(name: str, part: nn.Module) -> bool:
        was_meta = [visit(f"{name}.{child}" if name else child, sub) for child, sub in part.named_children()]
        fresh = _give_memory(part, real, kept)
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        if fresh or any(was_meta):
            if callable(reset):
                with torch.no_grad():
                    reset()
            elif fresh:
                raise ValueError(
                    f"{name or type(part).__name__} ({type(part).__name__}) was built on the meta device and has no"
                    " method reset_parameters() to give its tensors their first values: add one, or build the module"
                    " on the CPU."
                )
        on_complete(part)
        return fresh or any(was_meta)

    visit("", module)


def _give_memory(part: nn.Module, real: dict[int, Tensor], kept: list[Tensor]) -> bool:
    """Replaces the meta tensors that `part` itself holds; True if one of them is new."""
    fresh = False
    for table in (part._parameters, part._buffers):
        for key, tensor in table.items():
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in real:
                fresh = True
                kept.append(tensor)
                memory = torch.empty_like(tensor, device="cpu")
                real[id(tensor)] = (
                    nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
                )
            table[key] = real[id(tensor)]  # type: ignore[assignment]
    return fresh


def _tensors(module: nn.Module, recurse: bool) -> Iterator[Tensor]:
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)
