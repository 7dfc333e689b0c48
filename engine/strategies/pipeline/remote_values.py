"""Computes with values of other pipeline stages ("absent" values): tensors with a shape and no content.

Each stage runs the module's own step. Values that depend on parameters of other stages are tensors on the meta device;
while `RemoteValueMode` is entered, an operation on such a tensor runs on meta copies of all its arguments. All other
values (slices of the batch, masks, targets) are real on every stage. `x.device` of an absent value is the real device,
so tensors that a step creates for it (`torch.arange(n, device=x.device)`) are real as well. Dropout and other random
operations on it draw as many random numbers as on a real tensor, so that the next draws are equal on all stages.

The mode is a `TorchFunctionMode` (https://docs.pytorch.org/docs/stable/torch.overrides.html), which sees the calls as
the user wrote them: one call in the step is one call here.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat.torch import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves
from ...data.samples import tensors_in
from ..callers import CutError, is_of_fsdp, is_outside, users_line

__all__ = [
    "CONTENT",
    "FORM",
    "MOVES",
    "PLACES",
    "READS",
    "Calls",
    "Draws",
    "Key",
    "RemoteValueMode",
    "ValueSignature",
    "has_absent",
    "mark_origin",
    "moved",
    "origin_of",
    "to_meta",
]

_ELSEWHERE = (
    "Give the module a method pipeline_stages() that puts what belongs together into one stage, or choose another"
    " strategy, such as 'fsdp'."
)
READS = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__",
    "__format__", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "unique", "masked_select", "data_ptr",
}  # fmt: skip
"""Calls that read a value on the host, or whose result's shape depends on values."""
_NEW = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
    "new_zeros", "new_ones", "new_full", "new_empty",
}  # fmt: skip
"""Calls that use the shape of a tensor, and not its values."""
MOVES = {"to", "cpu", "cuda", "type_as"}
"""Calls that keep the values."""
FORM = {
    "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "get_device", "type",
    "is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_inference", "is_shared", "is_pinned",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__hash__", "__len__",
    "__repr__", "__format__", "__reduce_ex__", "zeros_like", "ones_like", "empty_like", "full_like",
    "new_zeros", "new_ones", "new_empty", "new_full", "has_names", "__deepcopy__",
}  # fmt: skip
"""Calls that need no content."""
_OF_GRAPH = {"requires_grad_", "register_hook", "retain_grad", "__format__"}
"""Those of the calls above that use the content if the stage has it."""
_SETS = Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_OF_GRAPHS = {torch.autograd.grad, Tensor.requires_grad_, _SETS}
"""Calls that compute gradients within a step, or make a leaf for them."""
PLACES = {"device", "is_meta", "is_cpu", "is_cuda", "is_xpu", "is_mps"}
"""Attributes that tell where a tensor is."""
CONTENT = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes that need content."""


# --- the count of calls of torch outside of units: the number of a call names its result on all stages
# Every stage runs the same step, and skips or runs the same units, so it makes the same calls in the same order. Calls
# that return a tensor are counted, those of units too. A signature (the name of the called function, shape and dtype)
# checks that two stages mean the same value.


Key = tuple[int, int]
"""The number of a call, from 1, and the index of a tensor in its result."""


class ValueSignature(NamedTuple):
    """The call that made a value, its shape and its dtype: equal on all stages for the same value."""

    call: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """Describes the value in words."""
        return f"what {self.call} returned, {list(self.shape)} of {self.dtype},"


class Calls:
    """Counts the calls of one run of the step, and keeps some of their results."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: dict[Key, Tensor] = {}
        """Results by key: those that `begin` was asked to keep; in a trial run, those without content."""
        self.signatures: dict[Key, ValueSignature] = {}
        """The signatures of all values of a trial run, by key."""
        self._kept_calls: frozenset[int] = frozenset()
        self._is_trial = False

    def begin(self, kept_keys: Iterable[Key], *, is_trial: bool) -> None:
        """Starts to count from 1.

        Args:
            kept_keys: keys of the results to keep.
            is_trial: whether this is a trial run.
        """
        self.count, self._is_trial = 0, is_trial
        self._kept_calls = frozenset(number for number, _ in kept_keys)
        self.end()
        self.signatures.clear()

    def end(self) -> None:
        """Releases the results."""
        self.kept.clear()

    def note(self, name: str, tensors: Collection[Tensor]) -> None:
        """Counts a call, if it returned tensors.

        Args:
            name: name of the called function or unit.
            tensors: the tensors that it returned.
        """
        if not tensors:
            return
        self.count += 1
        if not self._is_trial and self.count not in self._kept_calls:
            return
        for index, tensor in enumerate(tensors):
            key = self.count, index
            if not self._is_trial or tensor.is_meta:
                self.kept[key] = tensor
            if self._is_trial:
                self.signatures[key] = ValueSignature(name, tuple(tensor.shape), tensor.dtype)
                if tensor.is_meta and not isinstance(tensor, nn.Parameter):
                    tensor.__dict__.setdefault("key_in_step", key)

    def key_of(self, tensor: Tensor) -> Key | None:
        """Returns the key of a value without content, in a trial run; None if no counted call returned it."""
        key: Any = tensor.__dict__.get("key_in_step")
        return key if key is not None and self.kept.get(key) is tensor else None


