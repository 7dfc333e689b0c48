"""Finds out by trial whether an optimizer steps each parameter by itself.

Under `zero1`, `pp` and `ps` a rank steps some of the parameters, and lacks the gradients and the state of the others.
The result is that of one process only if the others don't matter. So copies of the optimizer step small parameters: one
copy has the gradients of all parameters, others have those of a part, as a rank has, and other values in the rest. The
parameters of the part must move as in the first copy. The parts are chosen so that any two parameters are separated.

What the trial must not miss, each a way to depend on other parameters now and then:
- only some parameters matter to each other (of one shape, of one group): all are tried, up to `_MOST_TRIED` of them;
- only from some step on, or in every k-th step: up to `_MOST_STEPS` steps, and those around `_LATE_STEPS`, to which its
  counters are set;
- only above a size: the true shapes, or a second trial with the largest tensors, up to `_LARGEST` values each;
- only above or below a magnitude: gradients differ by step and parameter, over six orders of magnitude, and in two of
  the late steps one parameter has a gradient that is not finite;
- not within `step()`: methods without arguments, such as `eval()` of optimizers that keep averages, are called as well;
- not by what it reads: an optimizer that moves parameters before it has the closure compute their gradients, as SAM
  does, needs all of them moved.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import math
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .._compat.torch import TorchDispatchMode
from .collectives import NoneAtAll

__all__ = ["Habits", "habits_of"]

_MOST_TRIED = 64
"""Parameters that get gradients; of more, some of each group and number of dims."""
_FEWEST_STEPS, _MOST_STEPS, _MOST_PARAMETER_STEPS = 16, 64, 1024
"""Steps; how many depends on the parameters, so that a trial takes about half a second on one core."""
_LATE_STEPS, _NUM_LATE = (100, 1000, 4096, 10_000, 720_720), 5
"""Steps at which warm-ups have ended, each a multiple of many intervals, and the number of steps around each."""
_SMALL_MODULE = 2**16
"""Values of a module that is tried in its true shapes for all steps."""
_SMALL = 16
"""Values of a parameter of any other module; 2 of a dim are enough for a step to be that of a matrix."""
_MOST_LARGE, _LARGEST, _STEPS_OF_LARGE = 8, 2**18, 2
"""The trial of sizes: parameters, the values of each (512 x 512, of which an optimizer may need eigenvalues), steps."""
_MOST_BY_ELEMENTS, _LARGEST_BY_ELEMENTS = 3, 2**22
"""As above, for an optimizer that multiplies and decomposes no matrices; one step."""
_OF_MATRICES = ("mm", "bmm", "addmm", "baddbmm", "linalg", "_linalg", "svd", "cholesky", "qr", "inverse", "convolution")
"""Beginnings of the names of operators that take more than time in proportion to the number of values."""
_LEFT_OUT = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that are not copied: a scheduler sets `step`, and hooks are the user's."""
_NO_COUNTERS = ("params", "defaults", *_LEFT_OUT)
_MAX_DEPTH = 4
"""Levels of containers in which counters are looked for: an optimizer, its state, that of a parameter, and a list."""


@dataclasses.dataclass(frozen=True)
class Habits:
    """The habits of an optimizer: anything it does beside stepping each parameter by itself."""

    name: str
    """The optimizer's class."""
    reads_others: bool = False
    """Whether a parameter's step depends on other parameters."""
    writes_by: str = ""
    """A method that changes parameters outside of `step`; "": none does."""
    moves_first: bool = False
    """Whether it has gradients computed when a step has changed parameters already."""
    communicates: bool = False
    """Whether it begins collectives: ranks step a share of the parameters, and gather the others."""
    not_tried: str = ""
    """Why the optimizer can't be tried; "": it was."""

    def also(self, other: "Habits") -> "Habits":
        """Returns these habits and those that another trial has shown of reading others."""
        return dataclasses.replace(
            self,
            reads_others=self.reads_others or other.reads_others,
            moves_first=self.moves_first or other.moves_first,
        )

    @property
    def of_others(self) -> str:
        """Why a rank that has some of the parameters only would step to other weights; "": it would not."""
        if self.reads_others:
            return (
                f"{self.name} steps a parameter by what it knows of others too, such as a norm of all gradients or a"
                " common estimate"
            )
        if self.communicates:
            return f"{self.name} communicates with other ranks in its step, each of which has to have all parameters"
        if self.not_tried:
            return f"whether {self.name} steps each parameter by itself could not be tried out ({self.not_tried})"
        return ""

    @property
    def of_others_or_state(self) -> str:
        """As `of_others`, where a rank has all parameters, but the optimizer's state of some only."""
        if not self.of_others and self.writes_by:
            return f"{self.name}.{self.writes_by}() changes parameters by the optimizer's state, outside of step()"
        if not self.of_others and self.moves_first:
            return f"{self.name} changes all parameters within a step, and then computes gradients there"
        return self.of_others


