"""Stand-ins for parameters that another pipeline stage holds, outside of a step: a shape and a name without content.

torch accepts tensors on the meta device silently: an average of weights in a hook (`p.lerp_(q, 0.01)`) would do
nothing, and a norm of all gradients would be that of one stage. A `RemoteTensor` raises an error that names the
parameter if user code needs its values. Within a step, `RemoteValueMode` handles such tensors. torch, Lightning and
this package may pass them on, since this code expects tensors without content. An optimizer may read the gradient: it
is None.
"""

import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...attachments import carry_over
from .remote_values import (
    CONTENT,
    FORM,
    NOT_THE_USERS,
    CutError,
    is_users,
    mark_origin,
    origin_of,
    tensors_in,
    users_line,
)

__all__ = ["RemoteTensor"]

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
_PASSES_ON = os.path.join(_TORCH, "nn", "modules", "module.py")


class RemoteTensor(Tensor):
    """A tensor on the meta device; results of operations on it are of this class, too."""

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
            if name in ("__get__", "__set__"):
                attribute = func.__self__.__name__
                if attribute in CONTENT or (name == "__get__" and attribute == "grad"):
                    _check(attribute, args, kwargs)
            elif name not in FORM:
                _check(name, args, kwargs)
            if name == "__deepcopy__":
                return _copied(*args)
            result = func(*args, **kwargs)
            if type(result) is Tensor and result.is_meta:
                result = result.as_subclass(cls)
                mark_origin(result, _name(args, kwargs))
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


def _check(name: str, args: Any, kwargs: Any) -> None:
    if name == "grad":
        if not _may_know_gradient():
            raise CutError(
                f"{users_line()} reads the gradient of {_name(args, kwargs)!r}, which another pipeline stage has: a"
                " norm of these gradients would be that of one stage. Set gradient_clip_val, call"
                " self.clip_gradients(...) in configure_gradient_clipping, or read trainer.grad_norm, which are those"
                " of all stages; pass over parameters with `p.is_meta` if each stage may do this for its own; or choose"
                " another strategy, such as 'fsdp'."
            )
        return
    frame = next(frame for frame in _frames() if not frame.f_code.co_filename.startswith(_DISPATCH_FILES))
    if _is_for_the_user(frame):
        raise CutError(
            f"{users_line()} needs the values of {_name(args, kwargs)!r}, which another pipeline stage has ({name})."
            " Do this in the optimizer or in the step; pass over parameters with `p.is_meta` if each stage may do this"
            " for its own, without the others'; or choose another strategy, such as 'fsdp'."
        )


def _may_know_gradient() -> bool:
    """Whether the caller is an optimizer, or a library that does not compute with the gradient for the user."""
    is_for_user = False
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith(_DISPATCH_FILES):
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
