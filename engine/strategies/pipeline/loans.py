"""Lends parameters for the time of a batch to stages that use them outside of units but do not hold them.

Examples are an output layer that is registered before the blocks, and a norm after the blocks that the first stage
uses. In a trial run each stage notes which parameters it needs. Optimizer, checkpoints and norms use the holder's
parameter only.

Phases, per batch, for each pair of a holder and a borrower:
1. before the micro-batches: the holder sends the values, one message for each dtype;
2. after all backward passes: the borrower sends its gradients, and for each parameter whether it has one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compression.counting_group import CountingGroup, TrafficKey
from ..contents import begin_count
from .plan import StagePlan
from .remote_values import CutError

__all__ = ["BorrowedParameters", "Loan", "lend", "loans_between", "loans_text", "return_gradients"]


class BorrowedParameters:
    """Parameters of other ranks that this rank has for the time of a batch; at other times they are shapes.

    Args:
        module: the module whose parameters are replaced.
        allowed: whether parameters may be borrowed.
    """

    def __init__(self, module: nn.Module, *, allowed: bool) -> None:
        self._module, self.allowed = module, allowed
        self._present: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._found: dict[int, list[tuple[str, nn.Module, str]]] = {}

    def lent(self, shape: Tensor) -> nn.Parameter | None:
        """Returns the parameter that is in the module in place of `shape`; None if it is not lent."""
        pair = self._present.get(id(shape))
        return None if pair is None else pair[1]

    def put(self, shape: nn.Parameter, content: Tensor) -> nn.Parameter:
        """Replaces a shape by a parameter with content, under all its names; returns the parameter."""
        parameter = nn.Parameter(content, shape.requires_grad)
        begin_count(parameter)  # until the end of the batch, as the parameters of this rank
        self._present[id(shape)] = shape, parameter
        places = self._found[id(parameter)] = self._all_places()[id(shape)]
        for _, submodule, name in places:
            submodule._parameters[name] = parameter
            self._places.append((submodule, name, shape))
        return parameter

    def name_of(self, shape: nn.Parameter) -> str:
        """Returns the first name of a parameter that this rank does not hold."""
        return self._all_places()[id(shape)][0][0]

    def _all_places(self) -> dict[int, list[tuple[str, nn.Module, str]]]:
        """Returns where each parameter is: its name, and module and key; one walk for all that are borrowed."""
        if not self._found:
            for path, submodule in self._module.named_modules():
                for key, parameter in submodule._parameters.items():
                    place = (f"{path}.{key}" if path else key), submodule, key
                    self._found.setdefault(id(parameter), []).append(place)
        return self._found

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._present.values())

    def clear(self) -> None:
        """Puts the shapes back in the places of the borrowed parameters."""
        for part, name, shape in self._places:
            part._parameters[name] = shape
        self._places.clear()
        self._present.clear()
        self._found.clear()


class Loan:
    """The parameters that one rank of a pipeline lends to another.

    Args:
        holder: rank within the pipeline that has the parameters.
        borrower: rank within the pipeline that needs them.
        parameters: parameters of one dtype; on the borrower, their shapes.
    """

    def __init__(self, holder: int, borrower: int, parameters: Sequence[nn.Parameter]) -> None:
        self.holder, self.borrower, self.parameters = holder, borrower, parameters
        self.sizes = [parameter.numel() for parameter in parameters]


def loans_between(module: nn.Module, plan: StagePlan, borrowed: dict[int, list[str]], num_ranks: int) -> list[Loan]:
    """Returns the loans of a batch, in the same order on all ranks.

    Args:
        module: the module whose parameters they are.
        plan: says which stages hold a parameter.
        borrowed: the names of the parameters that each stage borrows.
        num_ranks: number of ranks of the pipeline; stage s is on rank s modulo that.
    """
    parameters = dict(module.named_parameters()) if any(borrowed.values()) else {}
    pairs: dict[tuple[int, int, str], dict[str, nn.Parameter]] = defaultdict(dict)
    for stage, names in borrowed.items():
        for name in names:
            parameter = parameters[name]
            holders = sorted({holder % num_ranks for holder in plan.holders[parameter]})
            if stage % num_ranks not in holders:
                pairs[holders[0], stage % num_ranks, str(parameter.dtype)][name] = parameter
    return [Loan(*pair[:2], list(of_pair.values())) for pair, of_pair in sorted(pairs.items())]


def loans_text(module: nn.Module, plan: StagePlan, borrowed: dict[int, list[str]]) -> str | None:
    """Describes the loans, for the log; None if nothing is lent.

    Raises:
        CutError: a stage would borrow the blocks of all other stages, as for a penalty over `self.parameters()`.
    """
    parameters = dict(module.named_parameters())
    for stage, names in borrowed.items():
        others = (unit for other, units in enumerate(plan.stages) if other != stage for unit in units)
        of_blocks = {parameter for unit in others for parameter in unit.parameters()}
        if of_blocks and of_blocks <= {parameters[name] for name in names}:
            raise CutError(
                f"the step uses the parameters of all blocks on pipeline stage {stage}, outside of them: {names[0]!r}"
                " and others. If it is for a penalty on weights, set the optimizer's `weight_decay`; or choose another"
                " strategy, such as 'fsdp'."
            )
    uses = [
        f"stage {stage} uses {', '.join(names)} ({sum(parameters[name].nbytes for name in names) / 1e6:.3g} MB)"
        for stage, names in borrowed.items()
        if names
    ]
    if not uses:
        return None
    return (
        f"pipeline: {'; '.join(uses)}, which another stage holds: this is sent there and its gradient back, once a"
        " batch. It is not, if modules are assigned to attributes in the order of their use, those behind the blocks"
        " after these, or if the module has a method pipeline_stages() that names them."
    )


def lend(loans: Sequence[Loan], borrowed: BorrowedParameters, wire: CountingGroup, device: torch.device) -> None:
    """Phase 1: sends the values of the parameters that are lent."""
    for loan in loans:
        if wire.rank == loan.holder:
            _send(torch.cat([p.detach().reshape(-1) for p in loan.parameters]), loan.borrower, wire, "lend_parameters")
        if wire.rank == loan.borrower:
            flat = torch.empty(sum(loan.sizes), dtype=loan.parameters[0].dtype, device=device)
            dist.recv(flat, dist.get_global_rank(wire.group, loan.holder), group=wire.group)  # type: ignore[arg-type]
            for shape, content in zip(loan.parameters, flat.split(loan.sizes), strict=True):
                borrowed.put(shape, content.view(shape.shape).clone())


def return_gradients(
    loans: Sequence[Loan], borrowed: BorrowedParameters, wire: CountingGroup, device: torch.device
) -> None:
    """Phase 2: sends the gradients of borrowed parameters back to their holders, which add them to their own."""
    for loan in loans:
        trained = [p for p in loan.parameters if p.requires_grad]
        if not trained:
            continue
        sizes = [p.numel() for p in trained]
        if wire.rank == loan.borrower:
            gradients = [_lent(borrowed, p).grad for p in trained]
            parts = [
                torch.zeros(p.shape, dtype=p.dtype, device=device) if g is None else g
                for p, g in zip(trained, gradients, strict=True)
            ]
            flags = torch.tensor([g is not None for g in gradients], dtype=trained[0].dtype, device=device)
            _send(torch.cat([*(g.reshape(-1) for g in parts), flags]), loan.holder, wire, "return_gradients")
        if wire.rank == loan.holder:
            flat = torch.empty(sum(sizes) + len(sizes), dtype=trained[0].dtype, device=device)
            dist.recv(flat, dist.get_global_rank(wire.group, loan.borrower), group=wire.group)  # type: ignore[arg-type]
            *parts, flags = flat.split([*sizes, len(sizes)])
            for parameter, gradient, has_gradient in zip(trained, parts, flags.tolist(), strict=True):
                if has_gradient:
                    _add(parameter, gradient.view(parameter.shape))


def _lent(borrowed: BorrowedParameters, shape: Tensor) -> nn.Parameter:
    parameter = borrowed.lent(shape)
    assert parameter is not None
    return parameter


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad += gradient


def _send(flat: Tensor, receiver: int, wire: CountingGroup, name: Any) -> None:
    dist.send(flat, dist.get_global_rank(wire.group, receiver), group=wire.group)  # type: ignore[arg-type]
    wire.sent[TrafficKey(name, 0)] += flat.nbytes
