"""The values of earlier stages that a stage was sent; they take the places of absent tensors."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from .absent import CutError, tensors_in, users_line
from .calls import Calls, Key
from .loans import Borrowed
from .plan import Plan
from .shapes import Shapes, shape_of, zeros_of

__all__ = ["Content", "Filled"]


class Filled:
    """Absent tensors that could not be filled in place, and what took theirs, until backward is over."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """The tensor with content that took the place of an absent one; None if there is none."""
        found, content = self._known.get(id(tensor), (None, None))
        return content if found is tensor else None

    def fill(self, absent: Tensor, content: Tensor) -> Tensor:
        """Gives an absent tensor its content, for all who hold it if that can be done; what has the content then."""
        if not absent.is_meta:
            return absent
        if (known := self.of(absent)) is not None:
            return known
        if not _swap(absent, alias := content.view_as(content)):
            self._known[id(absent)] = absent, alias
            return alias
        return absent

    def into(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments, with content in the place of such tensors."""
        if not self._known:
            return args, kwargs
        return apply_to_collection((args, kwargs), Tensor, lambda tensor: _or(self.of(tensor), tensor))

    def clear(self) -> None:
        """Lets go of them."""
        self._known.clear()


class Content:
    """The values that one stage has while it runs a micro-batch.

    Args:
        stage: its number.
        filled: of the module.
        borrowed: of the module.
        device: of the stage.
        plan: says which stages hold a parameter.
    """

    def __init__(self, stage: int, filled: Filled, borrowed: Borrowed, device: torch.device, plan: Plan) -> None:
        self._stage, self._filled, self._borrowed, self._device = stage, filled, borrowed, device
        self._plan = plan
        self._first_node = 0
        self._leaves: dict[int, Tensor] = {}
        self.calls = Calls()
        self._shapes = Shapes()
        self._tries = False
        self._same_storage: list[tuple[Tensor, int | Tensor]] = []

    def begin(self, shapes: Shapes, *, tries: bool) -> None:
        """A micro-batch begins.

        Args:
            shapes: of its kind.
            tries: whether this is a trial run.
        """
        self._shapes, self._tries = shapes, tries
        carried = shapes.carried
        self.calls.begin((*carried.get(self._stage, ()), *carried.get(self._stage + 1, ())), tries=tries)
        self._same_storage.clear()

    def end(self) -> None:
        """The stage's part is over.

        Raises:
            CutError: it has written into one of several views of one value, which come as several: the others lack it.
        """
        self.calls.end()
        self._leaves.clear()
        if any(not _is_as_before(tensor, mark) for tensor, mark in self._same_storage):
            raise CutError(
                f"the step writes in place, on pipeline stage {self._stage}, into one of several views of a value of an"
                " earlier stage: write `x = x + 1`, not `x += 1`, or choose another strategy, such as 'fsdp'."
            )
        self._same_storage.clear()

    def note_needed(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """In a trial run, notes what the stage's first unit is called with and lacks; zeros for it.

        What the previous stage lacks too is asked for by its call: see `supply`. None if it calls the unit with fewer.
        """
        shapes, offered = self._shapes, dict(enumerate(self._shapes.offered[self._stage - 1]))
        shapes.starts[self._stage] = self.calls.count
        shapes.needed[self._stage] = [
            index for index, tensor in enumerate(tensors) if tensor.is_meta and offered.get(index, tensor) is not None
        ]
        if any(index >= len(offered) for index in shapes.needed[self._stage]):
            return None  # the runner says so
        return tuple(zeros_of(shape, self._device) for shape in shapes.sent(self._stage - 1))

    def fill(self, tensors: Sequence[Tensor], received: Iterable[Tensor]) -> None:
        """Puts what was received in the place of what the first unit is called with and lacks, and what is carried."""
        wanted = [tensors[index] for index in self._shapes.needed[self._stage]]
        wanted += [self.of_call(key) for key in self._shapes.carried.get(self._stage, ())]
        storages = [tensor.untyped_storage()._cdata if tensor.is_meta else None for tensor in wanted]
        for tensor, content, storage in zip(wanted, received, storages, strict=True):
            filled = self._filled.fill(tensor, content)
            if storage is not None and storages.count(storage) > 1:
                self._same_storage.append((filled, filled.clone() if filled.is_inference() else filled._version))

    def of_call(self, key: Key) -> Tensor:
        """Returns the result of a call in this micro-batch's step.

        Raises:
            CutError: the step made other calls.
        """
        found = self.calls.kept.get(key)
        if found is None:
            raise CutError(
                "the step makes other calls than for the first batch of this batch's shapes: a value that one pipeline"
                f" stage hands on to another is missing on stage {self._stage}. Hand it on through the arguments of the"
                " blocks, or choose another strategy, such as 'fsdp'."
            )
        return _or(self._filled.of(found), found)

    def offered(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The arguments of the next stage's first unit, with content if this stage has it."""
        return [_or(self._filled.of(tensor), tensor) for tensor in tensors]

    def supply(self, tensor: Tensor) -> Tensor | None:
        """The content of an absent tensor, which the stage's own part uses; None if the stage does not have it.

        In a trial run this notes what it uses, and gives zeros.
        """
        if (filled := self._filled.of(tensor)) is not None:
            return filled
        borrowed = self._borrowed
        if isinstance(tensor, nn.Parameter):
            if (parameter := borrowed.of(tensor)) is not None or not (self._tries and borrowed.allowed):
                return parameter
            self._shapes.borrowed.setdefault(self._stage, []).append(borrowed.name_of(tensor))
            return borrowed.put(tensor, torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device))
        key = self.calls.key_of(tensor) if self._tries else None
        if key is None or key[0] > self._shapes.starts[self._stage]:
            return None
        form = self._shapes.used.setdefault(self._stage, {})[key] = self.calls.forms[key]
        shape = shape_of(torch.empty(form.shape, dtype=form.dtype, device="meta"))
        return self._filled.fill(tensor, zeros_of(shape, self._device))

    def is_own(self) -> None:
        """From here on the stage computes for real."""
        self._first_node = torch.autograd._get_sequence_nr()

    def check_graph(self, func: Any, args: Any, kwargs: Any) -> None:
        """Checks that a gradient within the step follows paths of this stage alone, or notes a new leaf.

        Raises:
            CutError: of what was there before this stage's part, or is on several stages, other paths may be elsewhere.
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
                " create_graph=True asks for, say for a gradient penalty: choose another strategy, such as 'fsdp'."
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

    def note_made(self, *, is_known: bool) -> None:
        """Notes what the stage has computed in a trial run, for those behind it; the trial run is over.

        Args:
            is_known: whether it is known from an earlier trial run which values the stage uses.
        """
        shapes, forms = self._shapes, self.calls.forms
        start = shapes.starts.get(self._stage, self.calls.count)
        shapes.made[self._stage] = {key: form for key, form in forms.items() if key[0] > start}
        if is_known:  # but not their forms for these shapes
            used = shapes.used.get(self._stage, {})
            shapes.used[self._stage] = {key: form for key, form in forms.items() if key in used}
        self._tries = False
        self._borrowed.clear()
        self._filled.clear()


def _is_as_before(tensor: Tensor, mark: int | Tensor) -> bool:
    return torch.equal(tensor, mark) if isinstance(mark, Tensor) else tensor._version == mark


def _swap(absent: Tensor, content: Tensor) -> bool:
    if isinstance(absent, nn.Parameter):
        return False
    try:
        torch.utils.swap_tensors(absent, content)
    except RuntimeError:  # something else than Python holds it: a view of it, or torch.utils.checkpoint
        return False
    return True


def _or(found: Tensor | None, tensor: Tensor) -> Tensor:
    return tensor if found is None else found
