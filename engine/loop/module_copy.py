"""The copy of a module, or of one of its blocks, that the first steps are repeated with, as in a plain loop.

A deep copy shares functions with the original. Those that refer to the module, its parts or its parameters (hooks,
closures) refer to those of the copy here, as its program does. `attachments.py` copies what hangs on parameters.
"""

import copy
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat.torch import tree_leaves, tree_map_only
from ..attachments import copied, is_filled
from ..checkpoint import get_random_state, set_random_state
from ..distributed.buckets import move_module
from ..distributed.object_group import WORLD
from ..initialization import has_meta_tensors, materialize, read_stored
from ..strategies.units import shard_units

__all__ = ["Memory", "SampledBlock", "are_equal", "copy_whole", "fill_copy", "is_data", "put"]

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""torch: the attributes of a Tensor with the dicts of `register_hook` and `register_post_accumulate_grad_hook`."""
_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)
_MAX_ITEMS = 1000
"""The largest container that is read item by item; larger ones hold data or a vocabulary, not what a step keeps."""


def copy_whole(module: Any, *shared: Any) -> Any:
    """Returns a copy of a module that refers to the same objects `shared` as the original."""
    memo = {id(part): part for part in shared if part is not None}
    own = copied(module, memo)
    of_copy = {id(part): memo[id(part)] for part in _program(module) if id(part) in memo}
    hooked = [vars(part) for part in own.modules()]
    hooked += [{name: getattr(p, name) for name in _TENSOR_HOOKS} for p in own.parameters()]
    for attributes in hooked:
        for name, value in list(attributes.items()):
            if isinstance(value, types.FunctionType):
                attributes[name] = _rebound(value, of_copy)
            elif name.endswith("_hooks") and isinstance(value, dict):  # torch: nn.Module._forward_hooks and the like
                value.update({key: _rebound(hook, of_copy) for key, hook in value.items()})
    return own


def _program(module: nn.Module) -> Iterator[Any]:
    """Yields the objects that a function of the user's may refer to."""
    yield from module.modules()
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        yield from (
            value for value in vars(part).values() if isinstance(value, _CONTAINERS) or hasattr(value, "__dict__")
        )


def _rebound(function: Any, of_copy: dict[int, Any]) -> Any:
    """Returns a function that refers to the copy in place of the original; any other callable as it is."""
    if not isinstance(function, types.FunctionType):
        return function
    cells = function.__closure__ or ()
    contents = [cell.cell_contents if is_filled(cell) else cell for cell in cells]
    defaults = function.__defaults__ or ()
    if not any(id(value) in of_copy for value in (*contents, *defaults)):
        return function
    own = tuple(
        types.CellType(of_copy[id(value)]) if id(value) in of_copy else cell
        for cell, value in zip(cells, contents, strict=True)
    )
    bound = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        tuple(of_copy.get(id(value), value) for value in defaults) or None,
        own or None,
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def fill_copy(own: LightningModule, module: LightningModule, state: dict[str, Any], shares_buffers: bool) -> None:
    """Gives the copy what the module has now: weights, buffers, modes, and data that hooks have set.

    Args:
        own: the copy.
        module: the module, which is split by now.
        state: the whole state dict of `module`.
        shares_buffers: whether this rank's buffers that are not in `state` are those of the whole module.
    """
    if has_meta_tensors(own):
        random = get_random_state()
        materialize(own)
        read_stored(own)
        set_random_state(random)
    for part, its_copy in _paired_submodules(module, own):
        its_copy.training = part.training
        for name, value in vars(part).items():
            if not name.startswith("_") and is_data(value) and _is_leaf(value):
                _put(vars(its_copy), name, copy.deepcopy(value))
    trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    for name, parameter in own.named_parameters():
        parameter.requires_grad_(trained.get(name, parameter.requires_grad))
    own.load_state_dict(state, strict=False)
    if shares_buffers:
        buffers = dict(module.named_buffers())
        for name, buffer in own.named_buffers():
            present = buffers.get(name)
            if name not in state and present is not None and present.shape == buffer.shape and not present.is_meta:
                buffer.copy_(present)


