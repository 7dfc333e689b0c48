"""`powersgd[:rank]`: each matrix of gradients is sent as two thin factors (Vogels et al. 2019, arXiv:1905.13727).

Phases after the warm-up: 1. P = M Q for each matrix, with the Q of the last step (local); 2. all-reduce of all P and of
all vectors, in one message; 3. orthogonalise P, Q = M^T P (local); 4. all-reduce of all Q; 5. M = P Q^T (local). The
warm-up uses plain all-reduce, since early gradients change too fast. A matrix takes 2 (W-1)/W times 4 rank (rows +
columns) bytes.

Differences from torch's `powerSGD_hook`: vectors are sent with P, which saves one collective; matrices of one shape are
orthogonalised together (also on accelerators, whose QR takes one matrix at a time); factors may be sent in 16 bit; and
state is stored by parameter name.
"""

import math
import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from ..flags import check_count, check_number
from .base import ParameterState
from .counting_group import Bucket, CountingGroup, ParamSlice
from .feedback import ErrorFeedbackHook

__all__ = ["PowerSGD"]


class PowerSGD(ErrorFeedbackHook):
    """PowerSGD with error feedback; the factors start from those of the last step.

    Args:
        rank: rank of the approximation; a larger rank sends more bytes and has a smaller error.
        start: see `ErrorFeedbackHook`.
        min_ratio: send a matrix as factors only if they have fewer values by more than this factor.
        feedback: see `ErrorFeedbackHook`.
    """

    name = "powersgd"
    description = "low-rank factors with error feedback: powersgd[:rank][,start=steps]; rank 4, start 10"
    takes_dtype: ClassVar[bool] = True

    def __init__(self, rank: int = 4, start: int = 10, min_ratio: float = 2.0, feedback: bool = True) -> None:
        super().__init__(feedback, start)
        self.rank = check_count("powersgd:rank", rank)
        self.min_ratio = check_number("powersgd:min_ratio", min_ratio, above=0)
        self._factors = ParameterState(self._factor_sizes, initial=self._first_factor)

    def memories(self) -> dict[str, ParameterState]:
        """Returns the residuals, and the factor Q of each matrix, which is the same on all ranks."""
        return {**super().memories(), "factors": self._factors}

    def check(self, module: nn.Module) -> None:
        """Checks the module; warns if it has no matrix to compress."""
        super().check(module)
        members = [ParamSlice(name, tuple(p.shape)) for name, p in module.named_parameters() if p.requires_grad]
        if members and not any(map(self._is_matrix, members)):
            rank_zero_warn(
                f"compression {self.flag!r}: for no parameter of {type(module).__name__} are factors of rank"
                f" {self.rank} smaller than 1/{self.min_ratio:g} of the matrix, so all gradients are sent without"
                " compression. topk, int8 and sign compress parameters of any shape."
            )

    def exchange(self, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        """See the phases above."""
        totals = dict(zip(bucket.members, total.split(bucket.numels), strict=True))
        averages = dict(zip(bucket.members, bucket.gradients.split(bucket.numels), strict=True))
        groups = self._groups(bucket)
        vectors = [member for member in bucket.members if not self._is_matrix(member)]
        factors, new_factors = self._factors.values_of(bucket), self._factors.stage(bucket)
        # Phase 1. Thin factors are stored by rows: products are then several times faster than with columns.
        shapes = [(len(group), rank, columns) for (_, columns, rank), group in groups.items()]
        bases = [_orthonormal(q) for q in _batches(factors, shapes)]
        ps = [
            torch.stack([q @ totals[member].view(rows, columns).T for member, q in zip(group, basis, strict=True)])
            for ((rows, columns, _), group), basis in zip(groups.items(), bases, strict=True)
        ]
        message = self._share([*(totals[member] for member in vectors), *ps], wire)
        num_raw = sum(member.numel for member in vectors)
        raw = message[:num_raw].split([member.numel for member in vectors])
        for member, part in zip(vectors, raw, strict=True):
            totals[member].sub_(part, alpha=wire.size)  # leaves the rounding errors of the division and of 16 bit
        # Phase 2.
        wire.all_reduce(message)
        for member, part in zip(vectors, raw, strict=True):
            averages[member].copy_(part)
        if not groups:
            return
        # Phase 3.
        ps = [_orthonormal(p.to(total.dtype)) for p in _batches(message[num_raw:], [p.shape for p in ps])]
        qs = [
            torch.stack([p @ totals[member].view(rows, columns) for member, p in zip(group, batch, strict=True)])
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
                totals[member].sub_(averages[member])
        for q, old, new in zip(batches, _batches(factors, shapes), _batches(new_factors, shapes), strict=True):
            # A matrix of zeros (a parameter that is unused in this step) gives no useful factor for the next step.
            torch.where(q.flatten(1).any(1)[:, None, None], q, old, out=new)

    def _share(self, tensors: list[Tensor], wire: CountingGroup) -> Tensor:
        """Returns this rank's contribution to the averages of `tensors`, as one message."""
        message = torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(wire.size)
        return message if self.send_dtype is None else message.to(self.send_dtype)

    def _is_matrix(self, member: ParamSlice) -> bool:
        rows, columns = member.matrix_shape
        rank = min(rows, columns, self.rank)
        return (rows + columns) * rank * self.min_ratio < rows * columns

    def _groups(self, bucket: Bucket) -> dict[tuple[int, int, int], list[ParamSlice]]:
        """Groups the matrices of a bucket by rows, columns and rank of their factors."""
        groups: dict[tuple[int, int, int], list[ParamSlice]] = {}
        for member in filter(self._is_matrix, bucket.members):
            rows, columns = member.matrix_shape
            groups.setdefault((rows, columns, min(rows, columns, self.rank)), []).append(member)
        return groups

    def _factor_sizes(self, bucket: Bucket) -> dict[ParamSlice, int]:
        groups = self._groups(bucket).items()
        return {member: columns * rank for (_, columns, rank), group in groups for member in group}

    @staticmethod
    def _first_factor(member: ParamSlice, size: int) -> Tensor:
        """Returns random values that depend only on the parameter, so they are the same on all ranks."""
        return torch.randn(size, generator=torch.Generator().manual_seed(zlib.crc32(member.name.encode())))


def _batches(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Splits `flat` into tensors of `shapes`."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def _orthonormal(matrices: Tensor) -> Tensor:
    """Returns orthonormal rows with the same span [k, rank, n], also for matrices of zeros."""
    exact = matrices if matrices.dtype in (torch.float32, torch.float64) else matrices.float()
    if exact.device.type == "cpu" or len(exact) == 1:  # of one matrix, QR took 0.52 ms on an H200, and this 0.57
        rows = torch.linalg.qr(exact.mT).Q.mT.contiguous()
    else:
        rows = _householder(exact)  # CUDA's QR takes one matrix after the other
    return rows.to(matrices.dtype)


def _householder(matrices: Tensor) -> Tensor:
    """Orthonormalises the rows of all matrices [k, rank, n] at once (Golub and Van Loan, Matrix Computations, 5.1-5.2).

    Gram-Schmidt and Cholesky divide by zero for linearly dependent rows, which gradients of low rank have. Products are
    written as sums, because matrix multiplication may round to TF32.
    """
    # Each row in turn is reflected along the unit vector `vector`; the reflection keeps the zeros of earlier rows.
    rows, tiny = matrices.clone(), torch.finfo(matrices.dtype).tiny
    rank, columns = rows.shape[1:]
    vectors = []
    for index in range(rank):
        vector = rows[:, index : index + 1, index:]
        # Divided by the maximum first: the squares of a dependent row's tiny remainder would underflow to zero.
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
