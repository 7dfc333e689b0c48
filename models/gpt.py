"""`ByteGPT`, a GPT over bytes, in sizes from one for CPUs (the default) to GPT-2's 124M, and over pairs of bytes."""

import math
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions, functional

from .transformer import Transformer

__all__ = ["SIZES", "ByteGPT", "TokenGPT", "chunked_cross_entropy"]

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"num_layers": 4, "num_heads": 4, "dim": 128, "context_length": 128},
    "10M": {"num_layers": 6, "num_heads": 6, "dim": 384, "context_length": 256},
    "124M": {"num_layers": 12, "num_heads": 12, "dim": 768, "context_length": 1024},
}
"""Shapes by name; the last is the smallest GPT-2."""


class ByteGPT(LightningModule):
    """Predicts the next byte; logs `train/loss`, `val/loss` and `val/bits_per_byte`.

    Batches are integer tensors [batch, time + 1] of bytes 0 to 255; the target of each byte is the next one. Batches
    of `PackSequences` work as well; their losses are weighted by the number of predicted bytes.

    Args:
        size: ``"tiny"``, ``"10M"`` or ``"124M"``; the four shapes below override it one by one.
        num_layers: number of blocks.
        num_heads: number of attention heads per block.
        dim: width of the residual stream.
        context_length: longest sequence, in bytes.
        dropout: dropout probability.
        lr: learning rate at the end of the warm-up.
        weight_decay: weight decay of matrices; biases and norms have none.
        warmup_steps: optimizer steps of linear warm-up, before a cosine to a tenth of `lr`.
    """

    bytes_per_token = 1

    def __init__(
        self,
        size: Literal["tiny", "10M", "124M"] = "tiny",
        num_layers: int | None = None,
        num_heads: int | None = None,
        dim: int | None = None,
        context_length: int | None = None,
        dropout: float = 0.0,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = {"num_layers": num_layers, "num_heads": num_heads, "dim": dim, "context_length": context_length}
        shape = SIZES[size] | {name: value for name, value in config.items() if value is not None}
        # Not read from `hparams`: a subclass with its own constructor records its own arguments there.
        self.lr, self.weight_decay, self.warmup_steps = lr, weight_decay, warmup_steps
        self.net = Transformer(num_tokens=256**self.bytes_per_token, dropout=dropout, **shape)

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None, sequence_lengths: Tensor | None = None
    ) -> Tensor:
        """Returns logits [batch, time, vocabulary] for tokens [batch, time]; packed sequences need `position_ids`."""
        return self.net(tokens) if position_ids is None else self.net(tokens, position_ids, sequence_lengths)

    def training_step(self, batch: Tensor | dict[str, Tensor], batch_idx: int) -> STEP_OUTPUT:
        """Returns the mean cross-entropy in nats per token."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=_num_rows(batch))
        return {"loss": loss, "weight": _num_predicted(batch)} if isinstance(batch, dict) else loss

    def validation_step(self, batch: Tensor | dict[str, Tensor], batch_idx: int) -> None:
        """Logs the mean over the whole epoch and all ranks."""
        loss = self._loss(batch)
        metrics = {"val/loss": loss, "val/bits_per_byte": loss / math.log(2) / self.bytes_per_token}
        counts = int(_num_predicted(batch)) if isinstance(batch, dict) else _num_rows(batch)
        self.log_dict(metrics, prog_bar=True, sync_dist=True, batch_size=counts)

    def _loss(self, batch: Tensor | dict[str, Tensor]) -> Tensor:
        inputs, targets = _inputs_and_targets(batch)
        logits = self(*inputs)[:, : targets.size(1)]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Returns AdamW with two parameter groups and a schedule per step over the whole run."""
        matrices = [p for p in self.parameters() if p.requires_grad and p.dim() >= 2]
        others = [p for p in self.parameters() if p.requires_grad and p.dim() < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        one_kernel = self.on_gpu or None  # instead of many, each of which reads all parameters
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=one_kernel)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _lr_factor(self, step: int) -> float:
        warmup = max(1, self.warmup_steps)
        total = max(float(self.trainer.estimated_stepping_batches), warmup + 1)
        if step < warmup or math.isinf(total):
            return min(1.0, (step + 1) / warmup)
        progress = min(1.0, (step - warmup) / (total - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class TokenGPT(ByteGPT):
    """Predicts the next two bytes, as one of 65,536 tokens, by a loss that makes no logits: `chunked_cross_entropy`.

    Batches are those of ``PythonSource(bytes_per_token=2)``; arguments and metrics as of `ByteGPT`.
    """

    bytes_per_token = 2

    def _loss(self, batch: Tensor | dict[str, Tensor]) -> Tensor:
        inputs, targets = _inputs_and_targets(batch)
        features = self.net.features(*inputs)[:, : targets.size(1)]
        return chunked_cross_entropy(features, self.net.head.weight, targets)


def chunked_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy of an output layer, of whose logits only some rows exist at a time.

    It is `torch.nn.functional.linear_cross_entropy`, which autocast leaves in float32, in the dtype of autocast.

    Args:
        features: [..., dim], what the layer would be called with.
        weight: [vocabulary, dim], the layer's.
        targets: [...], int64; -100 counts for nothing.
    """
    kind = features.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        features, weight = features.to(dtype), weight.to(dtype)
    options = LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(features.flatten(0, -2), weight, targets.flatten(), options=options).float()


def _inputs_and_targets(batch: Tensor | dict[str, Tensor]) -> tuple[tuple[Any, ...], Tensor]:
    """Returns the arguments of `forward`, and what its first positions predict."""
    if isinstance(batch, dict):
        return (batch["input_ids"], batch["position_ids"], batch.get("sequence_lengths")), batch["labels"][:, 1:]
    return (batch[:, :-1],), batch[:, 1:]


def _num_rows(batch: Tensor | dict[str, Tensor]) -> int:
    return (batch["input_ids"] if isinstance(batch, dict) else batch).size(0)


def _num_predicted(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"][:, 1:] >= 0).sum()
