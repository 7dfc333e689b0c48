"""A decoder-only transformer (GPT-2's, Radford et al. 2019): pre-norm blocks, learned positions, tied embeddings.

Each module with initial values other than torch's defaults has a `reset_parameters` that sets only its own parameters;
its constructor calls it at the end. Calling these methods again, children before parents, draws the same numbers: so an
engine can initialise a model that was built on the meta device.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from polyphase.engine.data import block_diagonal_mask, cu_seqlens

__all__ = ["Block", "Transformer"]

_STD = 0.02  # standard deviation of all weight matrices, as in GPT-2
_OLDEST_CAPABILITY = (8, 0)
"""The oldest GPUs of NVIDIA with torch's kernel for sequences of different lengths."""
_WIDEST_HEAD = 256
"""The widest head that it takes."""


class Attention(nn.Module):
    """Causal multi-head self-attention. Input and output: [batch, time, dim]."""

    def __init__(self, dim: int, num_heads: int, residual_std: float, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.residual_std = residual_std
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws normal weights, smaller for the output projection to the residual stream; sets biases to zero."""
        _normal(self.qkv, _STD)
        _normal(self.out, self.residual_std)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attends to the same and earlier positions, or as `mask` says.

        Args:
            x: [batch, time, dim].
            mask: [batch, 1, time, time], true where a position sees another; or [n + 1], int32, the boundaries of the
                sequences in rows one after the other, each of which sees itself up to a position.
        """
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.num_heads, -1)
        if mask is not None and mask.dim() == 1:
            if not isinstance(qkv, DTensor):
                q, k, v = qkv.flatten(0, 1).unbind(1)
                y: Any = varlen_attn(q, k, v, mask, mask, time, time, window_size=(-1, 0))
                return self.out(y.reshape(batch, time, dim))
            mask = _mask_of(mask, batch, time)  # the kernel takes no parts of heads or of time
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=mask is None)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim))


class MLP(nn.Module):
    """Two linear layers with GELU in between. Input and output: [..., dim]."""

    def __init__(self, dim: int, residual_std: float) -> None:
        super().__init__()
        self.residual_std = residual_std
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws normal weights; sets biases to zero."""
        _normal(self.up, _STD)
        _normal(self.down, self.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        """Applies both layers at each position."""
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream. Input and output: [batch, time, dim]."""

    def __init__(self, dim: int, num_heads: int, residual_std: float, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, residual_std, dropout)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim, residual_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Adds attention and MLP to the residual stream; `mask` is for the attention."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """Maps token indices [batch, time] to logits [batch, time, num_tokens]; position t sees positions up to t.

    Args:
        num_tokens: size of the vocabulary.
        context_length: longest sequence.
        dim: width of the residual stream, a multiple of `num_heads`.
        num_heads: number of attention heads per block.
        num_layers: number of blocks.
        dropout: dropout probability, in [0, 1).

    Raises:
        ValueError: `dim` is not a multiple of `num_heads`, or (when called) a sequence is longer than the context.
    """

    def __init__(
        self, *, num_tokens: int, context_length: int, dim: int, num_heads: int, num_layers: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, but {dim} is not a multiple of {num_heads}.")
        self.context_length, self.head_dim, self.dropout = context_length, dim // num_heads, dropout
        self.token_embedding = nn.Embedding(num_tokens, dim)
        self.position_embedding = nn.Embedding(context_length, dim)
        residual_std = _STD / math.sqrt(2 * num_layers)
        self.blocks = nn.ModuleList(Block(dim, num_heads, residual_std, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_tokens, bias=False)
        self.head.weight = self.token_embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws normal embeddings; the output layer shares the token embeddings."""
        nn.init.normal_(self.token_embedding.weight, std=_STD)
        nn.init.normal_(self.position_embedding.weight, std=_STD)

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None, sequence_lengths: Tensor | None = None
    ) -> Tensor:
        """Returns the logits of the next token at each position; arguments as for `features`."""
        return self.head(self.features(tokens, position_ids, sequence_lengths))

    def features(
        self, tokens: Tensor, position_ids: Tensor | None = None, sequence_lengths: Tensor | None = None
    ) -> Tensor:
        """Returns what the output layer is called with, [batch, time, dim].

        Args:
            tokens: [batch, time].
            position_ids: [batch, time], 0 at the start of each packed sequence; a sequence attends only to itself.
            sequence_lengths: of `PackSequences`. With them attention needs no mask [time, time], on a GPU in 16 bits.
        """
        time = tokens.size(1)
        if time > self.context_length:
            raise ValueError(
                f"a sequence of {time} tokens does not fit the model's context_length={self.context_length}: build"
                f" the model with at least {time}, or cut the data to {self.context_length}."
            )
        positions = torch.arange(time, device=tokens.device) if position_ids is None else position_ids
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        masks: tuple[Tensor, ...] = ()
        if sequence_lengths is not None and self._has_kernel(x):
            masks = (cu_seqlens(sequence_lengths),)
        elif position_ids is not None:
            masks = (block_diagonal_mask(position_ids),)
        for block in self.blocks:
            x = block(x, *masks)
        return self.norm(x)

    def _has_kernel(self, x: Tensor) -> bool:
        """Whether there is a kernel for packed sequences for the attention of `x`."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return (
            kind == "cuda"
            and dtype in (torch.float16, torch.bfloat16)
            and torch.cuda.get_device_capability(x.device) >= _OLDEST_CAPABILITY
            and self.head_dim <= _WIDEST_HEAD
            and not (self.training and self.dropout)
        )


def _mask_of(boundaries: Tensor, batch: int, time: int) -> Tensor:
    """Returns what `block_diagonal_mask` does."""
    places = torch.arange(batch * time, device=boundaries.device, dtype=boundaries.dtype)
    sequence = torch.bucketize(places, boundaries, right=True).view(batch, time)
    return (sequence[:, :, None] == sequence[:, None, :]).tril()[:, None]


def _normal(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
