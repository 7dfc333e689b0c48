"""`powersgd[:rank]`: each matrix of gradients is sent as two thin factors (Vogels et al. 2019, arXiv:1905.13727).

Phases after the warm-up: 1. P = M Q for each matrix, with the Q of the last step (local); 2. all-reduce of all P and of
what is no matrix, in one message; 3. orthogonalise P, Q = M^T P (local); 4. all-reduce of all Q; 5. M = P Q^T (local).
Before that, plain all-reduce, since early gradients change too fast. Bytes: 2 (W-1)/W times 4 rank (rows + columns) a
matrix.

Differs from torch's `powerSGD_hook`: vectors travel with P, which is one collective less, matrices of one shape are
orthogonalised together (on accelerators too, whose QR takes one after the other), factors may be sent in 16 bit, and
what is remembered goes by the names of parameters.
"""

import math
import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from ..flags import check_count, check_number
from .bucket import Bucket, Member
from .feedback import LossyHook
from .memory import Memory
from .wire import Wire

__all__ = ["PowerSGD"]


class PowerSGD(LossyHook):
    """PowerSGD with error feedback and factors that start from those of the last step.

    Args:
        rank: rank of the approximation; bytes grow with it, the error shrinks.
        start: see `LossyHook`.
        min_ratio: a matrix is sent as factors if they have fewer values than it by more than this factor.
        feedback: see `LossyHook`.
    """

    name = "powersgd"
    description = "low-rank factors with error feedback: powersgd[:rank][,start=steps]; rank 4, start 10"
    takes_dtype: ClassVar[bool] = True

    def __init__(self, rank: int = 4, start: int = 10, min_ratio: float = 2.0, feedback: bool = True) -> None:
        super().__init__(feedback, start)
        self.rank = check_count("powersgd:rank", rank)
        self.min_ratio = check_number("powersgd:min_ratio", min_ratio, above=0)
        self._factors = Memory(self._factor_sizes, initial=self._first_factor)

    def memories(self) -> dict[str, Memory]:
        """The residuals, and the factor Q of each matrix: the same on all ranks."""
        return {**super().memories(), "factors": self._factors}

    def check(self, module: nn.Module) -> None:
        """Says so where there is nothing to compress."""
        super().check(module)
        members = [Member(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
        if members and not any(map(self._is_matrix, members)):
            rank_zero_warn(
                f"compression {self.flag!r}: no parameter of {type(module).__name__} is a matrix of which factors of"
                f" rank {self.rank} are less than 1/{self.min_ratio:g}: all gradients are sent as they are. topk, int8"
                " and sign take parameters of any shape."
            )

    def exchange(self, total: Tensor, bucket: Bucket, wire: Wire) -> None:
        """See the phases above."""
        mine = dict(zip(bucket.members, total.split(bucket.numels), strict=True))
        averages = dict(zip(bucket.members, bucket.gradients.split(bucket.numels), strict=True))
        groups = self._groups(bucket)
        vectors = [member for member in bucket.members if not self._is_matrix(member)]
        factors, new_factors = self._factors.of(bucket), self._factors.draft(bucket)
        # Phase 1. Thin factors lie row by row: products with them are several times faster than column by column.
        shapes = [(len(group), rank, columns) for (_, columns, rank), group in groups.items()]
        bases = [_orthonormal(q) for q in _batches(factors, shapes)]
        ps = [
            torch.stack([q @ mine[member].view(rows, columns).T for member, q in zip(group, basis, strict=True)])
            for ((rows, columns, _), group), basis in zip(groups.items(), bases, strict=True)
        ]
        message = self._share([*(mine[member] for member in vectors), *ps], wire)
        num_raw = sum(member.numel for member in vectors)
        raw = message[:num_raw].split([member.numel for member in vectors])
        for member, part in zip(vectors, raw, strict=True):
            mine[member].sub_(part, alpha=wire.size)  # leaves what the division and 16 bit round off
        # Phase 2.
        wire.all_reduce(message)
        for member, part in zip(vectors, raw, strict=True):
            averages[member].copy_(part)
        if not groups:
            return
        # Phase 3.
        ps = [_orthonormal(p.to(total.dtype)) for p in _batches(message[num_raw:], [p.shape for p in ps])]
        qs = [
            torch.stack([p @ mine[member].view(rows, columns) for member, p in zip(group, batch, strict=True)])
            for ((rows, columns, _), group), batch in zip(groups.items(), ps, strict=True)
        ]
        # Phase 4.
        sent = wire.all_reduce(self._share(qs, wire)).to(factors.dtype)
        # Phase 5.
        batches = _batches(sent, shapes)
        by_group = zip(groups.values(), ps, batches, strict=True)
        for group, batch_p, batch_q in by_group:
            for member, p, q in zip(group, batch_p, batch_q, strict=True):
                torch.mm(p.T, q, out=averages[member].view(p.size(1), q.size(1)))
                mine[member].sub_(averages[member])
        for q, old, new in zip(batches, _batches(factors, shapes), _batches(new_factors, shapes), strict=True):
            # A matrix of zeros, as of a parameter that is not used in each step, says nothing about the next one.
            torch.where(q.flatten(1).any(1)[:, None, None], q, old, out=new)

    def _share(self, tensors: list[Tensor], wire: Wire) -> Tensor:
        """This rank's share of the averages of `tensors`, one message."""
        message = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(wire.size)
        return message if self.send_dtype is None else message.to(self.send_dtype)

    def _is_matrix(self, member: Member) -> bool:
        rows, columns = member.matrix_shape
        rank = min(rows, columns, self.rank)
        return (rows + columns) * rank * self.min_ratio < rows * columns

    def _groups(self, bucket: Bucket) -> dict[tuple[int, int, int], list[Member]]:
        """The matrices of a bucket by rows, columns and rank of their factors."""
        groups: dict[tuple[int, int, int], list[Member]] = {}
        for member in filter(self._is_matrix, bucket.members):
            rows, columns = member.matrix_shape
            groups.setdefault((rows, columns, min(rows, columns, self.rank)), []).append(member)
        return groups

    def _factor_sizes(self, bucket: Bucket) -> dict[Member, int]:
        groups = self._groups(bucket).items()
        return {member: columns * rank for (_, columns, rank), group in groups for member in group}

    @staticmethod
    def _first_factor(member: Member, size: int) -> Tensor:
        """Random, and the same on all ranks whatever their buckets are."""
        return torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(member.name.encode())))


