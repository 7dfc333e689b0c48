"""Resumes a loader that has its own state: at the saved position, or with the unfinished shards redistributed."""

from typing import Any

from torch.utils.data import DataLoader

from ..data import (
    ShardedLoader,
    StateTrackingLoader,
    is_litdata_loader,
    is_stateful,
    remaining_shards,
    why_not_shardable,
)

__all__ = ["resume_stream", "stateful"]


def stateful(loader: Any) -> dict[str, Any]:
    """Returns the kind of a loader's state, with the batch size and number of workers for which it is valid."""
    return {"unit": "stateful"} | {name: getattr(loader, name, None) for name in ("batch_size", "num_workers")}


def resume_stream(loader: Any, state: dict[str, Any], trainer: Any, epoch: int, saved: int) -> int | None:
    """Resumes `loader` at the position of the saved run, on all ranks, or raises on all ranks.

    Args:
        loader: loader of this run.
        state: state of the saved run's loader, on this rank; its entry ``of_ranks`` has those of all ranks.
        trainer: trainer of this run.
        epoch: the current epoch.
        saved: number of batches of the epoch that each rank of the saved run had done.

    Returns:
        The number of batches of this run that count as done; None if it equals `saved`.

    Raises:
        ValueError: the loader can't continue there.
    """
    world_size, then = trainer.data_size, state["saved_by"]
    is_alike = {**state, **stateful(loader)} == state
    is_same = then == world_size and is_alike
    if saved and isinstance(loader, ShardedLoader):
        return _resume_shards(loader, state, is_same, epoch, saved, world_size, trainer.accumulate_grad_batches)
    is_new = isinstance(loader, StateTrackingLoader) and not (
        loader.has_cross_epoch_state or (loader.continues_across_epochs and is_same)
    )
    if (saved == 0 and is_new) or all(rank["state"] is None for rank in state["of_ranks"]):
        return None
    _check_position(loader, state, saved, world_size, is_alike)
    if state["state"] is not None and isinstance(loader, StateTrackingLoader):
        loader.resume(epoch, saved, state["state"])
    # Lightning: it loads a state in mid-epoch only.
    elif state["state"] is not None and is_stateful(loader) and trainer.fit_loop.restarting:
        loader.load_state_dict(state["state"])
    return None


def _check_position(loader: Any, state: dict[str, Any], saved: int, world_size: int, is_alike: bool) -> None:
    """Checks that a loader without shards can continue at the position of another run.

    Args:
        loader: loader of this run.
        state: state of the saved run's loader.
        saved: number of batches of the epoch that each rank of the saved run had done.
        world_size: number of this run's ranks with different samples.
        is_alike: whether batch size and number of workers are those of the saved run.

    Raises:
        ValueError: the loader can't continue there.
    """
    if saved and is_litdata_loader(loader) and type(loader.dataset).__name__ != "StreamingDataset":
        raise ValueError(
            f"litdata's {type(loader).__name__} over a {type(loader.dataset).__name__} can't continue where it was:"
            " only one over a StreamingDataset is known to. Resume from a checkpoint that was saved between two epochs,"
            " or load only the weights to begin one."
        )
    then = state["saved_by"]
    if then != world_size:
        raise ValueError(
            f"The checkpoint has the positions of {then} rank(s) in an IterableDataset or a loader with a state of"
            f" its own, which {world_size} can't share: {_why_not_dealt(loader, state)}. Resume with {then}, or at"
            " the end of an epoch, or load only the weights. For the next run:"
            " docs/howto/streams-with-shards.md, or a data set with a length."
        )
    # Each rank checks the states of all ranks: if only the rank at its end raised, the others would wait for it.
    states = [other["state"] or {} for other in state["of_ranks"]] if isinstance(loader, StateTrackingLoader) else []
    through = [rank for rank, other in enumerate(states) if other.get("ended")]
    if saved and through:
        raise ValueError(
            f"The checkpoint was saved when rank(s) {through} had finished their data, and others had not:"
            " training can't resume there. Resume at the end of an epoch, or load only the weights."
        )
    if saved and not is_alike:
        raise ValueError(
            f"The checkpoint has the position in a loader with {_described(state)}, which one with"
            f" {_described(stateful(loader))} can't continue from: {_why_not_dealt(loader, state)}. Resume with the"
            " same, or at the end of an epoch, or load only the weights. For the next run:"
            " docs/howto/streams-with-shards.md."
        )


def _resume_shards(
    loader: ShardedLoader, state: dict[str, Any], is_same: bool, epoch: int, saved: int, num_ranks: int, window: int
) -> int:
    """Resumes `loader` with the rest of an epoch.

    Args:
        loader: loader of this run.
        state: state of the saved run's loader, on this rank; its entry ``of_ranks`` has those of all ranks.
        is_same: the numbers of ranks and workers and the batch size are those of the saved run.
        epoch: the current epoch.
        saved: number of batches of the epoch that each rank of the saved run had done.
        num_ranks: number of this run's ranks.
        window: number of batches of an optimizer step.

    Returns:
        The number of batches of this run that count as done: those that hold as many samples as the saved run's.

    Raises:
        ValueError: the data has another number of shards, or there are other training loaders beside this one.
    """
    states = state["of_ranks"]
    then, now = state["shards"]["num_shards"], loader.dataset.count
    if then != now:
        raise ValueError(
            f"The checkpoint has positions in {then} shards, but this run's {type(loader.dataset.dataset).__name__} has"
            f" {now}: use the same data, or load only the weights to begin an epoch."
        )
    # If a rank had read all of its shards, the remaining shards of the others are distributed over all ranks.
    has_ended = any(stream["state"] is not None and stream["state"]["ended"] for stream in states)
    if is_same and not has_ended:
        loader.dataset.deal_next(state["shards"]["dealt"])
        loader.resume(epoch, saved, state["state"])
        return saved
    if not state["is_alone"]:
        raise ValueError(
            "The checkpoint has the position in a stream with shards beside other training loaders, whose shards can't"
            f" be distributed again: resume with {len(states)} rank(s), {_described(state)}, from a checkpoint in which"
            " no loader has ended; or at the end of an epoch; or load only the weights."
        )
    samples = saved * len(states) * (state["batch_size"] or 1)
    batches = samples // (num_ranks * (loader.batch_size or 1))
    batches = max(window, batches // window * window)  # an optimizer step begins with the next one
    loader.go_on_with(epoch, batches, remaining_shards(states, now))
    return batches


def _why_not_dealt(loader: Any, state: dict[str, Any]) -> str:
    """Returns the reason why saved positions can't be split over other ranks, or into other batches."""
    if "shards" in state:
        return "it was read shard by shard, and this run's loader is not"
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} has no shards that the engine could deal"
    # A data set that is read again up to its position is wrapped around the user's.
    reason = why_not_shardable(getattr(loader.dataset, "dataset", loader.dataset))
    return reason or "in the run that saved the checkpoint it was not read shard by shard"


def _described(state: dict[str, Any]) -> str:
    """Returns the batch size and the number of workers of a loader, for a message."""
    return f"batch_size={state['batch_size']} and num_workers={state['num_workers']}"