def is_data(value: Any) -> bool:
    """Returns whether `value` is a number, a text, a tensor that is no parameter, or a container of these."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter)
    if isinstance(value, _CONTAINERS) and len(value) <= _MAX_ITEMS:
        return all(map(is_data, (*value, *value.values()) if isinstance(value, dict) else value))
    return isinstance(value, _SCALARS)


class Memory:
    """The data that a module and its parts keep in plain attributes on one rank.

    Each rank has its own, as each has its own samples: a step of rank 1 doesn't see what one of rank 0 has left.
    """

    def __init__(self, module: nn.Module) -> None:
        self._data = {
            name: {key: value for key, value in data.items() if _is_leaf(value)}
            for name, data in _data_of(module).items()
        }
        self._data = copy.deepcopy(self._data)

    def recall(self, module: nn.Module) -> None:
        """Puts the data into the attributes of `module`."""
        for name, data in _data_of(module).items():
            own = vars(module.get_submodule(name))
            before = self._data.get(name, {})
            for key in data.keys() - before.keys():
                del own[key]
            for key, value in before.items():
                _put(own, key, copy.copy(value) if isinstance(value, _CONTAINERS) else value)

    def changes(self, module: nn.Module) -> dict[str, dict[str, Any]]:
        """Returns copies of the data of `module` that is no longer as here."""
        changed: dict[str, dict[str, Any]] = {}
        for name, data in _data_of(module).items():
            before = self._data.get(name, {})
            new = {k: v for k, v in data.items() if _is_leaf(v) and not (k in before and are_equal(v, before[k]))}
            if new:
                changed[name] = copy.deepcopy(new)
        return changed

    def add(self, changes: dict[str, dict[str, Any]]) -> None:
        """Takes what `changes` has returned, as if it had been left here."""
        for name, data in changes.items():
            self._data.setdefault(name, {}).update(data)

    def keep(self, module: nn.Module) -> None:
        """Takes the data that is in the attributes of `module`."""
        self._data = {
            name: {key: copy.copy(value) if isinstance(value, _CONTAINERS) else value for key, value in data.items()}
            for name, data in _data_of(module).items()
        }


def put(module: nn.Module, changes: dict[str, dict[str, Any]]) -> None:
    """Puts what `Memory.changes` has returned into the attributes of another module."""
    for name, data in changes.items():
        for key, value in data.items():
            _put(vars(module.get_submodule(name)), key, value)


def are_equal(a: Any, b: Any) -> bool:
    """Returns whether two values that are data are the same, tensors by all their elements."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(map(are_equal, a.values(), b.values()))
    if isinstance(a, (list, tuple, deque)) and type(a) is type(b):
        return len(a) == len(b) and all(map(are_equal, a, b))
    return bool(a == b)


def _put(attributes: dict[str, Any], name: str, value: Any) -> None:
    """Sets an attribute; a container gets the content of another one, since functions may refer to it."""
    present: Any = attributes.get(name)
    if type(present) is type(value) and isinstance(value, (list, dict, set, deque)):
        present.clear()
        (present.extend if isinstance(present, (list, deque)) else present.update)(value)
    else:
        attributes[name] = value


def _data_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in vars(part).items() if not key.startswith("_") and is_data(value)}
        for name, part in module.named_modules()
    }


def _is_leaf(value: Any) -> bool:
    """Whether no tensor in `value` has a graph, with which it can't be copied."""
    return all(not isinstance(leaf, Tensor) or leaf.is_leaf for leaf in tree_leaves(value))


