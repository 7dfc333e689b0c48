"""Puts the values that a stage has received, and parameters it borrows, in the places of tensors without content."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ...compression.counting_group import CountingGroup, TrafficKey
from ...data.samples import tensors_in
from ..callers import CutError, users_line
from ..contents import begin_count
from .plan import StagePlan
from .remote_values import Calls, Key
from .shapes import Shapes, shape_of, zeros_of

__all__ = [
    "BorrowedParameters",
    "FilledTensors",
    "Loan",
    "ReceivedValues",
    "lend",
    "loans_between",
    "loans_text",
    "return_gradients",
]


class FilledTensors:
    """Maps absent tensors that could not be filled in place to tensors with their content, until backward is over."""

    def __init__(self) -> None:
        self._contents: dict[int, tuple[Tensor, Tensor]] = {}
        """Maps the id of an absent tensor to that tensor, which is kept alive, and its content."""

    def content_of(self, tensor: Tensor) -> Tensor | None:
        """Returns the tensor with the content of an absent one; None if there is none."""
        absent, content = self._contents.get(id(tensor), (None, None))
        return content if absent is tensor else None

    def fill(self, absent: Tensor, content: Tensor) -> Tensor:
        """Gives an absent tensor its content: in place if possible, so that every reference to it has the content.

        Returns:
            The tensor that has the content.
        """
        if not absent.is_meta:
            return absent
        if (filled := self.content_of(absent)) is not None:
            return filled
        if not _swap(absent, alias := content.view_as(content)):
            self._contents[id(absent)] = absent, alias
            return alias
        return absent

    def fill_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replaces such tensors in the arguments of a call by tensors with content."""
        if not self._contents:
            return args, kwargs
        return apply_to_collection((args, kwargs), Tensor, lambda tensor: _or(self.content_of(tensor), tensor))

    def clear(self) -> None:
        """Releases the tensors."""
        self._contents.clear()


