"""Averages of weights: Lightning's `WeightAveraging`, `EMAWeightAveraging` and `StochasticWeightAveraging`.

These callbacks copy the module before a strategy splits it. When it is split, the copy is split alike: it has a shard
where the module has a shard, and no content where another pipeline stage has the parameter. Updates, swaps and saves
are then the callbacks' own code, which computes with what this rank holds. A step sends nothing for an average, unless
a function of the user's averages, and needs a norm, say.
"""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from .whole_steps import plain_as_replicas

__all__ = [
    "averages",
    "begin_averages",
    "end_averages",
    "follow_until_first_update",
    "forget_averages",
    "has_own_schedule",
    "module_states",
    "resume_schedules",
    "split_as_module",
    "swapped_back",
    "values_of_averages",
]


def averages(trainer: Any) -> Iterator[tuple[Any, nn.Module]]:
    """Yields each callback that averages weights in this run, with its copy of the module."""
    for callback in trainer.callbacks:
        # Lightning: the copies of both callbacks, None outside of `fit`.
        if isinstance(callback, WeightAveraging) and callback._average_model is not None:
            yield callback, callback._average_model.module
        elif isinstance(callback, StochasticWeightAveraging) and callback._average_model is not None:
            yield callback, callback._average_model


def values_of_averages(trainer: Any) -> list[Tensor]:
    """The tensors of all averages, in one order on all ranks."""
    return [tensor for _, average in averages(trainer) for tensor in _values(average)]