# --- values without content


class ValueSource(Protocol):
    """Supplies values that this stage has received from other stages; see `received_values.py`."""

    calls: Calls

    def supply(self, tensor: Tensor) -> Tensor | None:
        """Returns the content of an absent tensor; None if the stage does not have it."""

    def check_graph(self, func: Any, args: Any, kwargs: Any) -> None:
        """Called before one of `_OF_GRAPHS`; raises CutError if it needs the graph of another stage."""


class RemoteValueMode(TorchFunctionMode):
    """A mode in which operations on absent values return absent values.

    Args:
        device: device of this stage.
        is_buffer: whether a tensor is a buffer of the module. A write of an absent value into a buffer is ignored: the
            stage that holds the module does it.
        content: supplies the values that this stage's own part has received from others.
    """

    def __init__(
        self, device: torch.device, is_buffer: Callable[[Tensor], bool], content: ValueSource | None = None
    ) -> None:
        self._device = device
        self._is_buffer = is_buffer
        self._content = content
        self.tracks_mixing = False
        """Whether the stage's own part runs, which must not combine its values with absent ones."""
        self.mixing_line: str | None = None
        """The line of the user's code that first combined an absent value with one of this stage; None: none yet."""
        self.mixed_parameter = ""
        """The name of the parameter that was the absent value there; empty if it was no parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tracks_mixing and self._content is not None and func in _OF_GRAPHS:
            self._content.check_graph(func, args, kwargs)
        absent, real = _first_absent_and_real(args, kwargs)
        if absent is not None and self.tracks_mixing and _asks_for_content(func):
            with torch._C.DisableTorchFunctionSubclass():
                args, kwargs = apply_to_collection((args, kwargs), Tensor, self.with_content)
            absent, real = _first_absent_and_real(args, kwargs)
        if absent is None:
            result = func(*args, **kwargs)
        else:
            # torch: without `RemoteTensor.__torch_function__`, which would raise errors
            with torch._C.DisableTorchFunctionSubclass():
                result = self._without(func, args, kwargs, absent, real)
        if self._content is not None and not is_of_fsdp(sys._getframe(1)):
            tensors = (result,) if isinstance(result, Tensor) else tuple(tensors_in(result))
            self._content.calls.note(getattr(func, "__name__", ""), tensors)
        return result

    def with_content(self, tensor: Tensor) -> Tensor:
        """Returns the content of an absent tensor if this stage has it, else the tensor itself."""
        content = self._content.supply(tensor) if tensor.is_meta and self._content is not None else None
        return tensor if content is None else content

    def _without(self, func: Any, args: Any, kwargs: Any, absent: Tensor, real: Tensor | None) -> Any:
        """Runs an operation without content.

        Args:
            func: the operation.
            args: arguments of the call.
            kwargs: keyword arguments of the call.
            absent: one of its absent arguments.
            real: one of its real arguments; None if it has none.
        """
        name = getattr(func, "__name__", "")
        attribute = func.__self__.__name__ if name == "__get__" else ""
        # The engine asks by `is_meta` what has no content.
        if attribute in PLACES and (attribute != "is_meta" or is_outside(sys._getframe(2))):
            return getattr(torch.empty(0, device=self._device), attribute)
        if name in READS:
            raise CutError(
                f"{users_line()} reads a value that another pipeline stage has ({name} of a tensor"
                f" {list(absent.shape)}). {_ELSEWHERE}"
            )
        if name in _NEW:
            return func(*args, **{**kwargs, "device": kwargs.get("device") or self._device})
        if real is not None:
            if _writes(name, args, kwargs) or "out" in kwargs:
                return self._write(args[0], name)
            if self.tracks_mixing and self.mixing_line is None and real.is_floating_point():
                self.mixing_line = users_line()
                self.mixed_parameter = origin_of(absent) if isinstance(absent, nn.Parameter) else ""
        if name in MOVES:
            return moved(args, kwargs)
        without = {key: value for key, value in kwargs.items() if key != "generator"}  # meta has no generators
        on_meta, without = apply_to_collection((args, without), Tensor, to_meta)
        try:
            with torch.no_grad(), Draws() as draws:  # a graph would keep the tensors alive
                if torch.is_autocast_enabled(self._device.type):
                    result = _autocast_form(func, on_meta, without, self._device)
                else:
                    result = func(*on_meta, **without)
        except NotImplementedError as error:
            raise CutError(
                f"{users_line()} can't be done without the values, which another pipeline stage has: {error}."
                f" {_ELSEWHERE}"
            ) from error
        if draws.any:
            args, kwargs = apply_to_collection((args, kwargs), Tensor, self._with_some_content)
            with torch.no_grad():
                func(*args, **kwargs)
        for tensor in tensors_in(result):
            mark_origin(tensor, origin_of(absent))
        return result

    def _with_some_content(self, tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor, device=self._device) if tensor.is_meta else tensor

    def _write(self, target: Any, name: str) -> Any:
        if isinstance(target, Tensor) and self._is_buffer(target):
            return target
        raise CutError(
            f"{users_line()} writes a value that another pipeline stage has into a tensor ({name}). Write"
            f" `x = torch.where(...)`, `torch.cat(...)` or the like, which makes a new one. {_ELSEWHERE}"
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context without the mode."""
        # torch: there is no public way to leave a mode. A mode that the user has entered inside of it stays.
        if torch.overrides._get_current_function_mode() is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


