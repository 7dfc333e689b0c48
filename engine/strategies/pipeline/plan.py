"""Plans pipeline stages: cuts a module into stages, and says which stages hold a parameter.

The units are the module's repeated blocks: the children of its longest `ModuleList` or `Sequential` of one class. Among
containers of equal length, one with trained parameters is preferred. Without such a container, they are the children of
its longest `Sequential`, or else of its longest `ModuleDict` of one class.
Neighbouring units form a stage, balanced by the number of parameters. A module outside of the units belongs to the
stage of the unit registered before it, or to the first; torchmetrics objects belong to the last. Parameters of the
modules that contain the units, such as a class token, and those that several stages share, by themselves or with the
module that has them, are held by each of these.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import nn
from torchmetrics import Metric

from ..units import block_lists, check_inside
from .remote_parameters import RemoteTensor

__all__ = ["StagePlan", "plan_stages", "replace_absent"]

_REMEDY = "give the module a method pipeline_stages() that returns its parts, one list of sub-modules for each stage"


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """The stages of a module, and the stages that hold each sub-module and parameter."""

    stages: tuple[tuple[nn.Module, ...], ...]
    """The units of each stage, in the order of their calls."""
    modules: dict[nn.Module, tuple[int, ...]]
    """For each sub-module, the stages that hold its own parameters: one, or several if it contains units of theirs, or
    lies in units of several."""
    holders: dict[nn.Parameter, tuple[int, ...]]
    """For each parameter, the stages that hold it."""

    @functools.cached_property
    def around(self) -> frozenset[nn.Module]:
        """The sub-modules that contain units of several stages."""
        inside = {part for stage in self.stages for unit in stage for part in unit.modules()}
        return frozenset(part for part, places in self.modules.items() if len(places) > 1 and part not in inside)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)


def plan_stages(module: nn.Module, num_stages: int) -> StagePlan:
    """Plans the stages of `module`: those of its ``pipeline_stages()``, or balanced ones.

    Raises:
        ValueError: the module has no units, or fewer than stages; or ``pipeline_stages()`` returned an invalid value.
    """
    if callable(getattr(module, "pipeline_stages", None)):
        stages = _user_stages(module, num_stages)
    else:
        name, units = _units(module)
        if len(units) < num_stages:
            raise ValueError(
                f"{type(module).__name__} can't be cut into {num_stages} stages: its longest list of blocks, {name!r},"
                f" has {len(units)}. Ask for at most {len(units)}, or {_REMEDY}."
            )
        stages = _balanced(units, _outside(module, units), num_stages)
    modules = dict(_assign_modules(module, stages))
    holders: dict[nn.Parameter, dict[int, None]] = defaultdict(dict)
    for part, places in modules.items():
        for parameter in part.parameters(recurse=False):
            holders[parameter].update(dict.fromkeys(places))
    return StagePlan(stages, modules, {parameter: tuple(sorted(places)) for parameter, places in holders.items()})


def replace_absent(
    module: nn.Module,
    plan: StagePlan,
    absent: Collection[nn.Parameter],
    note: Callable[[nn.Parameter, nn.Parameter], None] = lambda parameter, shape: None,
) -> None:
    """Replaces parameters that only other stages hold by shapes on the meta device, under the same names.

    Args:
        module: changed in place.
        plan: changed in place: the shapes replace the parameters there, too.
        absent: the parameters.
        note: called with each of them and its shape.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    shapes = {parameter: RemoteTensor.parameter(parameter, names[parameter]) for parameter in absent}
    for submodule in module.modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None and parameter in shapes:
                submodule._parameters[name] = shapes[parameter]
    for parameter, shape in shapes.items():
        note(parameter, shape)
        plan.holders[shape] = plan.holders.pop(parameter)


def _user_stages(module: nn.Module, num_stages: int) -> tuple[tuple[nn.Module, ...], ...]:
    kind = type(module).__name__
    stages = tuple(tuple(stage) for stage in module.pipeline_stages())  # type: ignore[operator]
    if len(stages) != num_stages or not all(stages):
        sizes = [len(stage) for stage in stages]
        raise ValueError(
            f"{kind}.pipeline_stages() returned lists of {sizes} sub-modules, but there are {num_stages} stages: return"
            " one list for each, with at least one sub-module."
        )
    units = [unit for stage in stages for unit in stage]
    check_inside(module, units, "pipeline_stages")
    nested = [submodule for unit in units for submodule in unit.modules()]
    if len(set(nested)) < len(nested):
        raise ValueError(
            f"{kind}.pipeline_stages() returned a sub-module twice, or one that is inside of another: name each part"
            " once."
        )
    return stages


