"""Parameters that a stage uses outside of its units, though another stage holds them: lent for the time of a batch.

An output layer that is registered before the blocks, say, or a norm behind them that the first stage uses. In a trial
run each stage notes which these are. Optimizer, checkpoints and norms know the holder's alone.

Phases, per batch, for each pair of a holder and a borrower:
1. before the micro-batches: the holder sends the values, those of one dtype as one;
2. after their backwards: the borrower sends its gradient, and for each parameter whether it has one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compression.wire import Sent, Wire
from .absent import CutError
from .plan import Plan

__all__ = ["Borrowed", "Loan", "lend", "loans_between", "loans_text", "return_gradients"]


class Borrowed:
    """Parameters that this rank has for a while; otherwise they are shapes.

    Args:
        module: in whose modules they are put.
        allowed: whether any may be.
    """

    def __init__(self, module: nn.Module, *, allowed: bool) -> None:
        self._module, self.allowed = module, allowed
        self._present: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []

    def of(self, shape: Tensor) -> nn.Parameter | None:
        """The parameter that stands in the module in place of `shape`; None if there is none."""
        found = self._present.get(id(shape))
        return None if found is None else found[1]

    def put(self, shape: nn.Parameter, content: Tensor) -> nn.Parameter:
        """Puts content in the place of a shape, under all its names."""
        parameter = nn.Parameter(content, shape.requires_grad)
        self._present[id(shape)] = shape, parameter
        for part in self._module.modules():
            for name, value in part._parameters.items():
                if value is shape:
                    part._parameters[name] = parameter
                    self._places.append((part, name, shape))
        return parameter

    def name_of(self, shape: nn.Parameter) -> str:
        """The first name of a parameter that is not there."""
        return next(name for name, parameter in self._module.named_parameters() if parameter is shape)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self._present.values())

    def clear(self) -> None:
        """Puts the shapes back."""
        for part, name, shape in self._places:
            part._parameters[name] = shape
        self._places.clear()
        self._present.clear()


class Loan:
    """The parameters that one rank of a pipeline lends to another.

    Args:
        holder: rank within the pipeline.
        borrower: another.
        parameters: of one dtype; on the borrower, their shapes.
    """

    def __init__(self, holder: int, borrower: int, parameters: Sequence[nn.Parameter]) -> None:
        self.holder, self.borrower, self.parameters = holder, borrower, parameters
        self.sizes = [parameter.numel() for parameter in parameters]


def loans_between(module: nn.Module, plan: Plan, borrowed: dict[int, list[str]], num_ranks: int) -> list[Loan]:
    """Who lends what to whom, in one order on all ranks.

    Args:
        module: whose parameters they are.
        plan: says who holds them.
        borrowed: by stage, the names of parameters.
        num_ranks: of the pipeline; stage s is on rank s modulo that.
    """
    known = dict(module.named_parameters())
    pairs: dict[tuple[int, int, str], dict[str, nn.Parameter]] = defaultdict(dict)
    for stage, names in borrowed.items():
        for name in names:
            holders = sorted({holder % num_ranks for holder in plan.holders[known[name]]})
            if stage % num_ranks not in holders:
                pairs[holders[0], stage % num_ranks, str(known[name].dtype)][name] = known[name]
    return [Loan(*pair[:2], list(parameters.values())) for pair, parameters in sorted(pairs.items())]


def loans_text(module: nn.Module, plan: Plan, borrowed: dict[int, list[str]]) -> str | None:
    """Describes the loans, for the log; None if nothing is lent.

    Raises:
        CutError: a stage would have all blocks of all others, as for a penalty over `self.parameters()`.
    """
    known = dict(module.named_parameters())
    for stage, names in borrowed.items():
        others = (unit for other, units in enumerate(plan.stages) if other != stage for unit in units)
        of_blocks = {parameter for unit in others for parameter in unit.parameters()}
        if of_blocks and of_blocks <= {known[name] for name in names}:
            raise CutError(
                f"the step uses the parameters of all blocks on pipeline stage {stage}, outside of them: {names[0]!r}"
                " and others. If it is for a penalty on weights, set the optimizer's `weight_decay`; or choose another"
                " strategy, such as 'fsdp'."
            )
    said = [
        f"stage {stage} uses {', '.join(names)} ({sum(known[name].nbytes for name in names) / 1e6:.3g} MB)"
        for stage, names in borrowed.items()
        if names
    ]
    if not said:
        return None
    return (
        f"pipeline: {'; '.join(said)}, which another stage holds: this is sent there and its gradient back, once a"
        " batch. It is not, if modules are assigned to attributes in the order of their use, those behind the blocks"
        " after these, or if the module has a method pipeline_stages() that names them."
    )


def lend(loans: Sequence[Loan], borrowed: Borrowed, wire: Wire, device: torch.device) -> None:
    """Phase 1.

    Raises:
        CutError: a hook of the user's waits for the gradient of a parameter, of which it would see a part.
    """
    for loan in loans:
        if wire.rank == loan.holder:
            if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in loan.parameters):
                raise CutError(
                    "a parameter that another pipeline stage uses too has a hook on its gradient, which would not see"
                    " that stage's part: change the gradient in on_before_optimizer_step, or choose another strategy,"
                    " such as 'fsdp'."
                )
            _send(torch.cat([p.detach().reshape(-1) for p in loan.parameters]), loan.borrower, wire, "lend_parameters")
        if wire.rank == loan.borrower:
            flat = torch.empty(sum(loan.sizes), dtype=loan.parameters[0].dtype, device=device)
            dist.recv(flat, dist.get_global_rank(wire.group, loan.holder), group=wire.group)  # type: ignore[arg-type]
            for shape, content in zip(loan.parameters, flat.split(loan.sizes), strict=True):
                borrowed.put(shape, content.view(shape.shape).clone())


def return_gradients(loans: Sequence[Loan], borrowed: Borrowed, wire: Wire, device: torch.device) -> None:
    """Phase 2."""
    for loan in loans:
        trained = [p for p in loan.parameters if p.requires_grad]
        if not trained:
            continue
        sizes = [p.numel() for p in trained]
        if wire.rank == loan.borrower:
            gradients = [_there(borrowed, p).grad for p in trained]
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
            for parameter, part, has_one in zip(trained, parts, flags.tolist(), strict=True):
                if has_one:
                    _add(parameter, part.view(parameter.shape))


def _there(borrowed: Borrowed, shape: Tensor) -> nn.Parameter:
    found = borrowed.of(shape)
    assert found is not None
    return found


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient.clone()
    else:
        parameter.grad += gradient


def _send(flat: Tensor, to: int, wire: Wire, name: Any) -> None:
    dist.send(flat, dist.get_global_rank(wire.group, to), group=wire.group)  # type: ignore[arg-type]
    wire.sent[Sent(name, 0)] += flat.nbytes
