"""Sums and averages gradients of pipeline stages, when the last schedule of an accumulation window has run.

Phases:
1. parameters that several stages hold (tied embeddings): an all-reduce of 4 bytes an element between these stages;
2. `pp+ddp`: an all-reduce of 4 bytes an element of this stage over the replicas, in buckets;
3. to clip: an all-reduce over the stages of one sum of squares, in which each parameter counts once.
A parameter without a gradient on any rank is left out of phases 1 and 2. The ranks gather which parameters these are in
the first step, and again in the first step after `requires_grad` has changed.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compression import Bucket, CommHook, CountingGroup, ParamSlice
from ...compression.counting_group import accumulation_dtype
from ...distributed.buckets import local_part
from ...distributed.object_group import ObjectGroup
from ...precision.clipping import norm_of
from .plan import RemoteTensor

__all__ = ["StageGradients"]

_BUCKET_BYTES = 25 * 2**20


class StageGradients:
    """Sums the gradients of this rank's parameters over the stages and averages them over the pipelines.

    Args:
        parameters: all parameters of the module, by name, in the same order on all ranks.
        holders: for each name, the ranks within the pipeline that hold the parameter.
        group: process group of the ranks of this pipeline.
        hosts: the same ranks, for plain values.
        wires: for each set of ranks that hold a parameter together, the group of these ranks of this pipeline.
        device: device of this rank's parameters.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        holders: dict[str, tuple[int, ...]],
        group: Any,
        hosts: ObjectGroup,
        wires: dict[tuple[int, ...], CountingGroup],
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
        self._unused_elsewhere: set[int] = set()
        """The ids of other stages' parameters that no step uses."""
        self._shared: dict[tuple[int, ...], list[nn.Parameter]] = {}

    def synchronise(self, comm_hook: CommHook | None, replicas: ObjectGroup) -> None:
        """Sums and averages the gradients of a window; called on all ranks.

        Args:
            comm_hook: averages buckets over the replicas; None where there are none.
            replicas: the ranks with the same stages and other samples.

        Raises:
            ValueError: a parameter has a gradient that is unknown to the other ranks.
        """
        # Equal on all ranks: each has a shape for every parameter that it does not hold.
        trained = tuple(parameter.requires_grad for parameter in self._parameters.values())
        if trained != self._trained:
            self._find_used(replicas)
            self._trained = trained
        RemoteTensor.without_gradient = set(self._unused_elsewhere)
        self._check(averages=comm_hook is not None)
        for holders, parameters in self._shared.items():
            self._sum(parameters, self._wires[holders])
        if comm_hook is not None:
            self._average(comm_hook)

    def _find_used(self, replicas: ObjectGroup) -> None:
        """Gathers which parameters have a gradient on some rank; the others are left out."""
        own_used = {name for name, parameter in self._own.items() if parameter.grad is not None}
        used: set[str] = set().union(*self._hosts.all_gather_object(own_used))
        used = used.union(*replicas.all_gather_object(used))
        self._used = {name: parameter for name, parameter in self._own.items() if name in used}
        self._unused_elsewhere = {id(p) for name, p in self._parameters.items() if p.is_meta and name not in used}
        self._shared = defaultdict(list)
        for name, parameter in self._used.items():
            if len(self._holders[name]) > 1:
                self._shared[self._holders[name]].append(parameter)

    def _check(self, *, averages: bool) -> None:
        """Raises an error for a gradient that is unknown to other ranks: it would differ between them."""
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

    def _sum(self, parameters: Sequence[nn.Parameter], wire: CountingGroup) -> None:
        for gradients in _of_one_dtype(parameters):
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            wire.all_reduce(flat)
            _copy_back(flat, gradients)

    def _average(self, comm_hook: CommHook) -> None:
        names = {id(parameter): name for name, parameter in self._used.items()}
        for index, parameters in enumerate(_buckets(list(self._used.values()))):
            gradients = [_gradient(parameter) for parameter in parameters]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            members = tuple(
                ParamSlice(names[id(p)], tuple(g.shape)) for p, g in zip(parameters, gradients, strict=True)
            )
            comm_hook.run(Bucket(index, flat, members))
            _copy_back(flat, gradients)

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Returns the 2-norm of the gradients of all stages, a 0-d tensor.

        Args:
            parameters: parameters of this rank, whose gradients count.
        """
        norm = norm_of([parameter for parameter in parameters if parameter in self._counted])
        # In one dtype on all stages, also on a stage without gradients; a square may leave the range of 16 bit.
        squared = norm.to(self._device, torch.float64).square()
        dist.all_reduce(squared, group=self._group)
        return squared.sqrt().to(accumulation_dtype(norm.dtype))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Returns this rank's part of a gradient; zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)


def _of_one_dtype(parameters: Sequence[nn.Parameter]) -> Iterable[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_dtype[parameter.dtype].append(_gradient(parameter))
    return by_dtype.values()


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Groups neighbours of one dtype into buckets of about `_BUCKET_BYTES`."""
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
    for gradient, value in zip(gradients, parts, strict=True):
        gradient.copy_(value.view(gradient.shape))
