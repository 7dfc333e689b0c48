"""Plans pipeline stages: cuts a module, says which stages hold a parameter, and puts stand-ins where others do.

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
import os
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from ...attachments import carry_over
from ...data.samples import tensors_in
from ..callers import NOT_THE_USERS, CutError, is_outside, is_users, users_line
from ..units import block_lists, check_inside
from .remote_values import (
    CONTENT,
    FORM,
    MOVES,
    PLACES,
    READS,
    Draws,
    mark_origin,
    moved,
    origin_of,
    to_meta,
)

__all__ = ["RemoteTensor", "StagePlan", "plan_stages", "replace_absent"]

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
    device: torch.device | None = None,
) -> None:
    """Replaces parameters that only other stages hold by shapes on the meta device, under the same names.

    Args:
        module: changed in place.
        plan: changed in place: the shapes replace the parameters there, too.
        absent: the parameters.
        note: called with each of them and its shape.
        device: the device of this stage, on which user code is told that they are; None: the CPU.
    """
    RemoteTensor.told_device = device or torch.device("cpu")
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


# --- stand-ins for parameters that another pipeline stage holds, outside of a step: a shape and a name without content
# torch accepts tensors on the meta device silently: an average of weights in a hook (`p.lerp_(q, 0.01)`) would do
# nothing, and a norm of all gradients would be that of one stage. What user code computes with a `RemoteTensor` has no
# content either, and to write that into a `RemoteTensor` does nothing: so code that changes each parameter by itself (a
# maximum norm, a clamp, rows of zeros) has its effect on the stage that holds it. Code that reads such values, draws
# random numbers by them or writes them into a tensor with content gets an error that names the parameter. In a step,
# `RemoteValueMode` handles such tensors. torch, Lightning and this package may pass them on, since this code expects
# tensors without content. An optimizer may read the gradient: it is None.


_TORCH, _LIGHTNING, *_ = NOT_THE_USERS
_OPTIMIZERS = os.path.join(_TORCH, "optim", "")
_DISPATCH_FILES = tuple(
    _TORCH + path for path in ("overrides.py", "_tensor.py", os.path.join("utils", "_contextlib.py"))
)
"""Files of torch between a call and `__torch_function__`."""
_FOR_THE_USER = (
    os.path.join(_TORCH, "nn", "utils", ""),
    os.path.join(_TORCH, "nn", "modules", ""),
    os.path.join(_TORCH, "nn", "functional.py"),
    os.path.join(_TORCH, "nn", "init.py"),
    os.path.join(_TORCH, "functional.py"),
    os.path.join(_TORCH, "optim", "swa_utils.py"),
    os.path.join(_LIGHTNING, "pytorch", "utilities", "grads.py"),
)
"""Library code that computes with the values of its arguments, for its caller."""
_LOG = _LIGHTNING, os.path.join(NOT_THE_USERS[-1], "loop", "")
"""They log values, and accumulate them."""
_INIT = os.path.join(_TORCH, "nn", "init.py")
_AVERAGES = tuple(
    os.path.join(_LIGHTNING, "pytorch", "callbacks", name)
    for name in ("weight_averaging.py", "stochastic_weight_avg.py")
)
"""They compute each parameter's average by itself, into a copy that has no content where the parameter has none."""
_MAKES = os.path.join(_TORCH, "nn", "parameter.py")
_PASSES_ON = os.path.join(_TORCH, "nn", "modules", "module.py")


_STORAGES = {"untyped_storage", "storage", "__dlpack__"}
"""Calls that show that there is no content."""
_PASS_OVER = "read only those that `trainer.engine_strategy.keeps_state_of(p)` says this stage has, if that is enough"