def _batches(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """`flat` cut into tensors of `shapes`."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def _orthonormal(matrices: Tensor) -> Tensor:
    """Rows of the same span [k, rank, n] that are orthonormal; of zeros, too."""
    exact = matrices if matrices.dtype in (torch.float32, torch.float64) else matrices.float()
    if exact.device.type == "cpu" or len(exact) == 1:
        rows = torch.linalg.qr(exact.mT).Q.mT.contiguous()
    else:
        rows = _householder(exact)  # CUDA's QR takes one matrix after the other
    return rows.to(matrices.dtype)


def _householder(matrices: Tensor) -> Tensor:
    """Orthonormalises the rows of all matrices [k, rank, n] at once (Golub and Van Loan, Matrix Computations, 5.1-5.2).

    Gram-Schmidt and Cholesky divide by zero where rows depend on each other, as those of gradients of low rank do.
    Products are sums here: matrix multiplication may round to TF32.
    """
    # A row of them loses its head in turn to a reflection along `vector`, of length 1, which leaves zeros as they are.
    rows, tiny = matrices.clone(), torch.finfo(matrices.dtype).tiny
    rank, columns = rows.shape[1:]
    vectors = []
    for index in range(rank):
        vector = rows[:, index : index + 1, index:]
        # What is left of rows that depend on others has squares of zero.
        vector /= torch.linalg.vector_norm(vector, torch.inf, dim=-1, keepdim=True).clamp_min(tiny)
        head = vector[..., :1]
        head.add_(vector.norm(dim=-1, keepdim=True).copysign(head))
        vectors.append(nn.functional.normalize(vector, dim=-1))
        _reflect(rows[:, index + 1 :, index:], vectors[-1])
    identity = torch.eye(rank, columns, dtype=rows.dtype, device=rows.device)
    orthonormal = identity.expand_as(rows).contiguous()
    for index in reversed(range(rank)):
        _reflect(orthonormal[:, index:, index:], vectors[index])
    return orthonormal


def _reflect(rows: Tensor, vector: Tensor) -> None:
    rows.addcmul_((rows * vector).sum(-1, keepdim=True), vector, value=-2)
