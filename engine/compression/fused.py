"""Functions that `torch.compile` fuses to one kernel on a GPU, and that run operator by operator elsewhere.

They are compiled for any size when a run is set up, so that no rank compiles while others wait for it. Results are
bitwise equal to those without a compiler: a product that is added is written as `addcmul`, which torch rounds once in
both cases, and divisions are rounded as torch's.
"""

import importlib.util
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

__all__ = ["Fused"]

Result = TypeVar("Result")

_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "assert_indirect_indexing": False,  # rows of a table, whose indices are computed beside it
}
_OLDEST_CAPABILITY = (7, 0)
"""The oldest GPUs that Triton has code for."""


class Fused(Generic[Result]):
    """A function of tensors, numbers and dtypes that is one kernel on a GPU.

    Args:
        function: writes to its arguments or returns new tensors; tensor arguments don't overlap.

    Attributes:
        is_wanted: whether any function is compiled; the GPU suite compares both ways.
    """

    is_wanted = True
    _why_not: str | None = None
    """Why functions can't be compiled here, once that is known."""

    def __init__(self, function: Callable[..., Result]) -> None:
        self.function = function
        self._compiled: Callable[..., Result] | None = None

    def __call__(self, *args: Any) -> Result:
        """Calls the function with these arguments."""
        if self._compiled is None or not Fused.is_wanted:
            return self.function(*args)
        with torch.no_grad():  # else it is compiled once more where a hook is called with gradients enabled
            # No views, for which the compiler has other code, by the size of what they are views of.
            return self._compiled(*(arg.data if isinstance(arg, Tensor) else arg for arg in args))

    @property
    def is_compiled(self) -> bool:
        """Whether a call is one kernel."""
        return self._compiled is not None and Fused.is_wanted

    @staticmethod
    def is_possible(tensor: Tensor) -> bool:
        """Whether functions of `tensor` are compiled, as far as is known."""
        return (
            Fused.is_wanted
            and Fused._why_not is None
            and tensor.device.type == "cuda"
            and torch.cuda.get_device_capability(tensor.device) >= _OLDEST_CAPABILITY
            and importlib.util.find_spec("triton") is not None
        )

    def compile(self, *args: Any) -> None:
        """Compiles the function and calls it with these arguments; warns once if it can't be compiled."""
        if Fused._why_not is not None:
            return
        if self._compiled is None:
            self._compiled = torch.compile(self.function, dynamic=True, fullgraph=True, options=_OPTIONS)
        try:
            self(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler may raise
            self._compiled = None
            Fused._why_not = f"{type(error).__name__}: {error}".splitlines()[0]
            rank_zero_warn(
                "compression: its kernels can't be compiled, so each takes several times as long"
                f" ({Fused._why_not}). Install the Triton that belongs to this torch, and a C compiler."
            )
