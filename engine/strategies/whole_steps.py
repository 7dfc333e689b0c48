"""Makes an optimizer's step on split parameters and plain tensors give the result of a step on whole tensors.

Most out-of-place operations work with DTensor, which takes plain tensors for replicas. Five cases don't:
- torch refuses an in-place operation of a plain tensor with a DTensor (LAMB divides all gradients by their norm);
- torch refuses an in-place change of a norm that is not reduced over the ranks yet (Adafactor's roots of row norms);
- values that are rounded to 16 bits and then multiplied (Muon) depend on the split: they are gathered first;
- random numbers are drawn for the whole tensor, by the first rank, as in one process;
- what torch can't split at all (eigenvalues, indices, operators of the user's own, a plain tensor times a DTensor under
  `fsdp`, an in-place sum of one row) is computed on the gathered tensors, on all ranks, and each keeps its part.

The hooks of module and callbacks (masks of weights and gradients, clamps, averages) are called in the same way. What
they combine with a split tensor must be equal on all ranks: a plain tensor is compared when it is first used, by an
all-reduce of 48 bytes.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._compat.torch import TorchDispatchMode, _muon, _StridedShard, tree_leaves, tree_map_only
from ..distributed.buckets import local_part

__all__ = [
    "GATHERED",
    "as_whole",
    "check_assignment",
    "dealing_matrices",
    "on_whole",
    "own_hook",
    "plain_as_replicas",
    "whole_in_hooks",
    "whole_results",
    "wrap_hooks",
]

_ELEMENTWISE = frozenset(
    (
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam),
        *(optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.RMSprop),
    )
)
"""Optimizers that compute each element only from its own gradient and state, in the precision of the parameters."""
_REFUSALS = ("Sharding propagation failed", "does not have a sharding strategy", "got mixed torch.Tensor and DTensor")
"""Parts of torch's messages if an operation fails before it computes or sends anything, on all ranks alike."""
_OF_NO_VALUES = frozenset(f"aten::{name}" for name in ("max", "min", "amax", "amin", "aminmax", "argmax", "argmin"))
"""Operations that fail where there are no values, as on a rank whose part of a parameter is empty."""
_NORMS = ("aten::linalg_vector_norm", "aten::norm", "aten::_foreach_norm")
"""The same, of infinite order."""
_BETWEEN_PASSES = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
"""The hooks that are called between the forward of a step and its backward."""
GATHERED = "_polyphase_gathered"
"""Attribute of a view of a gathered copy: what is written to it is lost."""
_CAST = torch.ops.aten._to_copy.default


def as_whole(
    optimizer: optim.Optimizer, closure: Callable[..., Any], replicas: dist.ProcessGroup | None = None
) -> tuple[contextlib.AbstractContextManager[Any], Callable[..., Any]]:
    """Returns the context for an optimizer's step, and the closure to pass to it; see `dealing_matrices`."""
    if type(optimizer) in _ELEMENTWISE:
        return contextlib.nullcontext(), closure
    mode = _AsWhole(f"the step of {type(optimizer).__name__}")
    if type(optimizer) is optim.Muon:
        return _both(dealing_matrices(replicas), mode), mode.pausing(closure)
    return mode, mode.pausing(closure)


