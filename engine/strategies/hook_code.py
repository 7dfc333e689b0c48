"""Finds in the bytecode of the user's hooks, before a run, what a strategy can't see when they run.

Followed are the methods of the module, of callbacks and of schedulers, hooks of optimizers, and the functions and
classes that these name, to `_MAX_CALLS` calls, except for those of other packages that are installed. What `getattr`
names is not found. A function that asks `keeps_state_of` knows that a rank has a part.
"""

import dis
import functools
import linecache
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..attachments import is_filled
from ..reliability.tracebacks import is_installed
from .callers import LIBRARIES, names_in

__all__ = ["check_types", "reader_of_state"]

_MAX_CALLS = 3
_BEFORE_SPLIT = ("__init__", "configure_model", "setup", "prepare_data")
"""They run while parameters are whole, and before there are optimizers."""
_OF_TRAINERS_STATE = ("fn", "status", "stage")
_Instructions = list[dis.Instruction]
_Finds = Callable[[_Instructions, int, "str | None"], bool]
"""Whether code asks for something at an instruction, given the name of `self`."""


def reader_of_state(owners: Iterable[Any], optimizers: Iterable[Optimizer]) -> str:
    """Returns the line of code that reads an optimizer's state, as `users_line` does; "" if there is none.

    Args:
        owners: the module, callbacks, schedulers.
        optimizers: their own hooks count, too; what they do in a step is seen by trial.
    """
    # torch: the tables of an optimizer's hooks.
    tables: Any = [table for o in optimizers for table in (o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks)]
    hooks = [hook for table in tables for hook in table.values()]
    words = {"state", "state_dict"}
    return _line(owners, _reads_state, words, about="opt") or _line(hooks, _reads_state, words)


def check_types(owners: Iterable[Any], strategy: str) -> None:
    """Checks that hooks do not compare types of values with `Parameter`, or `Tensor`: a DTensor's is another one.

    Raises:
        TypeError: one does.
    """
    if line := _line(owners, _compares_type, {"Parameter", "Tensor"}):
        raise TypeError(
            f"{line} compares the type of a value with that of parameters, their data or gradients: under {strategy}"
            " these are of type DTensor, so this would pass over all of them. Write `isinstance(p, nn.Parameter)`, or"
            " choose another strategy, such as 'ddp'."
        )


def _line(owners: Iterable[Any], finds: _Finds, words: set[str], about: str = "") -> str:
    for function, is_method in _functions(owners, about):
        named = _words(function.__code__)
        if not words & named or "keeps_state_of" in named:
            continue
        me = function.__code__.co_varnames[0] if is_method and function.__code__.co_argcount else None
        if place := _place(function.__code__, finds, me):
            file, line = place
            return f'{file}:{line} in {function.__name__}: "{linecache.getline(file, line).strip()}"'
    return ""


