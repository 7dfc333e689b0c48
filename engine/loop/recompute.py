"""The flag `activation_checkpointing`: the module's blocks recompute their activations in backward.

If a strategy wraps a block's forward itself (for compilation, or for a pipeline), it wraps the block for recomputation
first; otherwise the blocks are wrapped when the strategy has set the module up.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from ..strategies import adapt, capabilities_of
from ..strategies.recompute import KEPT, Recomputed, blocks_to_recompute, kept_operators

__all__ = ["RecomputeBlocks"]


class RecomputeBlocks(Callback):
    """Makes the blocks of a module recompute their activations in backward while it trains.

    Args:
        kind: ``"full"`` or ``"selective"``.
    """

    _kept_operators = KEPT  # on the class: the callback is pickled for spawned workers, and operators can't be pickled

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._wrapped: dict[nn.Module, Recomputed] = {}
        self._is_checked = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the strategy the function that wraps a block."""
        if stage == "fit":
            if self.kind == "selective":
                self._kept_operators = kept_operators(pl_module)
            adapt(trainer.strategy).recompute = self.wrap

    def wrap(self, block: nn.Module) -> None:
        """Makes a block recompute its activations."""
        self._wrapped[block] = Recomputed(block, self.kind, self._kept_operators)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wraps the blocks that the strategy has not wrapped."""
        if not capabilities_of(trainer.strategy).recomputes_blocks:
            for block in blocks_to_recompute(pl_module):
                if block not in self._wrapped:
                    self.wrap(block)
        for recomputed in self._wrapped.values():
            recomputed.is_on = True
        rank_zero_info(
            f"activation_checkpointing={self.kind!r}: on this rank {len(self._wrapped)} blocks ({self._names()})"
            " compute their activations again in backward."
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Resets the check, since the validation before training has called the blocks."""
        self._is_checked = bool(trainer.flags["compile"])  # type: ignore[attr-defined]  # which hides the calls
        for recomputed in self._wrapped.values():
            recomputed.was_called = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *unused: Any) -> None:
        """Checks after the first batch that some block recomputes its activations.

        Raises:
            RuntimeError: no block has run its forward.
        """
        if self._is_checked:
            return
        self._is_checked = True
        if self._wrapped and not any(recomputed.was_called for recomputed in self._wrapped.values()):
            raise RuntimeError(
                f"activation_checkpointing={self.kind!r} saves no memory: training_step has not called the forward"
                f" of any block ({self._names()}). Give {type(pl_module).__name__} a method shard_units() that returns"
                " the sub-modules it calls, or leave activation_checkpointing out."
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the module."""
        self._detach(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the module."""
        self._detach(trainer)

    def _names(self) -> str:
        return ", ".join(dict.fromkeys(recomputed.block_name for recomputed in self._wrapped.values()))

    def _detach(self, trainer: Trainer) -> None:
        # Blocks inside of another wrapper are needed again by a later `fit`.
        self._wrapped = {block: wrapped for block, wrapped in self._wrapped.items() if not wrapped.detach()}
        vars(trainer.strategy).pop("recompute", None)