class Draws(TorchDispatchMode):
    """Notes whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def mark_origin(tensor: Tensor, origin: str) -> None:
    """Notes the name of the parameter or unit that an absent tensor comes from."""
    if origin:
        tensor.__dict__.setdefault("origin_on_other_stage", origin)


def origin_of(tensor: Tensor) -> str:
    """Returns the name that `mark_origin` has noted, or ""."""
    return tensor.__dict__.get("origin_on_other_stage", "")


def has_absent(value: Any) -> bool:
    """Whether a nested value has a tensor without content."""
    return any(tensor.is_meta for tensor in tensors_in(value))


def _first_absent_and_real(args: Any, kwargs: Any) -> tuple[Tensor | None, Tensor | None]:
    """Returns the first argument without content, and one with content (preferably with a gradient), or None."""
    absent = real = None
    for tensor in tensors_in((args, kwargs)):
        if tensor.is_meta:
            absent = tensor if absent is None else absent
        elif real is None or tensor.requires_grad:
            real = tensor
    return absent, real


def _asks_for_content(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return func.__self__.__name__ in CONTENT
    return name not in FORM or name in _OF_GRAPH


def to_meta(tensor: Tensor) -> Tensor:
    """Returns the form of a tensor, without content."""
    return tensor if tensor.is_meta else tensor.detach().to("meta")


def _writes(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call writes in place to its first argument, and this argument is real."""
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    is_in_place |= name.startswith("__i") and name not in ("__invert__", "__int__", "__index__")
    return is_in_place and bool(args) and isinstance(args[0], Tensor) and not args[0].is_meta


def moved(args: Any, kwargs: Any) -> Tensor:
    """Returns the result of a move of an absent tensor: the dtype changes as asked, the device stays meta."""
    tensor, *others = args
    others += kwargs.values()
    dtypes = [other for other in others if isinstance(other, torch.dtype)]
    dtypes += [other.dtype for other in others if isinstance(other, Tensor)]
    return tensor.to(dtypes[0]) if dtypes else tensor


# --- dtypes of autocast
# Gives values of other pipeline stages the dtypes that autocast would give them.
#
# Autocast ignores tensors on the meta device. So an operation on them returns another dtype than on real tensors, or
# fails, since its arguments have different dtypes. torch's fake tensors have no content either, but a real device.


def _autocast_form(func: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
    """Returns the result of an operation on meta tensors, in the dtypes that autocast gives on `device`.

    If autocast changes nothing, the operation runs without it, so that a view stays a view of an argument.
    """
    mode = FakeTensorMode()

    def fake(tensor: Tensor) -> Tensor:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, copy, device) if tensor.is_meta else tensor

    with mode:
        cast = func(*apply_to_collection(args, Tensor, fake), **apply_to_collection(kwargs, Tensor, fake))
    try:
        result = func(*args, **kwargs)
    except RuntimeError:  # its arguments have different dtypes
        result = None
    if _dtypes(result) == _dtypes(cast):
        return result
    return apply_to_collection(
        cast, Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    )


def _dtypes(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