def _place(code: types.CodeType, finds: _Finds, me: str | None) -> tuple[str, int] | None:
    instructions, line = list(dis.get_instructions(code)), code.co_firstlineno
    for index, instruction in enumerate(instructions):
        positions: Any = getattr(instruction, "positions", None)  # from Python 3.11 on
        line = (positions.lineno if positions else instruction.starts_line) or line
        if finds(instructions, index, me):
            return code.co_filename, line
    inner = (_place(constant, finds, me) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return next(filter(None, inner), None)


def _reads_state(instructions: _Instructions, index: int, me: str | None) -> bool:
    instruction, before = instructions[index], instructions[max(0, index - 4) : index]
    if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return False
    if instruction.argval == "state_dict":  # a module has one, too
        return any("opt" in str(near.argval).lower() for near in before)
    before = [near for near in before if near.opname not in ("COPY", "DUP_TOP")]  # self.state += 1
    is_own = bool(before) and me is not None and _last(before[-1].argval) == me
    following = instructions[index + 1].argval
    return instruction.argval == "state" and not is_own and following not in _OF_TRAINERS_STATE


def _last(names: Any) -> Any:
    return names[-1] if isinstance(names, tuple) else names  # from Python 3.13 on, two variables at once


def _compares_type(instructions: _Instructions, index: int, me: str | None) -> bool:
    # `type(p.data) is Tensor` as well; other tensors are no parts.
    of_data = {"data", "grad"} & {near.argval for near in instructions[max(0, index - 8) : index]}
    if instructions[index].argval != "Parameter" and not (instructions[index].argval == "Tensor" and of_data):
        return False
    names = {instruction.argval for instruction in instructions if isinstance(instruction.argval, str)}
    if "DTensor" in names or not names & {"type", "__class__"}:
        return False
    for instruction in instructions[index + 1 : index + 7]:  # `nn.Parameter is type(p)` is the longest
        if instruction.opname in ("IS_OP", "CONTAINS_OP") or instruction.argval in ("==", "!="):
            return True
        if instruction.opname.startswith(("POP_JUMP", "JUMP", "STORE", "RETURN")):
            return False
    return False


def _functions(owners: Iterable[Any], about: str) -> Iterator[tuple[types.FunctionType, bool]]:
    """Yields each function of the user's code once, and whether it is a method.

    Args:
        owners: where the code begins.
        about: a part of a name that a function, or one that calls it, has to have: a batch has a state, too.
    """
    waiting: list[tuple[Any, int, bool]] = []
    for owner in owners:
        is_code = isinstance(owner, (types.FunctionType, types.MethodType, functools.partial))
        parts = [] if is_code else [type(owner), *(value for value in vars(owner).values() if _is_followed(value))]
        waiting += [(part, 0, False) for part in ([owner] if is_code else parts)]
    seen: set[int] = set()
    while waiting:
        value, depth, is_method = waiting.pop(0)
        is_method |= isinstance(value, (types.MethodType, property))
        while isinstance(value, (functools.partial, types.MethodType, staticmethod, classmethod, property)):
            value = getattr(value, "func", None) or getattr(value, "fget", None) or getattr(value, "__func__", None)
        if not isinstance(value, (type, types.FunctionType)):
            value = type(value)
        is_optimizers = isinstance(value, type) and issubclass(value, Optimizer)  # its steps are tried
        if id(value) in seen or depth > _MAX_CALLS or _package(value) in LIBRARIES or is_optimizers:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            kinds = [kind for kind in value.__mro__ if _package(kind) not in LIBRARIES]
            members = [item for kind in kinds for item in vars(kind).items() if item[0] not in _BEFORE_SPLIT]
            waiting += [(m, depth, isinstance(m, types.FunctionType)) for _, m in members if _is_code(m)]
            continue
        words = {*_words(value.__code__), *value.__code__.co_varnames}
        if depth == 0 and not any(about in word.lower() for word in words):
            continue
        yield value, is_method
        named = [value.__globals__[name] for name in names_in(value.__code__) if name in value.__globals__]
        named += [cell.cell_contents for cell in value.__closure__ or () if is_filled(cell)]
        waiting += [(of, depth + 1, False) for of in named if _is_followed(of) and _is_near(of, value)]


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "").split(".")[0]


def _is_near(value: Any, caller: Any) -> bool:
    """Whether a value is of the package of its caller, or of a file of the user's."""
    module = sys.modules.get(str(getattr(value, "__module__", "")))
    return _package(value) == _package(caller) or not is_installed(getattr(module, "__file__", None) or "")


def _is_code(value: Any) -> bool:
    kinds = types.FunctionType, types.MethodType, staticmethod, classmethod, property, functools.partial
    return isinstance(value, kinds)


def _is_followed(value: Any) -> bool:
    """Whether it is code, or an object of a class of the user's, of which any method may be called."""
    if isinstance(value, (nn.Module, types.ModuleType, Optimizer)):
        return False
    return _is_code(value) or _package(value if isinstance(value, type) else type(value)) not in LIBRARIES


def _words(code: types.CodeType) -> set[str]:
    """Returns the names, and the texts, as in ``type(p).__name__ == "Parameter"``."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    return {*code.co_names, *texts}.union(*map(_words, inner))
