"""Which parts of a module are sharded, checkpointed or moved as one: its repeated blocks."""

from collections import Counter

from torch import nn

__all__ = ["shard_units"]


def shard_units(module: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one; everything else of `module` forms one last unit.

    A module may say so itself by a method ``shard_units()`` that returns some of its sub-modules. Otherwise they are
    the children of its longest `ModuleList` or `Sequential` whose children are all of one class. A block that shares a
    parameter with a module outside of it is left to the last unit, so that the two stay tied.

    Raises:
        ValueError: ``shard_units()`` returned something that is no sub-module of `module`.
    """
    if callable(getattr(module, "shard_units", None)):
        units = list(module.shard_units())  # type: ignore[operator]
        inside = set(module.modules()) - {module}
        for unit in units:
            if unit not in inside:
                raise ValueError(
                    f"{type(module).__name__}.shard_units() returned {type(unit).__name__}, which is none of its own"
                    " sub-modules: return modules that are found by `self.modules()`."
                )
    else:
        units = _repeated_blocks(module)
    owners = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return [unit for unit in units if _owns_its_parameters(unit, owners)]


def _repeated_blocks(module: nn.Module) -> list[nn.Module]:
    containers = (list(m) for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)))
    candidates = (
        children
        for children in containers
        if len({type(child) for child in children}) == 1
        and all(next(child.parameters(), None) is not None for child in children)
    )
    blocks = max(candidates, key=len, default=[])
    return blocks if len(blocks) > 1 else []


def _owns_its_parameters(unit: nn.Module, owners: Counter[int]) -> bool:
    """Whether no module outside of `unit` holds one of its parameters; `owners` counts the holders of each."""
    inside = Counter(id(p) for m in unit.modules() for p in m.parameters(recurse=False))
    return all(owners[key] == count for key, count in inside.items())