@contextlib.contextmanager
def _both(
    first: contextlib.AbstractContextManager[Any], second: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with first, second:
        yield


_depth = [0]
"""The number of `plain_as_replicas` contexts that are entered: torch's own context can't be nested."""


@contextlib.contextmanager
def plain_as_replicas() -> Iterator[None]:
    """Context in which plain tensors in an operation with a DTensor count as replicas."""
    # Imported here, since it takes long.
    from torch.distributed.tensor.experimental import implicit_replication

    with contextlib.nullcontext() if _depth[0] else implicit_replication():
        _depth[0] += 1
        try:
            yield
        finally:
            _depth[0] -= 1


@contextlib.contextmanager
def whole_results() -> Iterator[None]:
    """Context in which operations on split parameters and plain tensors have the results of whole tensors."""
    with plain_as_replicas(), _AsWhole("a hook of a parameter"):
        yield


def whole_in_hooks(trainer: Trainer) -> Callable[[], None]:
    """Makes the user's hooks, of the module and of callbacks, compute with whole results; returns what undoes it."""
    return wrap_hooks(trainer, _call_whole)


def wrap_hooks(trainer: Trainer, call: Callable[..., Any], others: Collection[str] = ()) -> Callable[[], None]:
    """Has the user's hooks, of the module and of callbacks, called by `call`; returns what undoes it.

    Args:
        trainer: has the module and the callbacks.
        call: called with the owner of a hook, the hook's name, the owner's attribute of that name or None, and the
            arguments of the hook.
        others: names of further methods that Lightning calls.
    """
    wrapped: list[tuple[Any, str, Any]] = []
    for owner in (trainer.lightning_module, *trainer.callbacks):  # type: ignore[attr-defined]
        base = LightningModule if isinstance(owner, LightningModule) else Callback
        for name in dir(base):
            is_hook = name.startswith("on_") and "transfer" not in name and "checkpoint" not in name
            is_hook |= name == "optimizer_zero_grad" or name in others
            # The hooks of BaseFinetuning, which compare parameters, call the user's `finetune_function`.
            hook = getattr(getattr(owner, name), "__func__", getattr(owner, name))
            if is_hook and (_is_users(hook) or hook is BaseFinetuning.on_train_epoch_start):
                wrapped.append((owner, name, vars(owner).get(name)))
                setattr(owner, name, functools.partial(call, owner, name, vars(owner).get(name)))

    def undo() -> None:
        for owner, name, own in wrapped:
            hook = vars(owner).get(name)
            if isinstance(hook, functools.partial) and hook.func == call:
                vars(owner).pop(name) if own is None else setattr(owner, name, own)

    return undo


def _is_users(function: Any) -> bool:
    module = str(getattr(function, "__globals__", {}).get("__name__"))
    return callable(function) and not module.startswith(("lightning.", __name__.partition(".")[0] + "."))


def own_hook(owner: Any, name: str, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Returns the hook that `wrap_hooks` has wrapped."""
    return getattr(type(owner), name).__get__(owner) if own is None else own


def _call_whole(owner: Any, name: str, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Calls a hook; that of the class is looked up at each call, since it may be replaced."""
    hook = own_hook(owner, name, own)
    with plain_as_replicas(), _InHook(f"the hook {name}"):
        _running.append(name)
        try:
            result = hook(*args, **kwargs)
        finally:
            _running.pop()
    if isinstance(owner, LightningModule):
        _split_gradients(owner)
    return result


_running: list[str] = []
"""The hooks that run now, the innermost last."""


def check_assignment() -> None:
    """Called where values are assigned to the `data` of a parameter that is split.

    Raises:
        RuntimeError: backward is still to come. In one process it would go on with the tensor of before, but these
            values are written into it.
    """
    if _running and _running[-1] in _BETWEEN_PASSES:
        raise RuntimeError(
            f"`p.data = values` in {_running[-1]}, between forward and backward, is refused for parameters that are"
            " split over ranks: in one process backward has the former values still. Write into them, as in"
            " `p.data.copy_(values)` or `p.data.mul_(0.9)`; assign in another hook, such as on_train_batch_end; or"
            " choose another strategy, such as 'ddp'."
        )


def _split_gradients(module: LightningModule) -> None:
    """Splits gradients that a hook has assigned as their parameters are: optimizers compute with the two together."""
    for p in module.parameters():
        gradient: Any = p.grad
        # A part of a sum stays one, until its accumulation window ends.
        if not isinstance(gradient, DTensor) or any(isinstance(part, Partial) for part in gradient.placements):
            continue
        if not isinstance(p, DTensor):
            p.grad = gradient.full_tensor()
        elif gradient.placements != p.placements:
            p.grad = gradient.redistribute(placements=p.placements)


class _AsWhole(TorchDispatchMode):
    """A mode in which operations have the results of whole tensors; `pausing` suspends it for the closure."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._is_paused = False

    def pausing(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `closure` (forward and backward), during which the mode is suspended."""

        def paused(*args: Any, **kwargs: Any) -> Any:
            before, self._is_paused = self._is_paused, True
            try:
                return closure(*args, **kwargs)
            finally:
                self._is_paused = before

        return paused

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        kwargs = kwargs or {}
        if self._is_paused or not args:
            return operator(*args, **kwargs)
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        if draws and any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return on_whole(operator, args, kwargs, draws=True)
        if operator is torch.ops.aten.equal.default:  # torch would first split both alike, which other shapes can't be
            return args[0].shape == args[1].shape and on_whole(operator, args, kwargs)
        if _fails_on_some_rank(operator, args, kwargs):
            return on_whole(operator, args, kwargs)
        if operator is _CAST and isinstance(args[0], DTensor) and _rounds(args[0], kwargs.get("dtype")):
            args = (_gathered(args[0]), *args[1:])
        elif operator._schema.name.endswith("_"):
            if isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
                args, kwargs = tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), (args, kwargs))
            else:  # an operation on lists of tensors: torch counts plain ones as replicas
                tree_map_only(DTensor, functools.partial(self._make_writable, operator), args[0])
        is_view = any(value.alias_info and not value.alias_info.is_write for value in operator._schema.returns)
        is_whole = False
        try:
            result = operator(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not any(text in str(error) for text in _REFUSALS):
                raise
            result, is_whole = on_whole(operator, args, kwargs), True
        for view in tree_leaves(result) if is_view else ():
            if isinstance(view, DTensor) and (is_whole or _is_gathered(view, args[0])):
                vars(view)[GATHERED] = True
        return result

    def _make_writable(self, operator: Any, tensor: DTensor) -> None:
        if GATHERED in vars(tensor):
            raise RuntimeError(self._refusal(operator))
        _sum_over_ranks(tensor)

    def _refusal(self, operator: Any) -> str:
        return (
            f"{self._name} can't be done with parameters that are split over ranks: {operator} needs a view"
            " of a part of one that other ranks have, too. Choose another optimizer, or a strategy that leaves"
            " parameters whole, such as 'ddp'."
        )


_compared: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()
"""The storages of plain tensors that were found equal on all ranks, and the version of the tensor then."""


class _InHook(_AsWhole):
    """The mode of a hook: plain tensors that it combines with split ones are compared between the ranks."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        split = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
        if split is not None:
            # What is written to is the rank's own: it gets what all ranks compute.
            read = tensors[1:] if operator._schema.name.endswith("_") else tensors
            for tensor in read:
                if not isinstance(tensor, DTensor):
                    self._compare(tensor, split.device_mesh)
        return super().__torch_dispatch__(operator, types, args, kwargs)

    def _compare(self, tensor: Tensor, mesh: DeviceMesh) -> None:
        storage, version = tensor.untyped_storage(), -1 if tensor.is_inference() else tensor._version
        if _compared.get(storage) == version and version >= 0:
            return
        values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double()
        by_place = values.flatten() * torch.linspace(1, 2, values.numel(), dtype=values.dtype, device=values.device)
        figures = torch.stack([torch.linalg.vector_norm(values), values.sum(), by_place.sum()])
        spread = torch.cat([figures, -figures])
        for group in mesh.get_all_groups():
            dist.all_reduce(spread, dist.ReduceOp.MAX, group)
        if not torch.allclose(spread[:3], -spread[3:], rtol=1e-6, atol=1e-6 * float(figures[0]), equal_nan=True):
            raise RuntimeError(
                f"{self._name} combines a parameter or gradient that is split over ranks with a tensor of shape"
                f" {tuple(tensor.shape)}, which has other values on each rank: one process would have one value for all"
                " samples. Use `self.trainer.strategy.reduce(value)`, the mean over the ranks, or choose another"
                " strategy, such as 'ddp'."
            )
        _compared[storage] = version


def _fails_on_some_rank(operator: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation needs values, and some rank has none of a split argument; the same on all ranks."""
    name = operator._schema.name
    is_max = name in _OF_NO_VALUES or (name in _NORMS and math.inf in (*map(abs, _numbers(args, kwargs)),))
    return is_max and any(isinstance(leaf, DTensor) and _is_empty_somewhere(leaf) for leaf in tree_leaves(args[0]))


def _numbers(args: Any, kwargs: Any) -> Iterator[float]:
    return (value for value in (*args, *kwargs.values()) if isinstance(value, (int, float)))


def _is_empty_somewhere(tensor: DTensor) -> bool:
    cuts: dict[int, list[int]] = {}
    for axis, placement in enumerate(tensor.placements):
        if (dim := getattr(placement, "dim", None)) is not None:
            cuts.setdefault(dim, []).append(tensor.device_mesh.size(axis))
    # Of a dim that is cut twice it is not looked up which part is how long.
    return any(
        0 in _lengths(tensor.shape[dim], sizes[0]) if len(sizes) == 1 else tensor.shape[dim] % math.prod(sizes) > 0
        for dim, sizes in cuts.items()
    )


def _is_gathered(view: DTensor, base: Any) -> bool:
    """Whether torch has gathered `base` to give a view of it: of rows that several ranks have, say."""
    if not isinstance(base, DTensor):
        return False
    num_split = [sum(placement.is_shard() for placement in tensor.placements) for tensor in (view, base)]
    return num_split[0] < num_split[1] or GATHERED in vars(base)


def on_whole(operator: Any, args: Any, kwargs: Any, *, draws: bool = False) -> Any:
    """Computes an operation on gathered tensors; what it writes to keeps its placement, and results are replicas.

    Args:
        operator: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
        draws: whether it draws random numbers: those of the first rank count.
    """
    meshes: list[DeviceMesh] = []
    tree_map_only(DTensor, lambda tensor: meshes.append(tensor.device_mesh), (args, kwargs))
    whole_args, whole_kwargs = tree_map_only(DTensor, _as_laid_out, (args, kwargs))
    results = operator(*whole_args, **whole_kwargs)
    for result in tree_leaves(results) if draws else ():
        for group in meshes[0].get_all_groups():
            dist.broadcast(result, group=group, group_src=0)
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            place = index if index < len(args) else argument.name
            source, target = (whole_args, args) if index < len(args) else (whole_kwargs, kwargs)
            several = isinstance(target[place], (list, tuple))
            pairs = zip(target[place], source[place], strict=True) if several else [(target[place], source[place])]
            for tensor, whole in pairs:
                if isinstance(tensor, DTensor):
                    _sum_over_ranks(tensor)  # no part of a sum can be written to
                    part = _replicated(whole, tensor.device_mesh).redistribute(placements=tensor.placements)
                    tensor.to_local().copy_(part.to_local())
    if operator._schema.name.endswith("_"):
        return None if not operator._schema.returns else args[0]
    return tree_map_only(Tensor, lambda result: _replicated(result, meshes[0]), results)


def _as_laid_out(tensor: DTensor) -> Tensor:
    """Returns the whole of a tensor, in the order in memory that one process has: random numbers are drawn in it."""
    whole = tensor.full_tensor()
    if whole.stride() == tensor.stride():
        return whole
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=whole.dtype, device=whole.device).copy_(whole)


