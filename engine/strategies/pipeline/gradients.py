"""Gradients of a module whose parameters are spread over pipeline stages, once a window's last schedule has run.

Phases:
1. parameters that several stages hold (tied embeddings): an all-reduce of 4 bytes a value between these stages alone;
2. `pp+ddp`: an all-reduce of 4 bytes a parameter of this stage over the replicas, in buckets;
3. for clipping: an all-reduce over the stages of one sum of squares, in which a parameter counts once.
A parameter of which no rank has a gradient is left out of phases 1 and 2. Which ones these are, the ranks tell each
other in the first step, and in the first one after `requires_grad` has changed anywhere.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...compression import Bucket, CommHook, Member, Wire
from ...compression.bucket import wide
from ...host_group import HostGroup
from ..clipping import norm_of

__all__ = ["SpreadGradients"]

_BUCKET_BYTES = 25 * 2**20


class SpreadGradients:
    """The gradients of this rank's part of a module, summed over the stages and averaged over the pipelines.

    Args:
        parameters: all of the module's, by name, in an order that is the same on all ranks.
        holders: for each name, the ranks within the pipeline that hold it.
        group: process group of the ranks of this pipeline.
        hosts: the same ranks, for plain values.
        wires: for each set of ranks that hold something together, one between those of this pipeline.
        device: of this rank's parameters.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        holders: dict[str, tuple[int, ...]],
        group: Any,
        hosts: HostGroup,
        wires: dict[tuple[int, ...], Wire],
        device: torch.device,
    ) -> None:
        self._group, self._hosts, self._wires = group, hosts, wires
        self._device = device
        rank = dist.get_rank(group)
        self._parameters, self._holders = parameters, holders
        self._own = {name: parameter for name, parameter in parameters.items() if rank in holders[name]}
        self._counted = {parameter for name, parameter in self._own.items() if holders[name][0] == rank}
        self._trained: tuple[bool, ...] = ()
        self._used: dict[str, nn.Parameter] = {}
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}

    def synchronise(self, averaging: CommHook | None, replicas: HostGroup) -> None:
        """Sums and averages; called on all ranks, when the gradients of a window are there.

        Args:
            averaging: averages buckets over the replicas; None where there are none.
            replicas: the ranks with the same stages and other samples.

        Raises:
            ValueError: there is a gradient that the other ranks do not know of.
        """
        # The same on all ranks, which have shapes of what they do not hold.
        trained = tuple(parameter.requires_grad for parameter in self._parameters.values())
        if trained != self._trained:
            self._agree(replicas)
            self._trained = trained
        self._check(averages=averaging is not None)
        for holders, parameters in self._shared.items():
            self._sum(parameters, self._wires[holders])
        if averaging is not None:
            self._average(averaging)

    def _agree(self, replicas: HostGroup) -> None:
        """Leaves out what nobody has a gradient of."""
        mine = {name for name, parameter in self._own.items() if parameter.grad is not None}
        used: set[str] = set().union(*self._hosts.gathered(mine))
        used = used.union(*replicas.gathered(used))
        self._used = {name: parameter for name, parameter in self._own.items() if name in used}
        self._shared = defaultdict(list)
        for name, parameter in self._used.items():
            if len(self._holders[name]) > 1:
                self._shared[self._holders[name]].append(parameter)

    def _check(self, *, averages: bool) -> None:
        """A gradient that others do not know of would go a way of its own on each rank."""
        new = [
            name
            for name, parameter in self._own.items()
            if parameter.grad is not None and name not in self._used and (averages or len(self._holders[name]) > 1)
        ]
        if new:
            raise ValueError(
                f"in a pipeline, these parameters, which several ranks hold, had no gradient in the first step that"
                f" they could have had one in, and have one now: {', '.join(new)}. Use them in every step (if need be"
                " times zero), set requires_grad=False until they are used, or choose another strategy, such as 'fsdp'."
            )

    def _sum(self, parameters: Sequence[nn.Parameter], wire: Wire) -> None:
        for gradients in _of_one_dtype(parameters):
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            wire.all_reduce(flat)
            _copy_back(flat, gradients)

    def _average(self, averaging: CommHook) -> None:
        names = {id(parameter): name for name, parameter in self._used.items()}
        for index, parameters in enumerate(_buckets(list(self._used.values()))):
            gradients = [_gradient(parameter) for parameter in parameters]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            members = tuple(Member(names[id(p)], tuple(g.shape)) for p, g in zip(parameters, gradients, strict=True))
            averaging.run(Bucket(index, flat, members))
            _copy_back(flat, gradients)

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The 2-norm of the gradients on all stages (a 0-d tensor), of the parameters given here."""
        norm = norm_of([parameter for parameter in parameters if parameter in self._counted])
        # In one dtype on all stages, one without gradients too; a square may leave the range of 16 bit.
        squared = norm.to(self._device, torch.float64).square()
        dist.all_reduce(squared, group=self._group)
        return squared.sqrt().to(wide(norm.dtype))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Returns this rank's part of a gradient; zeros where it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad


def _of_one_dtype(parameters: Sequence[nn.Parameter]) -> Iterable[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_dtype[parameter.dtype].append(_gradient(parameter))
    return by_dtype.values()


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Runs of neighbours of one dtype that are not much larger than a bucket."""
    bucket: list[nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        if bucket and (num_bytes >= _BUCKET_BYTES or bucket[0].dtype != parameter.dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(parameter)
        num_bytes += parameter.nbytes
    if bucket:
        yield bucket


def _copy_back(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))
