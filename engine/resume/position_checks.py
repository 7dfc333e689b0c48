"""Refuses training loaders that can't continue where a checkpoint was saved; each error names the remedy."""

from typing import Any, NoReturn

from torch.utils.data import DataLoader

from ..data import ShardedLoader, UnevenTrainLoader, digest_of_generators, loses_its_buffer

__all__ = ["check_data_set", "check_has_position", "check_same_batch_size", "check_sharing", "refuse_without_order"]


def check_has_position(loader: Any, state: dict[str, Any], num_batches: int) -> None:
    """Checks that a state saved in mid-epoch, after `num_batches` batches, has a position.

    Raises:
        ValueError: the state has no position.
    """
    if state["unit"] is None:
        over = f" over a {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else ""
        raise ValueError(
            f"The checkpoint was saved after {num_batches} batches of the epoch, where this run's"
            f" {type(loader).__name__}{over} can't continue: neither it nor its order says where it was. Give its"
            " sampler a `__len__`, or the data `state_dict` and `load_state_dict`; save at the end of an epoch; or load"
            " only the weights to begin an epoch."
        )


def check_data_set(loader: DataLoader, state: dict[str, Any], *, in_mid_epoch: bool) -> None:
    """Checks that a data set yields the samples that it yielded in the saved run.

    Raises:
        ValueError: its state lacks a shuffle buffer, or it is shuffled with other random numbers.
    """
    dataset: Any = loader.dataset
    if in_mid_epoch and not isinstance(loader, ShardedLoader) and loses_its_buffer(dataset):
        raise ValueError(
            f"{type(dataset).__name__} has a `state_dict` that leaves out what is in the shuffle buffer of a"
            " Hugging Face data set within: it can't continue in mid-epoch. Give the DataLoader that data"
            " set itself, shuffle without a buffer, save at the end of an epoch, or load only the weights."
        )
    if state.get("generators") not in (None, digest_of_generators(dataset)):
        raise ValueError(
            "The Hugging Face data set is shuffled with other random numbers than in the run that saved the"
            " checkpoint, and would yield another order: give its `shuffle` the same `seed`, which must not be"
            " None, or load only the weights."
        )


def check_sharing(state: dict[str, Any], num_sharing: int, num_ranks: int) -> None:
    """Checks that this number of ranks can continue the saved order, or the separate orders of the saved run's ranks.

    Args:
        state: state of the loader, in mid-epoch or not.
        num_sharing: number of ranks that share the loader's order in this run.
        num_ranks: number of this run's ranks with different samples.

    Raises:
        ValueError: the number of ranks with separate orders has changed.
    """
    num_saved = state["saved_by"]
    is_whole = state["num_sharing"] == num_saved and num_sharing == num_ranks
    if state["position"] and not is_whole and (num_saved, state["num_sharing"]) != (num_ranks, num_sharing):
        raise ValueError(
            f"The checkpoint has the positions of {num_saved} rank(s), each in its own order (from a distributed"
            f" sampler or `use_distributed_sampler=False`), and this run, of {num_ranks}, can't continue there:"
            f" resume with {num_saved} and the same flag, let the engine split the samples from the start, or load"
            " only the weights to begin an epoch."
        )


def check_same_batch_size(loader: DataLoader) -> None:
    """Checks that a loader can continue in mid-epoch with another batch size than in the saved run.

    Raises:
        ValueError: the ranks have their own samplers, of different lengths.
    """
    if isinstance(loader, UnevenTrainLoader):
        raise ValueError(
            "The checkpoint was saved in mid-epoch, with another batch size than this run's: ranks with their own"
            " samplers, of different lengths, can't continue there. Resume with the same batch size, or load only the"
            " weights to begin an epoch."
        )


def refuse_without_order(loader: Any, state: dict[str, Any]) -> NoReturn:
    """Refuses a loader without an order, if the saved run was in the middle of one.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"The checkpoint was saved after {state['position']} of {state['length']} {state['unit']} of the epoch,"
        f" but this run's {type(loader).__name__} has no order of samples that could be continued: use the"
        " DataLoader of that run, or load only the weights to begin an epoch."
    )
