"""The callbacks that the engine adds if the user has passed none of their kind.

Callbacks import the engine, not the reverse; these few are the exception, and are imported by name.
"""

from collections.abc import Sequence

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar

from .config import EngineConfig
from .loop import CompileSteps

__all__ = ["default_run_summary", "with_defaults"]


def with_defaults(
    callbacks: list[Callback], config: EngineConfig, mode: str | None
) -> tuple[list[Callback], Callback | None]:
    """Returns `callbacks` with those that the flags ask for, and with the default progress bar in place of Lightning's.

    Args:
        callbacks: the user's; changed in place.
        config: the flags.
        mode: mode of `torch.compile`; None: nothing is compiled.
    """
    default_bar: Callback | None = None
    shows_progress = config.enable_progress_bar is not False and not config.barebones
    if shows_progress and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        callbacks.append(default_bar := _progress_bar())
    if config.continues_runs and not any(hasattr(callback, "snapshot_folder") for callback in callbacks):
        callbacks.append(_snapshot())
    if mode is not None:
        callbacks.insert(0, CompileSteps(mode))
    return callbacks, default_bar


def default_run_summary(config: EngineConfig, callbacks: Sequence[Callback]) -> Callback | None:
    """Returns the summary of a run; None if the flags turn it off, or the user has passed one."""
    is_wanted = not config.is_silent if config.enable_run_summary is None else config.enable_run_summary
    has_one = any(hasattr(callback, "on_run_end") for callback in callbacks)
    return _run_summary() if is_wanted and not has_one else None


def _progress_bar() -> Callback:
    from polyphase.callbacks import default_progress_bar

    return default_progress_bar()


def _snapshot() -> Callback:
    from polyphase.callbacks import default_snapshot

    return default_snapshot()


def _run_summary() -> Callback:
    from polyphase.callbacks import RunSummary

    return RunSummary()
