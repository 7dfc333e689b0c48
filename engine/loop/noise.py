"""Filters of messages and warnings that Lightning prints at each start; the run's header has the facts in one line.

Only messages with these texts, below the level of a warning, are hidden. If the level of the loggers
``lightning.pytorch`` or ``lightning.fabric`` is DEBUG, nothing is hidden.
"""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, cast

__all__ = ["allow_nonempty_folder", "hide_tree_warnings", "quiet"]

# Lightning: the loggers that its messages at the start of a run come from.
_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
)
_NOISE = re.compile(
    r"GPU available: |TPU available: |LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES|Using \w+ Automatic Mixed Precision"
    r"|💡 Tip: |Initializing distributed: GLOBAL_RANK|-{100}\ndistributed_backend=|(\[rank: \d+\] )?Seed set to \d+$"
    r"|Loading `train_dataloader` to estimate number of stepping batches"
)

_lock = Lock()
_num_quiet = 0


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that hides Lightning's messages at the start of a run; it may be nested."""
    global _num_quiet
    with _lock:
        _num_quiet += 1
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_is_shown)  # a filter is added once only
    try:
        yield
    finally:
        with _lock:
            _num_quiet -= 1
            if not _num_quiet:
                for name in _LOGGERS:
                    logging.getLogger(name).removeFilter(_is_shown)


@contextmanager
def allow_nonempty_folder() -> Iterator[None]:
    """Context manager around a run that continues in its folder: hides Lightning's warning that it is not empty."""
    # Not by `catch_warnings`, which would undo the user's own filters that are set meanwhile.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    added: Any = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code has reset the filters
            cast(list[Any], warnings.filters).remove(added)


@contextmanager
def hide_tree_warnings() -> Iterator[None]:
    """Context manager around the creation of a `CombinedLoader`, without a warning that Lightning causes itself."""
    with warnings.catch_warnings():
        # Lightning 2.6 calls `LeafSpec()`, which torch 2.13 deprecates; users can't change that.
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")
        yield


def _is_shown(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING or not _NOISE.match(record.getMessage()):
        return True
    return any(
        logging.getLogger(name).isEnabledFor(logging.DEBUG) for name in ("lightning.pytorch", "lightning.fabric")
    )
