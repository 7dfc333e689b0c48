"""`bf16-blocks`: the repeated blocks compute wholly in bfloat16, and everything else as under `bf16-mixed`.

Autocast keeps layer norms, and with them the sum that runs through a transformer's blocks, in float32. Here each block
is called with its inputs and parameters cast to bfloat16, once per call, and without autocast: what FSDP2's
`MixedPrecisionPolicy(param_dtype=torch.bfloat16)` does, under each strategy that supports it. Parameters, gradients,
optimizer and checkpoints stay float32, and so does what is outside of blocks: embedding, last norm, loss.

Differs from FSDP2: a layer with buffers of its own, such as BatchNorm's statistics, keeps its parameters in float32.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# torch: runs a module with other tensors as its parameters; `functional_call` would call the module itself again.
from .._compat.torch import _reparametrize_module, tree_map_only
from ..precision.plugins import MixedPrecision
from .contents import begin_count, num_writes
from .units import named_blocks

__all__ = ["BF16Blocks", "BlockPrecision", "cast_weight", "check_blocks"]


class BlockPrecision(MixedPrecision):
    """Autocast to bfloat16, and other arithmetic in the blocks of each module that it converts, until `teardown`.

    Args:
        name: one of `OF_BLOCKS`.
        device_type: ``"cpu"``, ``"cuda"``, ...
    """

    def __init__(self, name: str, device_type: str) -> None:
        super().__init__("bf16-mixed", device_type)
        self.precision = name  # type: ignore[assignment]

    def autocast_context_manager(self) -> torch.autocast:
        """See `MixedPrecision`, which knows its own names only."""
        return torch.autocast(self.device, dtype=torch.bfloat16, cache_enabled=False)


class BF16Blocks(BlockPrecision):
    """Casts what enters a block; see the module's docstring."""

    def __init__(self, name: str, device_type: str) -> None:
        super().__init__(name, device_type)
        self._casting: dict[nn.Module, _Cast] = {}

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Makes the blocks compute in bfloat16."""
        for block in dict.fromkeys(named_blocks(module)):
            if block not in self._casting:  # else one that an earlier run has wrapped, and others around it
                self._casting[block] = _Cast(block, self.device)
            self._casting[block].is_on = True
        return module

    def teardown(self) -> None:
        """Gives the blocks their own forward back."""
        self._casting = {block: cast for block, cast in self._casting.items() if not cast.detach()}
        super().teardown()


def check_blocks(module: nn.Module, precision: str) -> None:
    """Checks that a module has blocks.

    Raises:
        ValueError: it has none.
    """
    if not named_blocks(module):
        raise ValueError(
            f"precision={precision!r} finds no repeated blocks in {type(module).__name__}, no ModuleList or Sequential"
            " of one class: choose precision='bf16-mixed', or name blocks in shard_units()."
        )


def cast_weight(weight: Tensor) -> Tensor:
    """Casts a weight; under `fsdp` one that was gathered in 16 bits is not copied."""
    return weight.to(torch.bfloat16)


def _cast_input(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16) if value.dtype == torch.float32 else value


class _Cast:
    """Replaces a block's forward: in autocast it computes in bfloat16.

    Args:
        block: the block whose `forward` it replaces.
        device_type: ``"cpu"``, ``"cuda"``, ...
    """

    is_on = False

    def __init__(self, block: nn.Module, device_type: str) -> None:
        self._kind = device_type
        self._block, self._own = block, vars(block).get("forward")
        self._forward: Callable[..., Any] = block.forward
        functools.update_wrapper(self, self._forward, updated=())
        vars(block)["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block's forward.

        Raises:
            RuntimeError: it writes into a parameter.
        """
        if not self.is_on or not torch.is_autocast_enabled(self._kind):
            return self._forward(*args, **kwargs)
        weights = {name: cast_weight(weight) for name, weight in self._weights()}
        args, kwargs = tree_map_only(Tensor, _cast_input, (args, kwargs))
        counts = {} if torch.compiler.is_compiling() else {name: begin_count(weights[name]) for name in weights}
        with torch.autocast(self._kind, enabled=False), _reparametrize_module(self._block, weights):
            output = self._forward(*args, **kwargs)
        if written := [name for name, count in counts.items() if num_writes(weights[name]) != count]:
            raise RuntimeError(
                f"precision='bf16-blocks': the forward of {type(self._block).__name__} writes into {written[0]!r}, of"
                " which it has a copy in bfloat16, and the change would be lost. Write it in a hook, such as"
                " on_train_batch_end, or choose precision='bf16-mixed'."
            )
        return output

    def _weights(self) -> list[tuple[str, Tensor]]:
        return [
            (f"{path}.{name}" if path else name, weight)
            for path, part in self._block.named_modules(remove_duplicate=False)
            if not any(buffer.is_floating_point() for buffer in part.buffers(recurse=False))
            for name, weight in part.named_parameters(recurse=False)
            if weight.dtype == torch.float32
        ]

    def detach(self) -> bool:
        """Ends the casts; returns False if another wrapper is around this one, which then stays."""
        self.is_on = False
        if vars(self._block).get("forward") is not self:
            return False
        del vars(self._block)["forward"]
        if self._own is not None:
            vars(self._block)["forward"] = self._own
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled block gets its own forward back.
        return types.MethodType, (getattr(self._forward, "__func__", self._forward), self._block)