def _paired_submodules(module: nn.Module, copy: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yields the sub-modules of `module`, each with the one of the same name in `copy`."""
    copies = dict(copy.named_modules())
    for name, part in module.named_modules():
        if name in copies:
            yield part, copies[name]


# A sample of the first steps, for modules that are too large to be repeated whole: one block in one step.
#
# Under fsdp and hsdp each rank repeats, with a whole copy of one block, the calls of that block in its own first step:
# from the same arguments and random state it must return the same values, and leave the same ones in arguments and
# attributes.
# Backward, from the gradients that arrived at these values, gives this rank's gradient of each parameter; their mean
# over the ranks must point where the gradient points that the optimizer has used. (Not be equal to it: clipping and the
# weights of ranks scale the gradients of the whole module, which the sample doesn't know.)
#
# Phases, which all ranks enter together:
# 1. Before the module is split, each rank copies the block.
# 2. Before the first step, the block's weights are gathered, parameter by parameter.
# 3. In the step nothing is sent; after it, the gradients of the block are gathered in the same way.
# 4. The ranks repeat the calls, agree on whether all could, and average the gradients: one all-reduce for each
#    parameter.

_TOLERANCE = 1e-3
"""The largest difference of a value or a direction, relative to the norm: sums in another order are 1e-6 apart."""
_MAX_CALLS = 4
"""The most calls of the block whose arguments are kept; of a step with more, only these calls are compared."""


class _Call:
    """A call of the block: what it was given, and what it made of that."""

    def __init__(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.given: Any = (args, kwargs)
        self.inputs = {id(leaf) for leaf in tree_leaves(self.given)}
        self.arguments = tree_map_only(Tensor, _own, (args, kwargs))
        self.random = get_random_state()
        self.values: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        self._block = block

    def end(self, output: Any) -> None:
        """Keeps what was made, and, in backward, the gradients that arrive at it."""
        made = _made(self._block, (output, self.given), self.inputs)
        self.given = None
        for index, value in enumerate(made):
            self.values.append(value.detach().clone())
            if value.requires_grad:
                value.register_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def keep(gradient: Tensor) -> None:
            self.gradients[index] = gradient.detach().clone()

        return keep


class SampledBlock:
    """One block of a module, and the calls of it in the first step.

    Args:
        module: the whole module.
        trainer: its trainer.

    Raises:
        ValueError: there is no block to sample.
    """

    def __init__(self, module: LightningModule, trainer: Any) -> None:
        units = shard_units(module)
        if not units:
            raise ValueError("it has no repeated blocks, of which one could be compared")
        self._block = units[len(units) // 2]
        self.name = next(name for name, part in module.named_modules() if part is self._block)
        self._copy = copy_whole(self._block, module, trainer, trainer.datamodule)
        self._trainer = trainer
        self._calls: list[_Call] = []
        self._num_calls = 0
        self._gradients: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Phase 2, and the hooks of phase 3."""
        if has_meta_tensors(self._copy):
            self._copy.to_empty(device=self._trainer.strategy.root_device)
        copied = {**dict(self._copy.named_parameters()), **dict(self._copy.named_buffers())}
        with torch.no_grad():
            for name, tensor in (*self._block.named_parameters(), *self._block.named_buffers()):
                copied[name].data = _whole(tensor).detach().clone()
                copied[name].requires_grad_(tensor.requires_grad)
        self._copy.train(self._block.training)
        move_module(self._copy, self._trainer.strategy.root_device)
        self._handles = [
            self._block.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True),
            self._block.register_forward_pre_hook(self._note_inputs, with_kwargs=True),
            self._block.register_forward_hook(self._after),
        ]

    def end(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._num_calls += 1
        if self._num_calls <= _MAX_CALLS and torch.is_grad_enabled():
            self._calls.append(_Call(block, args, kwargs))

    def _note_inputs(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Called last before forward: FSDP2 has put other tensors in the place of the arguments."""
        if self._num_calls <= _MAX_CALLS and self._calls:
            self._calls[-1].inputs |= {id(leaf) for leaf in tree_leaves((args, kwargs))}

    def _after(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._num_calls <= _MAX_CALLS and self._calls:
            self._calls[-1].end(output)

    def keep_gradients(self) -> None:
        """Gathers the gradients that an optimizer has used; called after its first step."""
        if not self._gradients:
            named = [(name, p.grad) for name, p in self._block.named_parameters() if p.grad is not None]
            self._gradients = {name: _whole(gradient).detach().clone() for name, gradient in named}

    def compare(self) -> tuple[str | None, list[str]]:
        """Phase 4.

        Returns:
            The reason why the block can't be compared, or None; and descriptions of the differences.
        """
        self.end()
        problem, differences = None, []
        random = get_random_state()
        try:
            differences = [text for call in self._calls if (text := self._repeat(call)) is not None]
        except Exception as error:
            problem = f"{self.name} can't be repeated alone ({type(error).__name__}: {error})"
        finally:
            set_random_state(random)
        reports = WORLD.all_gather_object((problem, differences, self._keeps_direction, sorted(self._gradients)))
        problem = next((problem for problem, *_ in reports if problem is not None), None)
        if problem is not None:
            return problem, []
        differences = [text for _, texts, *_ in reports for text in texts][:2]
        if not differences and all(keeps and names == reports[0][3] for _, _, keeps, names in reports):
            differences = self._turned()
        return None, differences

    def _repeat(self, call: _Call) -> str | None:
        set_random_state(call.random)
        args, kwargs = call.arguments
        inputs = {id(leaf) for leaf in tree_leaves((args, kwargs))}
        with torch.enable_grad(), self._trainer.precision_plugin.forward_context():
            output = self._copy(*args, **kwargs)
        made = _made(self._copy, (output, args, kwargs), inputs)
        if len(made) != len(call.values):
            return f"{self.name} makes {len(call.values)} tensors on rank {self._trainer.global_rank}, not {len(made)}"
        pairs = [(value, call.gradients[i]) for i, value in enumerate(made) if i in call.gradients]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
        for value, actual in zip(made, call.values, strict=True):
            expected = value.detach().float()
            norm, difference = float(expected.norm()), float((expected - actual.float()).norm())
            if value.is_floating_point() and not difference <= self._tolerance * norm + 1e-6:
                share = difference / max(norm, 1e-12)
                return f"a value of {self.name} on rank {self._trainer.global_rank} differs by {share:.1e} of its norm"
        return None

    def _turned(self) -> list[str]:
        """Compares the direction of the gradients."""
        expected = {}
        for name in sorted(self._gradients):
            own = dict(self._copy.named_parameters())[name]
            expected[name] = own.grad if own.grad is not None else torch.zeros_like(own)
            dist.all_reduce(expected[name])
        norms = [_norm(tensors) for tensors in (expected.values(), self._gradients.values())]
        if not all(norms):
            text = f"the gradients of {self.name} are zero"
            return (
                [] if not any(norms) else [f"{text}, not in one process" if norms[0] else f"{text} in one process only"]
            )
        turned = {n: float((g / norms[1] - expected[n] / norms[0]).float().norm()) for n, g in self._gradients.items()}
        name = max(turned, key=lambda name: turned[name])
        if turned[name] <= self._tolerance:
            return []
        return [
            f"the gradient of {f'{self.name}.{name}'!r} in step 1 is off by {turned[name]:.1e} of that of {self.name}"
        ]

    @property
    def _keeps_direction(self) -> bool:
        """Whether the gradients that were kept have the direction of those of the calls that were."""
        trainer = self._trainer
        clips_values = trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm or "").endswith("VALUE")
        own_clipping = is_overridden("configure_gradient_clipping", trainer.lightning_module)
        return self._num_calls <= _MAX_CALLS and not clips_values and not own_clipping

    @property
    def _tolerance(self) -> float:
        return _TOLERANCE if str(self._trainer.precision) in ("32-true", "64-true") else 5e-2


def _made(block: nn.Module, made: Any, inputs: set[int]) -> list[Tensor]:
    """The tensors that a call has made: those that it returned, wrote into its arguments, or left on the block."""
    left = [value for part in block.modules() for key, value in vars(part).items() if not key.startswith("_")]
    leaves = [leaf for leaf in tree_leaves((made, left)) if isinstance(leaf, Tensor) and id(leaf) not in inputs]
    return list({id(leaf): leaf for leaf in leaves}.values())


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(float(tensor.float().norm()) ** 2 for tensor in tensors) ** 0.5)
