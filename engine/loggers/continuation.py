"""One continuous curve over all starts of a run: ``resume="auto"`` continues the logs of the resumed run.

Phases:
1. `adopt`, when `fit` is called: the newest snapshot's manifest has the version or run of each logger. A logger of the
   same class and place adopts it, unless the user has chosen another, or the logger has begun already.
   A log that has not the mark of that run (`mark`) is not continued: a manifest may come from anybody.
2. `open`, before a logger writes: existing logs are kept.
3. `take_back`, when a snapshot was opened: points that were logged after it are removed, since they are logged again.
4. `positions`, with each save: the run of each logger, and the end of its logs. If `max_steps` ends an epoch early, a
   longer run continues that epoch and logs its end then: `hold` freezes the positions before that end.

A run that was stopped before its first snapshot is identified by its record, beside the snapshots.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ..checkpoint.manifest import find
from ..checkpoint.run_record import read_record
from ..environment import restart_count
from .kinds import LoggerKind, kind_of

__all__ = ["LogContinuation"]


class LogContinuation:
    """Makes the loggers of a trainer continue the logs of the resumed run.

    Args:
        trainer: the trainer with the loggers.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # Entries by the logger's index in the trainer's list, for loggers with points that are still to be removed.
        self._adopted: dict[int, dict[str, Any]] = {}
        self._continued: set[int] = set()
        self._held: list[dict[str, Any]] | None = None
        self._put_off: tuple[Any, int] | None = None
        # Logs that this run has created, or the one that it continues.
        self._owned: set[int] = set()

    @property
    def goes_on(self) -> bool:
        """Whether a logger continues an earlier folder or run."""
        return bool(self._continued)

    def adopt(self, resume: Any) -> None:
        """Continues the logs that the newest snapshot names; called by each process before the loggers begin."""
        self._adopted, self._continued, self._held, self._put_off, self._owned = {}, set(), None, None, set()
        is_same_run = resume == "auto" or (resume == "fresh" and restart_count() > 0)
        folder = self._trainer.snapshots_path if is_same_run and not self._trainer.fast_dev_run else None
        if folder is None or not any(map(kind_of, self._trainer.loggers)):
            return
        run, entries = _said_in(folder, self._trainer.default_root_dir)
        for number, logger in enumerate(self._trainer.loggers):
            kind = kind_of(logger)
            entry = None if kind is None else _taken_from(entries, type(logger).__name__, kind.place(logger))
            if kind is None or entry is None:
                continue
            refusal = kind.adopt(logger, entry.get("id"), _owner(run, folder))
            if refusal is None:
                self._adopted[number] = entry
                self._continued.add(number)
                if kind.is_owned(logger, _owner(run, folder)):
                    self._owned.add(number)
            else:
                rank_zero_info(
                    f"resume={resume!r}: {entry['class']} does not continue in {entry.get('id')!r}, where the run has"
                    f" logged so far, since {refusal}."
                )

    def note_created(self) -> None:
        """Notes which logs this run creates; called on rank 0 before anything is written."""
        for number, logger in enumerate(self._trainer.loggers):
            kind = kind_of(logger)
            if kind is not None and number not in self._continued and kind.is_new(logger):
                self._owned.add(number)

    def mark(self, run: str) -> None:
        """Marks the logs that the run with this id has created or continued, so that it can continue them."""
        folder = self._trainer.snapshots_path
        if folder is None or not self._trainer.is_global_zero or self._trainer.fast_dev_run:
            return
        for number in self._owned:
            logger, kind = self._logger(number)
            try:
                kind.mark(logger, _owner(run, folder))
            except OSError as error:
                rank_zero_warn(f"{type(logger).__name__} can't continue its log after a restart: {error}")

    def open(self) -> None:
        """Called before any logger writes."""
        for number in self._adopted:
            logger, kind = self._logger(number)
            kind.open(logger)

    @contextmanager
    def logging_parameters(self) -> Iterator[None]:
        """Context manager around the logging of hyperparameters on rank 0."""
        with ExitStack() as stack:
            for number in self._continued:
                logger, kind = self._logger(number)
                stack.enter_context(kind.logging_parameters(logger))
            yield

    def take_back_unless_over(self) -> None:
        """Called before anything is logged: runs a postponed `take_back`, unless the run ends at once."""
        put_off, self._put_off = self._put_off, None
        # Lightning: the Timer of `max_time` sets it before; with a minimum of epochs or steps, training continues.
        is_over = self._trainer.should_stop and not (self._trainer.min_epochs or self._trainer.min_steps)
        if put_off is not None and not is_over:
            self.take_back(*put_off)

    def take_back(self, loggers: Any, step: int, waits: bool = False) -> None:
        """Removes points that were logged after the opened snapshot.

        Args:
            loggers: the entry ``loggers`` of the snapshot's manifest; None if the run begins again without a snapshot.
            step: step of the snapshot.
            waits: postpone it until `take_back_unless_over`, since a run without remaining time logs nothing.
        """
        if waits:
            self._put_off = (loggers, step)
            return
        adopted, self._adopted = self._adopted, {}
        if not self._trainer.is_global_zero:
            return
        for number in adopted:
            logger, kind = self._logger(number)
            kind.close(logger)
        for number, newest in adopted.items():
            logger, kind = self._logger(number)
            name = newest["class"]
            entry = newest if loggers is None else _taken_from(list(loggers), name, newest["place"])
            try:
                if entry is None or entry.get("id") != newest.get("id"):
                    raise ValueError("the snapshot does not have the end of its log")
                if number not in self._owned:
                    raise ValueError("the log has no mark of this run")
                kind.take_back(logger, kind.checked(entry.get("position")), step)
            except (OSError, ValueError) as error:
                rank_zero_warn(f"{name} continues in {newest['id']!r}, whose points after step {step} stay: {error}.")
            else:
                rank_zero_info(f"{name} continues in {newest['id']!r} after step {step}; later points are repeated.")

    def note(self, logger: Any, metrics: dict[str, Any], step: int) -> None:
        """Called after `metrics` were logged."""
        kind = kind_of(logger)
        if kind is not None and self._trainer.is_global_zero:
            kind.note(logger, metrics, step)

    def hold(self) -> None:
        """Freezes `positions` at the current end of the logs until `fit` ends: a longer run logs later points again."""
        self._held = self.positions()

    def positions(self) -> list[dict[str, Any]]:
        """Returns class, place, id and position of each logger of a known kind; empty on all ranks but 0."""
        if self._held is not None:
            return self._held
        if not self._trainer.is_global_zero or self._trainer.fast_dev_run:
            return []
        entries = []
        for logger in self._trainer.loggers:
            kind = kind_of(logger)
            if kind is None:
                continue
            about = {"class": type(logger).__name__, "place": kind.place(logger), "id": kind.id_of(logger)}
            try:
                entries.append({**about, "position": kind.position(logger)})
            except OSError as error:  # an unreadable log must not prevent a save
                rank_zero_warn(f"{about['class']}: the end of its log is unknown: {error}.")
        return entries

    def _logger(self, number: int) -> tuple[Any, LoggerKind]:
        logger = self._trainer.loggers[number]
        kind = kind_of(logger)
        assert kind is not None
        return logger, kind


def _owner(run: str, folder: str) -> str:
    """Returns the mark of a run's logs: its id, and the folder of its snapshots, as a copied manifest has another."""
    return f"{run} {os.path.realpath(folder) if '://' not in folder else folder}"


def _said_in(folder: str, root: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns the run that saves into `folder` and its loggers' entries, from its newest snapshot or its record."""
    for _, manifest in find(folder):
        if manifest.kind != "weights":
            return manifest.run, list(manifest.loggers)
    record = read_record(folder, root)
    return ("", []) if record is None or record.has_saved else (record.run, list(record.loggers))


def _taken_from(entries: list[dict[str, Any]], name: str, place: dict[str, Any]) -> dict[str, Any] | None:
    """Removes the first entry of that class and place from `entries`, and returns it."""
    for number, entry in enumerate(entries):
        if entry.get("class") == name and entry.get("place") == place:
            return entries.pop(number)
    return None
