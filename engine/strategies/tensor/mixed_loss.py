"""Handles losses that add plain tensors to split parameters, such as a penalty over `self.parameters()`.

Outside of regions activations are plain tensors and split parameters are DTensors. Their sum is a DTensor, and autograd
gives both a DTensor as gradient; the plain part of the graph needs a plain tensor.
"""

from typing import Any

from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from ..._compat.torch import tree_map_only

__all__ = ["give_plain_gradients"]

# autograd: the nodes that turn a DTensor into a plain tensor (`_Leave` of styles.py, torch's to_local) or back (torch's
# from_local). They convert the gradients, too, so the graph below them needs nothing.
_IS_SPLIT = {"_LeaveBackward": False, "_ToTorchTensorBackward": False, "_FromTorchTensorBackward": True}


def give_plain_gradients(loss: Any) -> None:
    """Hooks the graph of `loss` so that its plain tensors get plain gradients; does nothing if `loss` is plain.

    Args:
        loss: the output of a step: a tensor, or a nested value with tensors.
    """
    tree_map_only(DTensor, _hook_plain_inputs, loss)


def _hook_plain_inputs(loss: DTensor) -> None:
    if loss.grad_fn is None:
        return
    is_split: dict[Node, bool] = {}
    """Whether the output of a node is a DTensor: one of its inputs was."""
    hooked: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(loss.grad_fn, False)]
    while stack:
        node, inputs_are_known = stack.pop()
        if node in is_split:
            continue
        if type(node).__name__ in _IS_SPLIT:
            is_split[node] = _IS_SPLIT[type(node).__name__]
            continue
        inputs = [source for source, _ in node.next_functions if source is not None]
        if not inputs_are_known:
            stack += [(node, True), *((source, False) for source in inputs)]
            continue
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad
        is_split[node] = isinstance(leaf, DTensor) or any(is_split[source] for source in inputs)
        for source in inputs if is_split[node] else ():
            if not is_split[source] and source not in hooked:
                hooked.add(source)
                source.register_prehook(_plain)


def _plain(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)
