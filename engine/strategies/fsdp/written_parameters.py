"""Writes of a step or hook to sharded parameters: they take effect, or are refused with the parameter's name.

`p.data = values` does not change the rank's part of a DTensor `p` in torch; here it does. During a step under FSDP2 the
parameters outside of units are whole copies. At the end of the step these copies are dropped, and a write to a copy is
lost.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["forget_data", "keep_data", "no_writes"]

_data: Any = Tensor.data


def keep_data() -> None:
    """Makes ``p.data = values`` write the values into a DTensor, until `forget_data`."""
    DTensor.data = property(_data.__get__, _set)  # type: ignore[assignment]


def forget_data() -> None:
    """Restores torch's attribute."""
    if "data" in vars(DTensor):
        del DTensor.data


def _set(tensor: Any, value: Any) -> None:
    if isinstance(value, DTensor) and (value.shape, value.dtype, value.device) == (
        tensor.shape, tensor.dtype, tensor.device,
    ):  # fmt: skip
        with torch.no_grad():
            tensor.detach().copy_(value)
    else:
        _data.__set__(tensor, value)


@contextmanager
def no_writes(module: nn.Module | None, kept: Collection[str], flag: str) -> Iterator[None]:
    """Context of a step with whole copies of parameters.

    Args:
        module: with the parameters.
        kept: names of parameters that are always whole.
        flag: flag of the strategy.

    Raises:
        RuntimeError: the step has written into one, and the change would be lost.
    """
    assert module is not None
    own = {name: p for name, p in module.named_parameters() if name not in kept}
    copies = {name: p for name, p in own.items() if not isinstance(p, DTensor)}
    before = {name: (p._version, p.data_ptr()) for name, p in copies.items()}
    yield
    for name, parameter in copies.items():
        if parameter is _parameter(module, name) and (parameter._version, parameter.data_ptr()) != before[name]:
            raise RuntimeError(
                f"`training_step` writes into {name!r} in place, but under {flag} that is a temporary copy, of which"
                " each rank keeps only a shard, so the change would be lost. Write it in a hook, such as"
                " on_train_batch_end or on_before_zero_grad, or use strategy='ddp'. This step has changed no weights."
            )


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    path, _, key = name.rpartition(".")
    return module.get_submodule(path)._parameters.get(key)