def module_states(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of a checkpoint that are states of the module: its weights, and their averages."""
    # Lightning: a `WeightAveraging` has put the average into "state_dict", and the weights into "current_model_state".
    states = [checkpoint.get("state_dict"), checkpoint.get("current_model_state")]
    of_callbacks = [state for state in checkpoint.get("callbacks", {}).values() if isinstance(state, dict)]
    states += [state.get("average_model_state") for state in of_callbacks]
    return [state for state in states if state]


def _values(module: nn.Module) -> chain[Tensor]:
    return chain(module.parameters(), module.buffers())


def split_as_module(trainer: Any) -> None:
    """Splits each average as the module, which was split after it was copied."""
    module = trainer.lightning_module
    for callback, average in averages(trainer):
        _check_names(callback, average, module)
        device = callback._device  # Lightning: the device that the user has chosen; None: the module's
        copies: dict[Tensor, Tensor] = {}  # a tensor under two names stays one
        for name, part in module.named_modules():
            target = average.get_submodule(name)
            for held, kept in ((part._parameters, target._parameters), (part._buffers, target._buffers)):
                for key, tensor in held.items():
                    if tensor is not None and tensor not in copies:
                        copies[tensor] = _copy(tensor, device)
                    kept[key] = None if tensor is None else copies[tensor]  # type: ignore[assignment]
        if isinstance(callback, WeightAveraging):
            whole: Any = callback._average_model
            if not _is_torchs(whole.multi_avg_fn) and any(tensor.is_meta for tensor in average.parameters()):
                raise ValueError(
                    f"the multi_avg_fn of {type(callback).__name__} gets all parameters at once, and may compute one"
                    " number from them, but a pipeline stage has its own only: give the callback an avg_fn, which gets"
                    " one after the other, or choose another strategy, such as 'fsdp'."
                )
            whole.update_parameters = partial(_update_held, whole)


def _copy(tensor: Tensor, device: Any) -> Tensor:
    if tensor.is_meta:  # another stage has it: its class knows how it is copied
        return tensor.__deepcopy__({})
    copy = tensor.detach().clone()
    copy = copy if device is None else copy.to(device)
    return nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy


def _update_held(average: AveragedModel, model: nn.Module) -> None:
    """Does what `AveragedModel.update_parameters` does, with the tensors that this rank holds."""
    # torch's own functions compute element by element, so shards can do for the whole; the user's may need a norm.
    as_shards = _is_torchs(average.avg_fn) and _is_torchs(average.multi_avg_fn)
    module, average.module = average.module, _Held(average.module, as_shards=as_shards)
    try:
        with plain_as_replicas():
            AveragedModel.update_parameters(average, _Held(model, as_shards=as_shards))
    finally:
        average.module = module


def _is_torchs(function: Any) -> bool:
    return function is None or function.__module__ == AveragedModel.__module__


class _Held(nn.Module):
    """The parameters and buffers of a module that this rank holds, in their order."""

    def __init__(self, module: nn.Module, *, as_shards: bool) -> None:
        super().__init__()
        for tensors, held in ((module.parameters(), self._parameters), (module.buffers(), self._buffers)):
            for index, tensor in enumerate(tensors):
                if not tensor.is_meta:
                    local = tensor.detach()
                    is_shard = as_shards and isinstance(local, DTensor)
                    held[str(index)] = local.to_local() if is_shard else local  # type: ignore[attr-defined, assignment]


# --- a run


class _Swap:
    """In the place of a callback's method that swaps the module's weights and their average: knows which is where."""

    def __init__(self, callback: WeightAveraging) -> None:
        self._swap = callback._swap_models  # Lightning: WeightAveraging._swap_models, around each validation
        self.is_made = False

    def __call__(self, module: Any) -> None:
        self._swap(module)
        self.is_made = not self.is_made


def begin_averages(trainer: Any) -> None:
    """Called when a run has its module, and before its first step.

    Raises:
        ValueError: an average lacks parameters of the module, or needs a pass over the data of all ranks.
    """
    module = trainer.lightning_module
    for callback, average in averages(trainer):
        _check_names(callback, average, module)
        recomputes = isinstance(callback, StochasticWeightAveraging) and callback.pl_module_contains_batch_norm(module)
        if recomputes and trainer.world_size > 1 and trainer.max_epochs != -1:
            # Lightning: the pass has a batch more than there is data, and each rank would have its own statistics.
            raise ValueError(
                f"{type(callback).__name__} computes the statistics of BatchNorm again in an epoch of its own, which"
                " several processes can't share: choose WeightAveraging, which averages them with the weights, or one"
                " process."
            )
        if isinstance(callback, WeightAveraging):
            vars(callback)["_swap_models"] = _Swap(callback)


def forget_averages(trainer: Any) -> None:
    """Called as a run begins that is no fit: drops the average of an earlier fit, or of weights that are not trained.

    Lightning's callbacks would evaluate it in the place of a checkpoint's weights, or of another module's.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            callback._average_model = None


def end_averages(trainer: Any) -> None:
    """Called at the end of a run, also of one that was interrupted."""
    for callback, _ in averages(trainer):
        swap = vars(callback).pop("_swap_models", None)
        if isinstance(swap, _Swap) and swap.is_made:
            swap(trainer.lightning_module)


@contextmanager
def swapped_back(trainer: Any) -> Generator[None, None, None]:
    """Context of a save: in the midst of a validation, too, the module has its weights and not their average."""
    swaps = [vars(callback).get("_swap_models") for callback, _ in averages(trainer)]
    made = [swap for swap in swaps if isinstance(swap, _Swap) and swap.is_made]
    for swap in made:
        swap(trainer.lightning_module)
    try:
        yield
    finally:
        for swap in made:
            swap(trainer.lightning_module)


def _check_names(callback: Any, average: nn.Module, module: nn.Module) -> None:
    averaged = {name for name, _ in average.named_parameters()}
    missing = [name for name, _ in module.named_parameters() if name not in averaged]
    if missing:
        raise ValueError(
            f"{type(callback).__name__} has copied the module before it had {', '.join(missing[:3])}"
            f"{' and others' if len(missing) > 3 else ''}, and would not average them: make these layers in the"
            " module's constructor, or leave the callback out."
        )


def has_own_schedule(callback: Any) -> bool:
    """Whether a callback has got a scheduler's state of its own from a checkpoint."""
    # Lightning: None if the checkpoint is of an epoch before the average began.
    return isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None


def resume_schedules(trainer: Any) -> None:
    """Has callbacks make their schedulers when a run goes on in mid-epoch, rather than in the next epoch."""
    for callback in trainer.callbacks:
        if has_own_schedule(callback) and not callback._initialized:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)


def follow_until_first_update(trainer: Any) -> None:
    """Copies the current weights to each average without an update yet; called before one is evaluated, saved or used.

    Lightning's copy is that of the weights before training: it would be validated and saved, and become the module's
    weights at the end of training.
    """
    for callback, average in averages(trainer):
        if _num_updates(callback) == 0:
            with torch.no_grad():
                for copy, current in zip(_values(average), _values(trainer.lightning_module), strict=True):
                    copy.copy_(current)


def _num_updates(callback: Any) -> int:
    if isinstance(callback, WeightAveraging):
        return int(callback._average_model.n_averaged)  # type: ignore[union-attr]
    # Lightning: the number of a checkpoint, until an epoch begins that updates the average.
    return int(callback._init_n_averaged if callback.n_averaged is None else callback.n_averaged)