class ReceivedValues:
    """The values of other stages that one stage has while it runs a micro-batch.

    Args:
        stage: number of the stage.
        filled: filled tensors of the module.
        borrowed: borrowed parameters of the module.
        device: device of the stage.
        plan: says which stages hold a parameter.
    """

    def __init__(
        self, stage: int, filled: FilledTensors, borrowed: "BorrowedParameters", device: torch.device, plan: StagePlan
    ) -> None:
        self._stage, self._filled, self._borrowed, self._device = stage, filled, borrowed, device
        self._plan = plan
        self._first_node = 0
        self._leaves: dict[int, Tensor] = {}
        self.calls = Calls()
        self._shapes = Shapes()
        self._is_trial = False
        self._views: list[tuple[Tensor, int | Tensor]] = []
        """Received views of one storage, which arrive as separate tensors; each with its version, or with a copy."""

    def begin(self, shapes: Shapes, *, is_trial: bool) -> None:
        """Called when the stage begins a micro-batch.

        Args:
            shapes: shapes of this kind of micro-batch.
            is_trial: whether this is a trial run.
        """
        self._shapes, self._is_trial = shapes, is_trial
        carried = shapes.carried
        self.calls.begin((*carried.get(self._stage, ()), *carried.get(self._stage + 1, ())), is_trial=is_trial)
        self._views.clear()

    def end(self) -> None:
        """Called when the stage's part is over.

        Raises:
            CutError: the step has written in place into one of several views of one value. They arrive as separate
                tensors, so the other views lack the write.
        """
        self.calls.end()
        self._leaves.clear()
        if any(not _is_unchanged(tensor, before) for tensor, before in self._views):
            raise CutError(
                f"the step writes in place, on pipeline stage {self._stage}, into one of several views of a value of an"
                " earlier stage: write `x = x + 1`, not `x += 1`, or choose another strategy, such as 'fsdp'."
            )
        self._views.clear()

    def begin_trial_part(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Notes, in a trial run, which arguments of the stage's first unit have no content.

        Arguments that the previous stage lacks as well are asked for by the key of their call: see `supply`.

        Args:
            tensors: the arguments of the stage's first unit.

        Returns:
            Zeros in the place of what the previous stage will send; None if that stage calls the unit with fewer
            arguments.
        """
        shapes, offered = self._shapes, dict(enumerate(self._shapes.offered[self._stage - 1]))
        shapes.starts[self._stage] = self.calls.count
        shapes.needed[self._stage] = [
            index for index, tensor in enumerate(tensors) if tensor.is_meta and offered.get(index, tensor) is not None
        ]
        if any(index >= len(offered) for index in shapes.needed[self._stage]):
            return None  # the runner raises an error
        return tuple(zeros_of(shape, self._device) for shape in shapes.sent(self._stage - 1))

    def fill(self, tensors: Sequence[Tensor], received: Iterable[Tensor]) -> None:
        """Fills the first unit's arguments, and the carried values, with what the stage has received.

        Args:
            tensors: the arguments of the stage's first unit.
            received: from the previous stage.
        """
        absent = [tensors[index] for index in self._shapes.needed[self._stage]]
        absent += [self.result_of(key) for key in self._shapes.carried.get(self._stage, ())]
        storages = [tensor.untyped_storage()._cdata if tensor.is_meta else None for tensor in absent]
        for tensor, content, storage in zip(absent, received, storages, strict=True):
            filled = self._filled.fill(tensor, content)
            if storage is not None and storages.count(storage) > 1:
                self._views.append((filled, filled.clone() if filled.is_inference() else filled._version))

    def result_of(self, key: Key) -> Tensor:
        """Returns the result of a call in this micro-batch's step.

        Raises:
            CutError: the step made other calls.
        """
        result = self.calls.kept.get(key)
        if result is None:
            raise CutError(
                "the step makes other calls than for the first batch of this batch's shapes: a value that one pipeline"
                f" stage hands on to another is missing on stage {self._stage}. Hand it on through the arguments of the"
                " blocks, or choose another strategy, such as 'fsdp'."
            )
        return _or(self._filled.content_of(result), result)

    def offered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the arguments of the next stage's first unit, with content if this stage has it."""
        return [_or(self._filled.content_of(tensor), tensor) for tensor in tensors]

    def supply(self, tensor: Tensor) -> Tensor | None:
        """Returns the content of an absent tensor that the stage's own part uses; None if the stage does not have it.

        In a trial run it notes the tensor as used, and returns zeros.
        """
        if (filled := self._filled.content_of(tensor)) is not None:
            return filled
        borrowed = self._borrowed
        if isinstance(tensor, nn.Parameter):
            if (parameter := borrowed.lent(tensor)) is not None or not (self._is_trial and borrowed.allowed):
                return parameter
            self._shapes.borrowed.setdefault(self._stage, []).append(borrowed.name_of(tensor))
            return borrowed.put(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device))
        key = self.calls.key_of(tensor) if self._is_trial else None
        if key is None or key[0] > self._shapes.starts[self._stage]:
            return None
        signature = self._shapes.used.setdefault(self._stage, {})[key] = self.calls.signatures[key]
        shape = shape_of(torch.empty(signature.shape, dtype=signature.dtype, device="meta"))
        return self._filled.fill(tensor, zeros_of(shape, self._device))

    def begin_own_part(self) -> None:
        """Called where the stage's own part begins: from here on it computes with real values."""
        self._first_node = torch.autograd._get_sequence_nr()

    def check_graph(self, func: Any, args: Any, kwargs: Any) -> None:
        """Checks that `torch.autograd.grad` within the step stays within this stage's graph; other calls note a leaf.

        Args:
            func: one of `remote_values._OF_GRAPHS`.
            args: arguments of the call.
            kwargs: keyword arguments of the call.

        Raises:
            CutError: an input was computed before this stage's part, or several stages hold it, so that a part of its
                graph may be on another stage.
        """
        if self._stage == 0:
            return
        if func is not torch.autograd.grad:
            self._leaves[id(args[0])] = args[0]
            return
        inputs = kwargs.get("inputs", args[1] if len(args) > 1 else ())
        if not all(self._is_of_this_stage(tensor) for tensor in tensors_in(inputs)):
            raise CutError(
                f"{users_line()} asks for a gradient within the step, but no pipeline stage has the whole graph, from"
                " what comes before its own part, and so none can give that, or the gradient of a gradient, as"
                " create_graph=True needs, for example for a gradient penalty: choose another strategy, such as 'fsdp'."
            )

    def _is_of_this_stage(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter):
            lent = {name for names in self._shapes.borrowed.values() for name in names}
            return self._plan.holders.get(tensor) == (self._stage,) and not (
                lent and self._borrowed.name_of(tensor) in lent
            )
        if tensor.grad_fn is None:
            return id(tensor) in self._leaves
        return tensor.grad_fn._sequence_nr() >= self._first_node

    def end_trial(self, *, is_known: bool) -> None:
        """Ends a trial run: notes the values that the stage has computed, for the stages behind it.

        Args:
            is_known: whether an earlier trial run has shown which values the stage uses.
        """
        shapes, signatures = self._shapes, self.calls.signatures
        start = shapes.starts.get(self._stage, self.calls.count)
        shapes.made[self._stage] = {key: signature for key, signature in signatures.items() if key[0] > start}
        if is_known:  # the values, but not their signatures for this batch's shapes
            used = shapes.used.get(self._stage, {})
            shapes.used[self._stage] = {key: signature for key, signature in signatures.items() if key in used}
        self._is_trial = False
        self._borrowed.clear()
        self._filled.clear()


def _is_unchanged(tensor: Tensor, before: int | Tensor) -> bool:
    return torch.equal(tensor, before) if isinstance(before, Tensor) else tensor._version == before


def _swap(absent: Tensor, content: Tensor) -> bool:
    if isinstance(absent, nn.Parameter):
        return False
    try:
        torch.utils.swap_tensors(absent, content)
    except RuntimeError:  # C++ code refers to the tensor: it has a view, or torch.utils.checkpoint keeps it
        return False
    return True


def _or(content: Tensor | None, tensor: Tensor) -> Tensor:
    return tensor if content is None else content


# --- parameters that are lent for the time of a batch to stages that use them outside of units but do not hold them
# Examples are an output layer that is registered before the blocks, and a norm after the blocks that the first stage
# uses. In a trial run each stage notes which parameters it needs. Optimizer, checkpoints and norms use the holder's
# parameter only.
#
# Phases, per batch, for each pair of a holder and a borrower:
# 1. before the micro-batches: the holder sends the values, one message for each dtype;
# 2. after all backward passes: the borrower sends its gradients, and for each parameter whether it has one.


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