class RemoteTensor(Tensor):
    """A tensor on the meta device; results of operations on it are of this class, too.

    User code is told that it is on the device of the stage: where it would pass over what is "meta", it would do less
    than in one process, without a word.
    """

    told_device = torch.device("cpu")
    beside: Sequence[nn.Parameter] = ()
    """The parameters of this stage, which have gradients when those of the other stages have."""
    without_gradient: ClassVar[set[int]] = set()
    """The ids of those that have none then: no step uses them, or a hook has dropped theirs."""

    @classmethod
    def parameter(cls, like: nn.Parameter, name: str) -> nn.Parameter:
        """Returns a parameter of the shape and dtype of `like`, with all that is attached to `like`."""
        parameter = nn.Parameter(torch.empty_like(like, device="meta").as_subclass(cls), like.requires_grad)
        carry_over(like, parameter)
        mark_origin(parameter, name)
        return parameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on the meta device.

        Raises:
            CutError: user code needs the values.
        """
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # torch: as the documentation of `__torch_function__` says
            name = getattr(func, "__name__", "")
            if name == "__deepcopy__":
                return _copied(*args)
            if name == "__reduce_ex__" and not isinstance(args[0], nn.Parameter):
                raise CutError(_why(name, args, kwargs))
            if name in ("__get__", "__set__"):
                name, is_read = func.__self__.__name__, name == "__get__"
                if (
                    name in PLACES
                    and is_read
                    and is_outside(next(frame for frame in _frames() if not _dispatches(frame)))
                ):
                    return getattr(torch.empty(0, device=cls.told_device), name)
                if name == "grad" and is_read:
                    return _gradient(*args)
                if name == "is_meta" and sys._getframe(1).f_code.co_filename == _INIT:  # it would draw no numbers
                    raise CutError(_why(name, args, kwargs))
                needs_content = name in CONTENT or name == "grad"
                if needs_content and not is_read and _is_computed(args):
                    return _write(name, *args)
            else:
                needs_content = name not in FORM
            result = func(*args, **kwargs) if not needs_content else _compute(func, name, args, kwargs)
            for tensor in tensors_in(result):
                if type(tensor) is Tensor and tensor.is_meta:
                    tensor.__class__ = cls
                    mark_origin(tensor, _name(args, kwargs))
        return result


def _name(args: Any, kwargs: Any) -> str:
    tensors = (t for t in tensors_in((args, kwargs)) if isinstance(t, RemoteTensor))
    return next(map(origin_of, tensors), "")


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        copied = tensor.detach().clone().as_subclass(RemoteTensor).requires_grad_(tensor.requires_grad)
        copied.__dict__.update(tensor.__dict__)
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def _is_computed(value: Any) -> bool:
    """Whether user code computes with a value: it has computed it, or asks now for what is to be done with it."""
    if any(isinstance(t, RemoteTensor) and not isinstance(t, nn.Parameter) for t in tensors_in(value)):
        return True
    return _is_for_the_user(next(frame for frame in _frames() if not _dispatches(frame)))


def _compute(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Runs an operation that needs content; what user code computes has none, too."""
    if not _is_computed((args, kwargs)):
        if name == "detach" and _makes_parameter():
            raise CutError(_why(name, args, kwargs))
        if name in MOVES:
            return moved(args, kwargs)
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:  # a library compares values, say
            raise CutError(_why(name, args, kwargs)) from error
    frame = next(frame for frame in _frames() if not _dispatches(frame))
    # In backward, as in a backward hook of a module, the result would be mixed with gradients of this stage.
    in_backward = torch._C._current_graph_task_id() != -1
    if in_backward or name in READS | _STORAGES or _writes_content(name, args, kwargs) or _is_of_library(frame):
        raise CutError(_why(name, args, kwargs))
    if name in MOVES:
        return moved(args, kwargs)
    on_meta, others = apply_to_collection((args, kwargs), Tensor, to_meta)
    others = {key: value for key, value in others.items() if key != "device"}
    try:
        with torch.no_grad(), Draws() as draws:
            result = func(*on_meta, **others)
    except (NotImplementedError, RuntimeError) as error:
        raise CutError(_why(name, args, kwargs)) from error
    if draws.any:  # the stage that has the values would draw other numbers than one process
        raise CutError(_why(name, args, kwargs))
    return result


def _is_of_library(frame: types.FrameType) -> bool:
    """Whether a library computes with the values of several parameters, calls a module, or logs, for the user."""
    file = frame.f_code.co_filename
    return file.startswith((*_FOR_THE_USER, *_LOG)) and file not in (_INIT, *_AVERAGES)


