"""`float8` and `float8-rowwise`: `bf16-mixed`, with the matrix products of the repeated blocks in 8 bits, by torchao.

https://github.com/pytorch/ao/tree/main/torchao/float8, its recipes "tensorwise" and "rowwise". Where autocast would
multiply in bfloat16, an `nn.Linear` of a block rounds its two factors to float8, in forward and in both products of
backward. Their scales are computed from the values that are multiplied, so that nothing is kept from step to step:
parameters and checkpoints are those of `bf16-mixed`, and every precision continues them.

Differs from torchao: the layers stay the user's objects, with their hooks, and are as they were after the run. A weight
is rounded to bfloat16 first, as with FSDP2's `MixedPrecisionPolicy`, so that `fsdp` may gather it in 16 bits and has
the numbers of `ddp`. A batch may have any number of rows.
"""

import dataclasses
import functools
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from ..precision import FLOAT8
from .block_precision import BlockPrecision
from .units import named_blocks

__all__ = ["Float8Precision", "check_float8", "float8_linear"]

_MULTIPLE = 16
"""Sizes that `torch._scaled_mm` takes are multiples of it."""
_CAPABILITY = (8, 9)
"""The first GPUs of NVIDIA with products in float8: Ada and Hopper."""


class Float8Precision(BlockPrecision):
    """Autocast to bfloat16, and products in float8 in the blocks of each module that it converts.

    Args:
        name: one of `FLOAT8`.
        device_type: ``"cpu"``, ``"cuda"``, ...

    Raises:
        ValueError: torchao is not installed, or the device has no such numbers.
    """

    def __init__(self, name: str, device_type: str) -> None:
        super().__init__(name, device_type)
        self._converted: list[nn.Linear] = []
        if find_spec("torchao") is None:
            raise ValueError(f"precision={name!r} needs the package torchao: pip install 'polyphase[float8]'.")
        if device_type in ("mps", "tpu", "xla"):
            raise ValueError(f"precision={name!r} can't be done on {device_type!r}: choose precision='bf16-mixed'.")

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Makes the layers of the blocks multiply in float8, until `teardown`."""
        recipe = FLOAT8[self.precision]
        layers = [layer for layer in _fitting(module, self.precision) if "forward" not in vars(layer)]
        slow = [layer for layer in layers if not _gains(layer, recipe)]
        if 2 * len(slow) > len(layers):
            rank_zero_info(
                f"precision={self.precision!r}: {len(slow)} of {len(layers)} layers of the blocks are too small to be"
                " faster than in bfloat16."
            )
        emulate = not _has_float8(self.device)
        if emulate:
            rank_zero_info(f"precision={self.precision!r}: this device computes it in float32, which takes longer.")
        for layer in layers:
            vars(layer)["forward"] = _Float8Forward(layer, recipe, emulate)
        self._converted += layers
        return module

    def teardown(self) -> None:
        """Gives the layers their own forward back."""
        for layer in self._converted:
            vars(layer).pop("forward", None)
        self._converted.clear()
        super().teardown()


def check_float8(module: LightningModule, precision: str, *, compiles: bool) -> None:
    """Checks that a module has layers for float8, and says so if they are not compiled, which is slower than bfloat16.

    Raises:
        ValueError: it has none.
    """
    if not is_overridden("configure_model", module):  # else it is not complete yet
        _fitting(module, precision)
    if not compiles:
        rank_zero_info(f"precision={precision!r} is slower than 'bf16-mixed' without compile=True.")


def _fitting(module: nn.Module, precision: str) -> list[nn.Linear]:
    # A subclass may use its weight in another way, as nn.MultiheadAttention does with that of its output.
    linear = [m for block in named_blocks(module) for m in block.modules() if type(m) is nn.Linear]
    layers = [layer for layer in dict.fromkeys(linear) if all(size % _MULTIPLE == 0 for size in layer.weight.shape)]
    if not layers:
        raise ValueError(
            f"precision={precision!r} finds no nn.Linear whose sizes are multiples of {_MULTIPLE} in the repeated"
            f" blocks of {type(module).__name__}: choose precision='bf16-mixed', or name blocks in shard_units()."
        )
    return layers


def _gains(layer: nn.Linear, recipe: str) -> bool:
    """Whether a product is faster in float8 with its rounding, as torchao has timed it on an H100."""
    rows, columns = layer.weight.shape
    if recipe == "tensorwise":
        return rows > 1024 or columns > 4096
    return rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)


def _has_float8(device_type: str) -> bool:
    return device_type == "cpu" or (device_type == "cuda" and torch.cuda.get_device_capability() >= _CAPABILITY)


@functools.cache
def _products(recipe: str, emulate: bool) -> tuple[Callable[..., Tensor], Any, Any]:
    """torchao's function for a layer's products, and its settings of each product and of the layer."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # takes seconds
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    # The rows of a batch are the inner dim of the product that makes the gradient of a weight.
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), pad_inner_dim=True, emulate=emulate)
    # Its layer is not used; the call also mends inductor for such numbers.
    layer = convert_to_float8_training(nn.Linear(_MULTIPLE, _MULTIPLE, device="meta"), config=config)
    return matmul_with_hp_or_float8_args.apply, layer.linear_mm_config, config


@torch.compiler.allow_in_graph
def float8_linear(input: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, emulate: bool) -> Tensor:
    """Computes `nn.functional.linear` with float8 in place of the dtype of autocast, which the output has."""
    if torch.is_inference_mode_enabled():  # there torch calls `reshape` as a whole, which torchao has not for rows
        with torch.inference_mode(False), torch.no_grad():
            return float8_linear(input, weight, bias, recipe, emulate)
    dtype = torch.get_autocast_dtype(input.device.type)
    multiply, products, config = _products(recipe, emulate)
    output = multiply(input.to(dtype), weight.to(dtype).t(), products, config)
    return output if bias is None else output + bias.to(dtype)


class _Float8Forward:
    """Replaces a layer's forward: in autocast it multiplies in float8."""

    def __init__(self, layer: nn.Linear, recipe: str, emulate: bool) -> None:
        self._layer, self._how = layer, (recipe, emulate)
        _products(recipe, emulate)  # not within a graph

    def __call__(self, input: Tensor) -> Tensor:
        """Returns the layer's output, (..., out_features)."""
        layer = self._layer
        if not torch.is_autocast_enabled(input.device.type):
            return nn.functional.linear(input, layer.weight, layer.bias)
        return float8_linear(input, layer.weight, layer.bias, *self._how)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled layer gets its own forward back.
        return types.MethodType, (nn.Linear.forward, self._layer)
