"""Attention and MLPs as people write them; input and output [batch, time, DIM]."""

import torch
from torch import Tensor, nn
from torch.nn import functional

DIM, HEADS = 16, 4


class Apart(nn.Module):
    """q, k, v and output projections; heads known to the module."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, key_heads
        self.q_proj = nn.Linear(DIM, DIM, bias=False)
        self.k_proj = nn.Linear(DIM, DIM // HEADS * key_heads, bias=False)
        self.v_proj = nn.Linear(DIM, DIM // HEADS * key_heads, bias=False)
        self.o_proj = nn.Linear(DIM, DIM)
        self.register_buffer("mask", torch.ones(8, 8).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        q = self.q_proj(x).view(batch, time, self.num_heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, time, self.num_kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, time, self.num_kv_heads, -1).transpose(1, 2)
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).reshape(batch, time, dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class ByHand(Apart):
    """Scores, mask and softmax written out."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        time = q.shape[-2]
        return scores.masked_fill(~self.mask[:time, :time], float("-inf")).softmax(-1) @ v


class Masked(Apart):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        time = q.shape[-2]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:time, :time])


class MaskedByHead(Apart):
    """Each head has a mask of its own, made anew, as T5 has for positions that it has not learned."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        steps = torch.arange(q.shape[-2])
        slopes = torch.arange(1.0, 1.0 + self.num_heads)[:, None, None]
        bias = -slopes * (steps[:, None] - steps).abs()
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


class BiasedByHead(Apart):
    """Each head learns what a distance is worth, as in T5: a parameter that no plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(8, HEADS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        steps = torch.arange(q.shape[-2])
        bias = self.bias((steps[:, None] - steps).abs()).permute(2, 0, 1)[None]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Grouped(Apart):
    """Half as many heads of keys and values; rotary positions."""

    def __init__(self) -> None:
        super().__init__(HEADS // 2)
        self.register_buffer("angles", torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def rotate(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.shape[-2]].repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class NormedHeads(Apart):
    """Each head's queries and keys are normalised: parameters within the attention that no plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(DIM // HEADS), nn.LayerNorm(DIM // HEADS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)


class OwnRMSNorm(nn.Module):
    """As Hugging Face's models have it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class NormedWidths(Apart):
    """Queries and keys are normalised over all heads together, as in OLMo 2: a norm of what several ranks have."""

    def __init__(self, norm: type[nn.Module] = OwnRMSNorm) -> None:
        super().__init__()
        self.q_norm, self.k_norm = norm(DIM), norm(DIM)  # type: ignore[call-arg]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Cache:
    """Keys and values of the tokens so far, which begin as an empty tensor without dims, as Hugging Face's do."""

    def __init__(self) -> None:
        self.keys = self.values = torch.tensor([])

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.keys = torch.cat([self.keys, keys], dim=-2)
        self.values = torch.cat([self.values, values], dim=2)
        return self.keys, self.values


class Cached(Apart):
    """The first half of the sequence, and the second one with the keys and values of the first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache, half = Cache(), q.shape[2] // 2
        first = super().attend(q[:, :, :half], *cache.update(k[:, :, :half], v[:, :, :half]))
        k, v = cache.update(k[:, :, half:], v[:, :, half:])
        return torch.cat([first, functional.scaled_dot_product_attention(q[:, :, half:], k, v)], dim=2)


class Fused(nn.Module):
    """One matrix for q, k and v, taken apart by `view`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, time, _ = x.shape
        return self.qkv(x).view(batch, time, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)


class Split(Fused):
    """Taken apart by `split`, as in nanoGPT."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, time, dim = x.shape
        parts = self.qkv(x).split(dim, dim=2)
        return tuple(part.view(batch, time, self.num_heads, -1).transpose(1, 2) for part in parts)


class Chunked(Fused):
    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        parts = self.qkv(x).chunk(3, dim=-1)
        return tuple(part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)


class HeadsFirst(Fused):
    """q, k and v of a head side by side."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, time, _ = x.shape
        return self.qkv(x).view(batch, time, self.num_heads, 3, -1).permute(3, 0, 2, 1, 4)


class Tutorial(Fused):
    """The same in one dim, as in Lightning's tutorial and GPT-NeoX."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, time, dim = x.shape
        qkv = self.qkv(x).reshape(batch, time, self.num_heads, 3 * dim // self.num_heads)
        return qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)


class PartsLast(Fused):
    """Each number of q beside that of k and v."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, time, dim = x.shape
        return self.qkv(x).view(batch, time, dim // self.num_heads, self.num_heads, 3).permute(4, 0, 3, 1, 2)


class Merged(Fused):
    """Heads as if they were samples, time first."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, time, dim = x.shape
        qkv = self.qkv(x.transpose(0, 1)).reshape(time, batch * self.num_heads, 3 * dim // self.num_heads)
        return tuple(part.unflatten(0, (batch, -1)) for part in qkv.transpose(0, 1).chunk(3, dim=-1))


class MultiQuery(Fused):
    """One head of keys and values for all queries, all of one matrix, as in Falcon."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kv_heads = 1
        self.qkv = nn.Linear(DIM, DIM + 2 * DIM // HEADS)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads + 2, -1)).transpose(1, 2).split([self.num_heads, 1, 1], 1)
        return q, k.expand_as(q), v.expand_as(q)


class OneKeyHead(Apart):
    """One head of keys and values for all queries, in matrices of their own, as in Gemma."""

    def __init__(self) -> None:
        super().__init__(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class NoHeads(Apart):
    """Nobody can tell how many heads there are."""

    def __init__(self) -> None:
        super().__init__()
        del self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(DIM, 24, bias=False)
        self.up_proj = nn.Linear(DIM, 24, bias=False)
        self.down_proj = nn.Linear(24, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedGate(nn.Module):
    """Gate and up projection in one matrix, side by side, as in Phi-3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(DIM, 2 * 24)
        self.down_proj = nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class InterleavedGate(FusedGate):
    """The same, each number of the gate beside what it is multiplied by, as in GPT-OSS."""

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.down_proj(functional.silu(both[..., ::2]) * both[..., 1::2])


class HalvedGate(FusedGate):
    """The same by `functional.glu`, which multiplies the first half by the sigmoid of the second."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.glu(self.gate_up_proj(x)))


class Residual(nn.Module):
    """Norm, MLP and residual in one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(DIM), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(functional.gelu(self.up(self.norm(x)))))


class OwnForward(nn.Sequential):
    """A `Sequential` that does more than run its layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 24), nn.Linear(24, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x).softmax(-1))


class Unfolded(Gated):
    """Does to its hidden units what torch has no rule for."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x).unfold(-1, 8, 8).softmax(-1).flatten(-2))


ATTENTIONS = [Apart, ByHand, Masked, MaskedByHead, BiasedByHead, Grouped, NormedHeads, Cached, Fused]
GATHERING = [Split, Chunked, HeadsFirst, Tutorial, PartsLast, Merged, MultiQuery, OneKeyHead, NoHeads, OwnForward]
GATHERING += [FusedGate, InterleavedGate, HalvedGate]
BLOCKS = [*ATTENTIONS, *GATHERING, Gated, Residual]