def _writes_content(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an operation writes into a tensor with content."""
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i")
    targets = [*(args[:1] if is_in_place and name != "__invert__" else ()), kwargs.get("out")]
    return any(not tensor.is_meta for tensor in tensors_in(targets))


def _write(name: str, target: Tensor, value: Any = None) -> None:
    """Sets an attribute of `target`: does nothing if another stage has it, but for a gradient that is dropped."""
    if not isinstance(target, RemoteTensor):
        raise CutError(_why(name, value, ()))
    if name == "grad":
        change = RemoteTensor.without_gradient.add if value is None else RemoteTensor.without_gradient.discard
        change(id(target))


def _gradient(tensor: Tensor) -> Tensor | None:
    """Returns what stands for the gradient where the user's own code changes it; None for others."""
    if not isinstance(tensor, nn.Parameter) or _may_know_gradient():
        return None
    frame = next(frame for frame in _frames() if not _dispatches(frame))
    if not is_users(frame):
        raise CutError(
            f"{users_line()} reads the gradient of {origin_of(tensor)!r}, which another pipeline stage has: a"
            " norm of these gradients would be that of one stage. Set gradient_clip_val, call"
            " self.clip_gradients(...) in configure_gradient_clipping, or read trainer.grad_norm, which are those"
            f" of all stages; {_PASS_OVER}; or choose another strategy, such as 'fsdp'."
        )
    if not tensor.requires_grad or id(tensor) in RemoteTensor.without_gradient:
        return None
    trained = [p for p in RemoteTensor.beside if p.requires_grad]
    if trained and all(p.grad is None for p in trained):  # before the first backward, or zeroed since
        return None
    gradient = torch.empty_like(tensor, device="meta").detach().as_subclass(RemoteTensor)
    mark_origin(gradient, origin_of(tensor))
    return gradient


def _why(name: str, args: Any, kwargs: Any) -> str:
    hook = _hook_that_calls_the_model()
    if hook is not None:
        return (
            f"the model is called in {hook}, at {users_line()}: the stages of a pipeline run it together, in its steps"
            f" only, and this one has no values of {_name(args, kwargs)!r}. Call it in training_step, validation_step,"
            " test_step or predict_step (a sample to look at can be a batch of the validation loader), or choose"
            " another strategy, such as 'fsdp'."
        )
    return (
        f"{users_line()} needs the values of {_name(args, kwargs)!r}, which another pipeline stage has ({name}): a hook"
        " may write into each parameter, or gradient, only what it computes from this one. Do this in the optimizer or"
        " in the step; clip gradients by gradient_clip_val or self.clip_gradients(...);"
        f" {_PASS_OVER}; or choose another strategy, such as 'fsdp'."
    )


def _hook_that_calls_the_model() -> str | None:
    """Returns ``"Class.hook"`` of a hook of the user's that runs a forward outside of the steps; None without one."""
    runs_forward = False
    for frame in filter(is_users, _frames()):
        code = frame.f_code
        name = code.co_name
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None  # self, whatever its name is
        runs_forward |= name == "forward"
        if name.startswith("on_") and isinstance(owner, (LightningModule, Callback)):
            return f"{type(owner).__name__}.{name}" if runs_forward else None
    return None


def _makes_parameter() -> bool:
    """Whether user code makes a parameter of a tensor."""
    frames = (frame for frame in _frames() if not _dispatches(frame))
    return next(frames).f_code.co_filename == _MAKES and is_users(next(frames))


def _dispatches(frame: types.FrameType) -> bool:
    """Whether a frame passes a call on for another one: torch's, or a mode's of the user's that counts calls, say."""
    code = frame.f_code
    return code.co_filename.startswith(_DISPATCH_FILES) or code.co_name == "__torch_function__"


def _may_know_gradient() -> bool:
    """Whether the caller is an optimizer, or a library that does not compute with the gradient for the user."""
    is_for_user = False
    for frame in _frames():
        file = frame.f_code.co_filename
        if _dispatches(frame):
            continue
        if frame.f_code.co_name == "clip_grad_value_":  # it clips each element by itself
            return True
        if (file.startswith(_OPTIMIZERS) and not _is_for_the_user(frame)) or isinstance(
            frame.f_locals.get("self"), Optimizer
        ):
            return True
        if not _is_for_the_user(frame):
            return not is_for_user
        is_for_user = True
    return not is_for_user


def _is_for_the_user(frame: types.FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_users(frame) or (file.startswith(_FOR_THE_USER) and file != _PASSES_ON)


def _frames() -> Iterator[types.FrameType]:
    """Yields the frames outside of this module, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            yield frame
        frame = frame.f_back