def _replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _rounds(tensor: Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < tensor.dtype.itemsize


def _gathered(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _sum_over_ranks(tensor: DTensor) -> None:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        whole: Any = _gathered(tensor)
        # torch: the parts of a DTensor; the same values, reduced.
        tensor._local_tensor, tensor._spec = whole.to_local(), whole._spec


# Muon's Newton-Schulz iteration: each matrix is computed once in a group, by one rank, not by all of them.
#
# As Dion's and torchtitan's Muon do. `torch.optim.Muon` keeps its groups, state and hooks; only its function of the
# lists of parameters and gradients is replaced while a step runs. Momentum is updated on what a rank holds. Phases of a
# step, for each group of parameters: 1. matrices are dealt to the ranks, the most work first (local); 2. each rank
# sends its parts, rounded to 16 bits as Newton-Schulz rounds them, to the owners: one all-to-all, 2 n (W-1)/W bytes a
# rank for n values over W ranks; no phase where each rank has whole matrices; 3. Newton-Schulz of the rank's own
# matrices (local); 4. the owners send each rank its parts of the results: the same again. Blocks in 2 and 4. Results
# are those of whole matrices, bit for bit.


@contextlib.contextmanager
def dealing_matrices(replicas: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context of a step of `torch.optim.Muon`.

    Args:
        replicas: the ranks that have the same plain tensors, and all take this step; None: plain tensors are the
            rank's own.
    """
    whole = _muon._single_tensor_muon  # torch: what Muon's step calls for each group
    _muon._single_tensor_muon = partial(_step, whole, replicas)
    try:
        yield
    finally:
        _muon._single_tensor_muon = whole


def _step(
    whole: Callable[..., None],
    replicas: dist.ProcessGroup | None,
    params: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    **settings: Any,
) -> None:
    """Steps the matrices that the ranks of a group share; `whole`, torch's own, steps all others."""
    shared = [_shared(replicas, *tensors) for tensors in zip(params, grads, momenta, strict=True)]
    by_group: dict[Any, list[int]] = {}
    for index, of_matrix in enumerate(shared):
        by_group.setdefault(of_matrix and (of_matrix.group, bool(of_matrix.cuts)), []).append(index)
    for group, indices in by_group.items():
        part: list[Any] = [[tensors[index] for index in indices] for tensors in (params, grads, momenta, shared)]
        if group is None:
            whole(*part[:3], **settings)
        else:
            _step_dealt(*group, *part, **settings)


class _Shared(NamedTuple):
    """Which parts of a matrix the ranks of a group have."""

    group: Any
    cuts: tuple[tuple[int, int], ...]
    """The dim and the number of parts of each cut, in their order: each cuts the parts of those before."""
    holders: tuple[int, ...]
    """The rank that has each part, of the first `len(holders)`."""
    num_replicas: int = 1
    """How often the group has all parts: those of the first ranks, then the same of as many others."""
    num_blocks: int = 1
    """The equal blocks of rows, such as q, k and v in one matrix, each of which is cut so."""

    def parts(self, whole: Tensor) -> list[Tensor]:
        """The part of each rank: torch's chunks, of which the last ones may be shorter, or empty."""
        if not self.cuts:
            return [whole] * self.group.size()
        parts = [whole.unflatten(0, (self.num_blocks, -1))]
        for dim, number in self.cuts:
            parts = [piece for part in parts for piece in part.split(_lengths(part.shape[dim + 1], number), dim + 1)]
        in_order = [part for _, part in sorted(zip(self.holders, parts, strict=True), key=lambda pair: pair[0])]
        return [part.flatten(0, 1) for part in in_order] * self.num_replicas

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `parts`."""
        in_order = [parts[holder].unflatten(0, (self.num_blocks, -1)) for holder in self.holders]
        for dim, number in reversed(self.cuts):
            in_order = [torch.cat(in_order[i : i + number], dim + 1) for i in range(0, len(in_order), number)]
        return in_order[0].flatten(0, 1)


def _shared(replicas: dist.ProcessGroup | None, *tensors: Any) -> _Shared | None:
    """Which parts of a parameter, its gradient and its momentum alike a group has; None if a rank steps it alone."""
    param = tensors[0]
    if not isinstance(param, DTensor):
        return None if replicas is None or param.is_meta else _Shared(replicas, (), ())
    if not all(isinstance(t, DTensor) and t.placements == param.placements for t in tensors):
        return None
    mesh = param.device_mesh
    placements: Any = param.placements
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    inner: Any = placements[axes[-1]] if axes else None
    num_blocks = _num_blocks(inner, len(param), mesh.size(axes[-1])) if axes else 1
    if len(axes) == 1 and num_blocks:
        size = mesh.size(axes[0])
        ranks = tuple(range(size))
        of_axis = _Shared(mesh.get_group(axes[0]), ((inner.dim, size),), ranks, num_blocks=num_blocks)
        return of_axis if size > 1 else None
    is_world = mesh.mesh.flatten().tolist() == list(range(dist.get_world_size()))
    if not is_world or mesh.size() == 1:
        return None
    if not axes:
        return _Shared(dist.group.WORLD, (), ())
    if axes != [mesh.ndim - 2, mesh.ndim - 1]:
        return None
    outer, cuts_again = placements[-2], placements[-2].dim == inner.dim
    # FSDP2 has cut what a rank of tp has: along the same dim, torch says so by a placement of its own.
    if not num_blocks or (type(outer) is Shard) is cuts_again or (cuts_again and num_blocks > 1):
        return None
    by_replica = mesh.mesh.view(-1, *mesh.shape[-2:])
    cuts = ((inner.dim, by_replica.shape[2]), (outer.dim, by_replica.shape[1]))
    return _Shared(dist.group.WORLD, cuts, tuple(by_replica[0].T.flatten().tolist()), len(by_replica), num_blocks)


def _num_blocks(placement: Any, num_rows: int, num_ranks: int) -> int:
    """The number of equal blocks of rows that a placement cuts each by itself; 0 if it cuts in another way."""
    if type(placement) is Shard:
        return 1
    if type(placement) is not _StridedShard or placement.dim or num_rows % (int(placement.split_factor) * num_ranks):
        return 0
    return int(placement.split_factor)


def _step_dealt(
    group: Any,
    is_cut: bool,
    params: list[Any],
    grads: list[Any],
    momenta: list[Any],
    shared: list[_Shared],
    *,
    lr: Any,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    has_complex: bool,
) -> None:
    # torch: _single_tensor_muon, in which all but Newton-Schulz is element by element.
    lr = float(lr)
    num_ranks, rank, device = group.size(), group.rank(), local_part(grads[0]).device
    by_owner: list[list[_Matrix]] = [[] for _ in range(num_ranks)]
    owners = _owners([param.shape for param in params], num_ranks)  # phase 1
    for param, grad, buffer, of_matrix, owner in zip(params, grads, momenta, shared, owners, strict=True):
        own_grad, own_buffer = local_part(grad), local_part(buffer)
        own_buffer.lerp_(own_grad, 1 - momentum)
        update = own_grad.lerp(own_buffer, momentum) if nesterov else own_buffer
        shapes = [part.shape for part in of_matrix.parts(torch.empty(param.shape, device="meta"))]
        by_owner[owner].append(_Matrix(param, of_matrix, update.bfloat16(), shapes))
    own = by_owner[rank]
    wholes = [matrix.update for matrix in own]
    if is_cut:
        sent = [[matrix.update for matrix in of_owner] for of_owner in by_owner]
        of_ranks = [[matrix.shapes[other] for matrix in own] for other in range(num_ranks)]
        received = _exchange(sent, of_ranks, device, group)  # phase 2
        wholes = [matrix.shared.joined(parts) for matrix, *parts in zip(own, *received, strict=True)]
    results: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    for matrix, whole in zip(own, wholes, strict=True):  # phase 3
        result = _muon._zeropower_via_newtonschulz(whole, ns_coefficients, ns_steps, eps)
        for of_rank, piece in zip(results, matrix.shared.parts(result), strict=True):
            of_rank.append(piece)
    of_owners = [[matrix.shapes[rank] for matrix in of_owner] for of_owner in by_owner]
    for of_owner, changes in zip(by_owner, _exchange(results, of_owners, device, group), strict=True):  # phase 4
        for matrix, change in zip(of_owner, changes, strict=True):
            local = local_part(matrix.param)
            local.mul_(1 - lr * weight_decay)
            local.add_(change, alpha=-_muon._adjust_lr(lr, adjust_lr_fn, matrix.param.shape))


class _Matrix(NamedTuple):
    """A parameter that the ranks of a group share, and this rank's part of its update."""

    param: Any
    shared: _Shared
    update: Tensor
    shapes: list[torch.Size]
    """The shape of each rank's part."""


def _owners(shapes: list[torch.Size], num_ranks: int) -> list[int]:
    """Deals matrices to ranks, those with the most work first, each to the rank with the least so far."""
    work = [0] * num_ranks
    owners = [0] * len(shapes)
    of_each = [rows * columns * min(rows, columns) for rows, columns in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -of_each[index]):
        owners[index] = work.index(min(work))
        work[owners[index]] += of_each[index]
    return owners


def _lengths(length: int, num_parts: int) -> list[int]:
    chunk = -(-length // num_parts)
    return [max(0, min(chunk, length - part * chunk)) for part in range(num_parts)]


def _exchange(
    sent: list[list[Tensor]], shapes: list[list[torch.Size]], device: torch.device, group: Any
) -> list[list[Tensor]]:
    """Sends each rank its list of matrices; returns those that each rank has sent, which have the given shapes."""
    # As bytes: gloo does not know bfloat16.
    empty = torch.empty(0, dtype=torch.bfloat16, device=device)
    flats = [torch.cat([empty, *(m.reshape(-1) for m in matrices)]) for matrices in sent]
    flat = torch.cat(flats)
    counts = [sum(shape.numel() for shape in of_rank) for of_rank in shapes]
    room = flat.new_empty(sum(counts))
    in_bytes = [part.nbytes for part in flats]
    dist.all_to_all_single(
        room.view(torch.uint8), flat.view(torch.uint8), [2 * count for count in counts], in_bytes, group
    )
    return [
        [piece.view(shape) for piece, shape in zip(part.split([s.numel() for s in of_rank]), of_rank, strict=True)]
        for part, of_rank in zip(room.split(counts), shapes, strict=True)
    ]
