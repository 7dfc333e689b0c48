"""A decoder-only transformer (GPT-2's, Radford et al. 2019): pre-norm blocks, learned positions, tied embeddings.

Each module with initial values other than torch's defaults has a `reset_parameters` that sets only its own parameters;
its constructor calls it at the end. Calling these methods again, children before parents, draws the same numbers: so an
engine can initialise a model that was built on the meta device.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyphase.engine.data import block_diagonal_mask

__all__ = ["Block", "Transformer"]

_STD = 0.02  # standard deviation of all weight matrices, as in GPT-2


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
        """Attends to the same and earlier positions, or where `mask` [batch, 1, time, time] is true."""
        batch, time, dim = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
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
        self.context_length = context_length
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

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Returns the logits of the next token at each position.

        Args:
            tokens: [batch, time].
            position_ids: [batch, time], 0 at the start of each packed sequence; a sequence attends only to itself.
        """
        time = tokens.size(1)
        if time > self.context_length:
            raise ValueError(
                f"a sequence of {time} tokens does not fit the model's context_length={self.context_length}: build"
                f" the model with at least {time}, or cut the data to {self.context_length}."
            )
        positions = torch.arange(time, device=tokens.device) if position_ids is None else position_ids
        masks = () if position_ids is None else (block_diagonal_mask(position_ids),)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x, *masks)
        return self.head(self.norm(x))


def _normal(linear: nn.Linear, std: float) -> None:
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