def habits_of(optimizer: Optimizer) -> Habits:
    """Tries an optimizer out; the same answer on all ranks. Takes no time for torch's own."""
    kind = type(optimizer)
    name = kind.__name__
    if isinstance(optimizer, LBFGS):
        return Habits(name, reads_others=True)
    if _has_other_step(optimizer):
        return Habits(name, not_tried="its `step` was replaced by a function of the user's")
    if (
        kind.__module__.startswith("torch.optim.") or not optimizer.param_groups
    ):  # Lightning's in place of None has none
        return Habits(name)
    error = ""
    for in_double in (True, False):  # double precision shows the least, but some kernels lack it, or need a GPU
        try:
            with torch.random.fork_rng(devices=[]), _without_compiling(), NoneAtAll(_CommunicatesError):
                habits = _tried(optimizer, functools.partial(_Copy, in_double=in_double))
                if habits.reads_others:  # perhaps noise only, of which each draw depends on those before it
                    habits = _tried(optimizer, functools.partial(_Copy, in_double=in_double, draws_equal=True))
            return habits
        except _CommunicatesError:
            return Habits(name, communicates=True)
        except Exception as raised:
            error = error or f"{type(raised).__name__}: {raised}"
    return Habits(name, not_tried=error)


def _has_other_step(optimizer: Optimizer) -> bool:
    """Whether the object has a `step` of its own; a scheduler's wrapper of its class's `step` does not count."""
    step = vars(optimizer).get("step")
    return step is not None and _innermost(step) is not _innermost(type(optimizer).step)


def _innermost(method: Any) -> Any:
    return inspect.unwrap(getattr(method, "__func__", method))


