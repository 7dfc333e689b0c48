"""Finds layers whose weights a forward uses without calling the layer, by reading its source.

Under `fsdp` a layer that is a unit is whole only while its own forward runs. In the forward of another module,
`functional.linear(x, self.embed.weight)` would use a shard.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["ANY", "weights_used_in"]

ANY = "*"
"""Placeholder for a layer that the source does not name: a variable, or an element of a list."""

_ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_FOREIGN = ("torch", "lightning", "torchmetrics")
_WEIGHTS = frozenset({"weight", "bias"})
_COMMON = frozenset({*dir(Tensor), *dir(nn.Module)})
"""Names that are usually methods of tensors, not of the user's modules: `x.to(...)`."""
_HARMLESS = frozenset({"device", "dtype", "shape", "ndim", "size", "dim", "numel", "requires_grad", "is_cuda"})

_OF_ALL_WEIGHTS = frozenset({"parameters", "named_parameters", "get_parameter", "state_dict", "_parameters"})


def weights_used_in(module: nn.Module, *, strictly: bool = False) -> set[str]:
    """The attributes whose `weight` or `bias` is used by `module` in any forward or step: ``{"head"}``.

    Called functions are followed if a name identifies them. A module's own weight (`self.weight`) does not count.

    Args:
        module: any module; FSDP2 may have replaced the classes of its parts.
        strictly: whether to read a weight's dtype counts, and to go through all parameters.
    """
    classes = {kind for submodule in module.modules() for kind in type(submodule).__mro__ if not _is_foreign(kind)}
    waiting = [getattr(kind, entry, None) for kind in classes for entry in _ENTRIES]
    seen: set[types.CodeType] = set()
    attributes: set[str] = set()
    while waiting:
        function = waiting.pop()
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, types.FunctionType) or _is_foreign(function) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        tree = _parsed(function)
        if tree is None:
            return {ANY}
        attributes |= set(_layers(tree, strictly))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr not in _COMMON:
                waiting += [getattr(kind, node.attr, None) for kind in classes]
            elif isinstance(node, ast.Name):
                waiting.append(function.__globals__.get(node.id))
    return attributes


def _is_foreign(candidate: Any) -> bool:
    return str(getattr(candidate, "__module__", "")).partition(".")[0] in _FOREIGN


def _parsed(function: types.FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):  # for example typed into a prompt
        return None


def _layers(tree: ast.AST, strictly: bool) -> Iterator[str]:
    names = _HARMLESS - {"dtype"} if strictly else _HARMLESS
    harmless = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in names}
    for node in ast.walk(tree):
        if strictly and isinstance(node, ast.Attribute) and node.attr in _OF_ALL_WEIGHTS:
            yield ANY
        if isinstance(node, ast.Attribute) and node.attr in _WEIGHTS and id(node) not in harmless:
            if isinstance(node.value, ast.Attribute):
                yield node.value.attr
            elif not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield ANY
        elif isinstance(node, ast.Call) and _asks_for_weight(node.func, node.args):
            yield ANY


def _asks_for_weight(function: ast.expr, arguments: Collection[ast.expr]) -> bool:
    names = {argument.value for argument in arguments if isinstance(argument, ast.Constant)}
    return isinstance(function, ast.Name) and function.id == "getattr" and not _WEIGHTS.isdisjoint(names)