def _units(module: nn.Module) -> tuple[str, list[nn.Module]]:
    """Returns the name of the container of the blocks, and the blocks."""
    sequentials = [
        (name, list(submodule)) for name, submodule in module.named_modules() if isinstance(submodule, nn.Sequential)
    ]
    # If an encoder and a decoder have equal lengths, the decoder is cut: its blocks get the encoder's output as an
    # argument.
    for candidates in (block_lists(module)[::-1], sequentials, block_lists(module, (nn.ModuleDict,))[::-1]):
        # If a student and a teacher have equal lengths, the student is cut, since it is trained.
        name, blocks = max(
            candidates, key=lambda candidate: (len(candidate[1]), _is_trained(candidate[1])), default=("", [])
        )
        units = list(dict.fromkeys(blocks))
        if len(units) > 1:
            return name, units
        if len(blocks) > 1:
            raise ValueError(
                f"the blocks {name!r} of {type(module).__name__} are one module, {len(blocks)} times, which lies on one"
                " pipeline stage: choose another strategy, such as 'fsdp'."
            )
    raise ValueError(
        f"{type(module).__name__} has no repeated blocks that a pipeline could be cut at, no ModuleList or ModuleDict"
        f" of one class and no Sequential: {_REMEDY}."
    )


def _is_trained(blocks: Collection[nn.Module]) -> bool:
    return any(parameter.requires_grad for block in blocks for parameter in block.parameters())


def _balanced(
    units: Sequence[nn.Module], outside: tuple[int, int], num_stages: int
) -> tuple[tuple[nn.Module, ...], ...]:
    """Cuts the units into runs with the least sum of squared numbers of parameters, by dynamic programming."""
    # Each unit counts as one more than its parameters, so that units without parameters are balanced, too.
    sizes = [1 + sum(p.numel() for p in unit.parameters()) for unit in units]
    sizes[0] += outside[0]
    sizes[-1] += outside[1]
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    # best[k][n]: for the first n units in k stages, the least cost, and where the last of these stages begins.
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for stage in range(1, num_stages + 1):
        ends = range(stage, len(units) - num_stages + stage + 1)
        best.append(_extended(best[-1], total, ends))
    stages: list[tuple[nn.Module, ...]] = []
    end = len(units)
    for row in reversed(best[1:]):
        begin = row[end][1]
        stages.insert(0, tuple(units[begin:end]))
        end = begin
    return tuple(stages)


def _extended(before: dict[int, tuple[int, int]], total: list[int], ends: range) -> dict[int, tuple[int, int]]:
    """Returns the row of `best` after `before`: where its last stage begins, and the cost, for each of its ends."""
    row: dict[int, tuple[int, int]] = {}
    # A later end never has an earlier begin, because the squares are convex: so ends and begins are halved.
    waiting = [(ends.start, ends.stop, min(before), max(before))]
    while waiting:
        low, high, first, last = waiting.pop()
        if low < high:
            end = (low + high) // 2
            begins = range(first, min(last + 1, end))
            row[end] = min((before[begin][0] + (total[end] - total[begin]) ** 2, begin) for begin in begins)
            begin = row[end][1]
            waiting += [(low, end, first, begin), (end + 1, high, begin, last)]
    return row


def _outside(module: nn.Module, units: Sequence[nn.Module]) -> tuple[int, int]:
    """Returns the numbers of parameters before and after the units."""
    sizes = [0, 0]
    inside = {submodule for unit in units for submodule in unit.modules()}
    for submodule, places in _assign_modules(module, (tuple(units[:1]), tuple(units[1:]))):
        if submodule not in inside:
            for index in places:
                sizes[index] += sum(p.numel() for p in submodule.parameters(recurse=False))
    return sizes[0], sizes[1]


def _assign_modules(
    module: nn.Module, stages: tuple[tuple[nn.Module, ...], ...]
) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
    """Yields each sub-module with the stages that hold its own parameters."""
    of_unit = {unit: index for index, stage in enumerate(stages) for unit in stage}
    inside: dict[nn.Module, dict[int, None]] = defaultdict(dict)
    for unit, index in of_unit.items():
        for submodule in unit.modules():
            inside[submodule][index] = None
    seen: set[nn.Module] = set()
    present = 0

    def visit(submodule: nn.Module) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
        nonlocal present
        if isinstance(submodule, Metric):  # on the last stage; no key of a dict, since its hash changes with its state
            inner = (module_inside for module_inside in submodule.modules() if not isinstance(module_inside, Metric))
            yield from ((module_inside, (len(stages) - 1,)) for module_inside in inner)
            return
        if submodule in seen:
            return
        if submodule in of_unit:
            present = of_unit[submodule]
        is_around = submodule not in of_unit and any(inner in of_unit for inner in submodule.modules())
        seen.add(submodule)
        around = {0, len(stages) - 1} if is_around else {present}
        yield submodule, tuple(sorted(inside.get(submodule, around)))
        for child in submodule.children():
            yield from visit(child)

    yield from visit(module)