def _without_compiling() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled functions as they are written: compiling them for each small shape takes minutes."""
    is_used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_used else contextlib.nullcontext()


def _tried(optimizer: Optimizer, make: Callable[..., "_Copy"]) -> Habits:
    """Returns the habits that steps of copies show.

    Raises:
        Exception: the optimizer can't step its copies.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tried = _some_of_each_class(optimizer)
    is_small = sum(p.numel() for p in parameters) <= _SMALL_MODULE
    shapes = [p.shape if is_small else _cut(p.shape, _SMALL) for p in parameters]
    num_steps = min(max(_MOST_PARAMETER_STEPS // max(len(tried), 1), _FEWEST_STEPS), _MOST_STEPS)
    make = functools.partial(make, optimizer, shapes, ends=(tried[0], tried[-1]))
    habits = _compared(make, tried, lambda copy: copy.path(num_steps))
    if not habits.reads_others:
        with contextlib.suppress(_NothingMovedError):  # it may not be able to step so late
            habits = habits.also(_compared(make, tried, _Copy.late_path))
    if is_small or habits.reads_others:
        return habits
    largest = sorted(tried, key=lambda index: -parameters[index].numel())[:_MOST_LARGE]
    for index in largest:
        shapes[index] = _cut(parameters[index].shape, _LARGEST)
    operators = _Operators()
    with operators:
        habits = habits.also(_compared(make, largest, lambda copy: copy.path(_STEPS_OF_LARGE)))
    if operators.any_of_matrices or parameters[largest[0]].numel() <= _LARGEST:
        return habits
    largest = largest[:_MOST_BY_ELEMENTS]
    for index in largest:
        shapes[index] = _cut(parameters[index].shape, _LARGEST_BY_ELEMENTS)
    return habits.also(_compared(make, largest, lambda copy: copy.path(1)))


def _some_of_each_class(optimizer: Optimizer) -> list[int]:
    """Returns indices of parameters: of each group, number of dims and set of attributes the first ones, in turn."""
    classes: dict[Any, list[int]] = {}
    numbered = enumerate((number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"])
    for index, (group, p) in numbered:
        if p.is_floating_point() and p.numel():
            classes.setdefault((group, p.dim(), tuple(sorted(vars(p)))), []).append(index)
    turns = itertools.zip_longest(*classes.values())
    return [index for turn in turns for index in turn if index is not None][:_MOST_TRIED]


def _cut(shape: torch.Size, most_values: int) -> torch.Size:
    """Returns a shape with at most so many values, by halving the longest dim; as like as they are, all stay over 1."""
    sizes = list(shape)
    while math.prod(sizes) > most_values and max(sizes) > 2:
        longest = sizes.index(max(sizes))
        sizes[longest] = (sizes[longest] + 1) // 2
    return torch.Size(sizes)


def _compared(
    make: Callable[[list[int]], "_Copy"],
    tried: list[int],
    walk: Callable[["_Copy"], list[list[Tensor]]],
) -> Habits:
    """Compares what `walk` does with all tried parameters with what it does with parts of them; returns the habits.

    Args:
        make: makes a copy in which some parameters get gradients.
        tried: indices of the parameters.
        walk: returns the values of all parameters before and after each step of a copy.

    Raises:
        _NothingMovedError: all steps have left the parameters as they were, which shows nothing.
    """
    whole = make(tried)
    path = walk(whole)
    habits = Habits(whole.name, writes_by=whole.writes_by, moves_first=whole.moves_first)
    if all(torch.equal(path[0][index], values[index]) for values in path for index in tried):
        raise _NothingMovedError("no parameter moved in the trial")
    for part in _parts(tried):
        try:
            path_of_part = walk(make(part))
        except Exception:
            return dataclasses.replace(habits, reads_others=True)  # it can't step without the others
        if not all(_moves_alike(path, path_of_part, index) for index in part):
            return dataclasses.replace(habits, reads_others=True)
    return habits


def _parts(indices: list[int]) -> Iterator[list[int]]:
    """Yields parts such that of any two indices, each is in a part without the other one: by the bits of positions."""
    for bit in range((len(indices) - 1).bit_length()):
        for value in (0, 1):
            yield [index for position, index in enumerate(indices) if position >> bit & 1 == value]


def _moves_alike(path: list[list[Tensor]], other: list[list[Tensor]], index: int) -> bool:
    """Whether a parameter takes the same steps on two paths, up to rounding."""
    for before, after, moved in zip(path, path[1:], other[1:], strict=False):
        # 1e-6 of the step: the same operators on the same numbers, possibly in other vectors. 1e-13: what a step of
        # double precision loses beside a large parameter.
        if not after[index].isfinite().all():
            if moved[index].isfinite().all():
                return False
            continue
        tolerance = 1e-6 * (after[index] - before[index]).abs().max() + 1e-13 * after[index].abs().max()
        if not torch.allclose(moved[index], after[index], rtol=0, atol=float(tolerance), equal_nan=True):
            return False
    return True


class _Copy:
    """A copy of an optimizer on parameters of other shapes, some of which get gradients.

    Args:
        optimizer: stays as it is.
        shapes: the shapes of all parameters, in the order of the groups.
        part: indices of the parameters with gradients; the others have other values than in a copy in which they have.
        ends: the two parameters whose gradients are not finite in one of the last steps each, if they are in the part.
        in_double: computes in double precision, on the CPU; else in the precision and on the device of the parameters.
        draws_equal: draws the same random numbers for each parameter and step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shapes: list[torch.Size],
        part: list[int],
        *,
        ends: tuple[int, int],
        in_double: bool,
        draws_equal: bool = False,
    ) -> None:
        self._part = set(part)
        self._ends = ends
        self.name = type(optimizer).__name__
        self.writes_by = ""
        self.moves_first = False
        self.num_steps = 0
        self._latest: list[Tensor] = []
        self._not_finite: int | None = None
        """The parameter whose gradient is not finite."""
        self._draws_equal = draws_equal
        self._generator = torch.Generator()
        originals = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = [
            _made(p, shape, index, index in self._part, in_double=in_double)
            for index, (p, shape) in enumerate(zip(originals, shapes, strict=True))
        ]
        memo: dict[int, Any] = {}
        for original, parameter in zip(originals, self._parameters, strict=True):
            memo[id(original)] = parameter
            for value in optimizer.state.get(original, {}).values():  # some optimizers create it with the parameters
                if isinstance(value, Tensor) and value.shape == original.shape:
                    memo[id(value)] = _cut_state(value, parameter)
        self._optimizer = memo[id(optimizer)] = object.__new__(type(optimizer))
        copied = {name: copy.deepcopy(value, memo) for name, value in vars(optimizer).items() if name not in _LEFT_OUT}
        vars(self._optimizer).update(copied, **{name: OrderedDict() for name in _LEFT_OUT[1:]})
        for group in self._optimizer.param_groups:
            if isinstance(group.get("lr"), (int, float, Tensor)):  # a warm-up begins with 0, and nothing would move
                group["lr"] = group["lr"].clamp(min=1e-3) if isinstance(group["lr"], Tensor) else max(group["lr"], 1e-3)

    def path(self, num_steps: int) -> list[list[Tensor]]:
        """Steps, then calls the methods without arguments; returns the parameters' values before and after each."""
        if hasattr(self._optimizer, "train"):  # some refuse to step before it is called
            self._optimizer.train()
        path = [self._values()]
        with _EqualDraws() if self._draws_equal else contextlib.nullcontext():
            for _ in range(num_steps):
                path.append(self._step())
            for name in _methods_without_arguments(type(self._optimizer)):
                values = self._call(name)
                if not self.writes_by and not (_are_equal(path[-1], values[0]) and _are_equal(path[-1], values[1])):
                    self.writes_by = name
                path += values
        return path

    def late_path(self) -> list[list[Tensor]]:
        """Steps around `_LATE_STEPS`, at last with gradients that are not finite; ends where it can't step.

        Counters are the numbers that a step increases by one.
        """
        if hasattr(self._optimizer, "train"):
            self._optimizer.train()
        path = [self._values()]
        with _EqualDraws() if self._draws_equal else contextlib.nullcontext(), contextlib.suppress(Exception):
            path.append(self._step())  # which may create the state
            for late in _LATE_STEPS:
                before = {(id(table), key): number for table, key, number in _numbers(self._optimizer)}
                path.append(self._step())
                for table, key, number in list(_numbers(self._optimizer)):
                    if number - before.get((id(table), key), math.nan) == 1:
                        table[key] += late - _NUM_LATE // 2 - self.num_steps
                self.num_steps = late - _NUM_LATE // 2
                path += [self._step() for _ in range(_NUM_LATE)]
            for index in self._ends:
                self._not_finite = index
                path.append(self._step())
        return path

    def _step(self) -> list[Tensor]:
        """Steps; returns the parameters' values."""
        self._latest = self._values()
        closure: Any = functools.partial(self._closure, self.num_steps)
        type(self._optimizer).step(self._optimizer, closure)
        self.num_steps += 1
        return self._values()

    def _call(self, name: str) -> list[list[Tensor]]:
        """Calls a method, and enters what it returns if that is a context; returns the values within and after it."""
        within = None
        with contextlib.suppress(Exception):
            result = getattr(self._optimizer, name)()
            if isinstance(result, contextlib.AbstractContextManager):
                with result:
                    within = self._values()
        after = self._values()
        return [after if within is None else within, after]

    def _values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters]

    def _closure(self, number: int) -> Tensor:
        """Computes the gradients of step `number`, which depend on the parameter, as SAM expects it."""
        pairs = zip(self._parameters, self._latest, strict=True)
        self.moves_first |= not all(torch.allclose(p, before, 0, 0, equal_nan=True) for p, before in pairs)
        of_step = random.Random(number).uniform(-3, 3)
        for index, p in enumerate(self._parameters):
            p.grad = None
            if index in self._part:
                seed = number * len(self._parameters) + index
                noise = torch.randn(p.shape, generator=self._generator.manual_seed(seed), dtype=torch.float64)
                # Each of its own magnitude: under Adam, a factor that is common to all steps or parameters cancels.
                magnitude = 10 ** (of_step + random.Random(seed).uniform(-1, 1))
                p.grad = (noise + p.detach().cpu().sin()).mul_(magnitude).to(p)
                if index == self._not_finite:
                    p.grad.fill_(torch.inf)
        return torch.ones(())


def _numbers(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any, float]]:
    """Yields the numbers in an optimizer: the container that each lies in, its key there, and the number."""
    table = vars(value) if isinstance(value, Optimizer) else value
    if depth > _MAX_DEPTH or not isinstance(table, (MutableMapping, list)):
        return
    for key, item in table.items() if isinstance(table, MutableMapping) else enumerate(table):
        if isinstance(item, Tensor):
            if item.numel() == 1 and not item.requires_grad and not item.is_complex():
                yield table, key, float(item)
        elif type(item) in (int, float):
            yield table, key, item
        elif not isinstance(key, str) or key not in _NO_COUNTERS:
            yield from _numbers(item, depth + 1)


def _made(original: Tensor, shape: torch.Size, seed: int, has_gradient: bool, *, in_double: bool) -> nn.Parameter:
    """Returns a parameter of another shape; its values differ where it has no gradient."""
    device = "cpu" if in_double or original.is_meta else original.device
    if not original.is_floating_point():
        return nn.Parameter(torch.zeros(shape, dtype=original.dtype, device=device), requires_grad=False)
    generator = torch.Generator().manual_seed(2 * seed + has_gradient)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    parameter = nn.Parameter(values.to(device, torch.float64 if in_double else original.dtype))
    for name, value in vars(original).items():  # by which it may be stepped, as by `p.use_muon`
        if isinstance(value, Tensor):
            value = _cut_state(value, parameter) if value.shape == original.shape else value.detach().clone()
        vars(parameter)[name] = copy.deepcopy(value) if isinstance(value, (list, dict, set)) else value
    return parameter


def _cut_state(value: Tensor, parameter: Tensor) -> Tensor:
    if value.is_meta:
        return torch.zeros_like(parameter)
    part = value[tuple(slice(size) for size in parameter.shape)]
    return part.to(parameter.device, parameter.dtype if value.is_floating_point() else value.dtype, copy=True)


def _are_equal(values: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, values, others))


def _methods_without_arguments(kind: type) -> list[str]:
    """Returns the public methods that a class adds to torch's `Optimizer`, or overrides, if they need no arguments."""
    classes = [base for base in kind.__mro__ if base not in (Optimizer, object)]
    names = {name for base in classes for name, value in vars(base).items() if inspect.isfunction(value)}
    return sorted(name for name in names - {"step"} if name[0] != "_" and _needs_no_arguments(getattr(kind, name)))


def _needs_no_arguments(method: Any) -> bool:
    try:
        inspect.signature(method).bind(None)
    except (TypeError, ValueError):
        return False
    return True


class _NothingMovedError(RuntimeError):
    """A trial shows nothing."""


class _CommunicatesError(BaseException):
    """An optimizer begins a collective; not an `Exception`, so that no handler of one takes it for another error."""


class _Operators(TorchDispatchMode):
    """Notes whether any operator is of `_OF_MATRICES`."""

    def __init__(self) -> None:
        super().__init__()
        self.any_of_matrices = False

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        name = operator.__name__
        self.any_of_matrices |= name.startswith(_OF_MATRICES) and not name.startswith("linalg_vector_norm")
        return operator(*args, **(kwargs or {}))


class _EqualDraws(TorchDispatchMode):
    """Draws the same random numbers each time: noise does not depend on how many others draw before."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        if torch.Tag.nondeterministic_seeded in operator.tags:
            torch.default_generator.manual_seed(0)
        return operator(*args, **(kwargs or {}))
