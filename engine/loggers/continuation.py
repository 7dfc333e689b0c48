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

import csv
import inspect
import io
import json
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, ClassVar
from urllib.parse import urlparse
from urllib.request import url2pathname
from weakref import WeakKeyDictionary

from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from typing_extensions import TypedDict

from .._compat.lightning import _convert_params, _flatten_dict
from ..checkpoint.checked_io import Files, absolute, resolve
from ..checkpoint.folder_index import FolderIndex
from ..checkpoint.retention import list_entries
from ..checkpoint.run_record import read_record, replace_file
from ..distributed.environment import restart_count
from ..foreign import Count, Range, for_terminal, is_plain_name, open_plain, problem

__all__ = ["LogContinuation", "kind_of"]


# --- resumes each of Lightning's loggers: its place, the position in its log, and the removal of later points
# The loggers stay the user's objects: their attributes are set before they create their writers, and their files are
# truncated.


_HEX_ID = re.compile(r"[0-9A-Za-z_.-]{1,128}")
_FLUSH_S = 15.0
"""wandb: x_transaction_log_flush_interval, the time after which it writes rows to the disk."""
_MOST_ROWS = 10_000
_MOST_ROWS_BYTES = 1 << 19
"""Half of what the manifest of a single-file checkpoint may have."""
_MARK = ".polyphase-run"
"""The file in a log's folder that names the run that has created it."""
_TAG = "polyphase.run"
"""The same, as a tag of MLflow's run."""
_MOST_MARK_BYTES = 1 << 14
_EVENTS = ".tfevents."
"""Part of the name of each of TensorBoard's files."""


def _is_row(row: list[Any]) -> str | None:
    return problem(tuple(row), tuple[Annotated[int, Range(-1)], Count, dict[str, str]], "has a part that")


class _Rows(TypedDict):
    """The position in a log of W&B."""

    next: Count
    recent: list[Annotated[list, _is_row]]


class _LoggerKind:
    """One class of loggers. Only rank 0 calls the methods, except `place` and `adopt`."""

    logger_class: ClassVar[type]

    may_be_taken_over = False
    """Whether another rank of the run can go on in a log when the one that has written to it has been killed."""

    def place(self, logger: Any) -> dict[str, Any]:
        """Returns the user's arguments that identify a logger: if they are equal, a later start has the same logger."""
        raise NotImplementedError

    def id_of(self, logger: Any) -> Any:
        """Returns the run's name within the logger's place, a plain value; None if the run has no name yet."""
        raise NotImplementedError

    def adopt(self, logger: Any, run_id: Any, owner: str) -> str | None:
        """Makes a logger that has not begun continue the run `run_id`; returns the reason if it can't.

        Unless the user has chosen `run_id`, its log must have the mark `owner`: it is read from a file that may be
        anybody's.
        """
        raise NotImplementedError

    def is_owned(self, logger: Any, owner: str) -> bool:
        """Whether the log has the mark `owner`, without which no points are removed from it."""
        return True

    def is_new(self, logger: Any) -> bool:
        """Whether this run creates the log: nothing is there yet."""
        return False

    def mark(self, logger: Any, owner: str) -> None:
        """Writes the mark `owner` into a log that this run has created or continued."""

    def open(self, logger: Any) -> None:
        """Called before a logger that has adopted a run first writes."""

    @contextmanager
    def logging_parameters(self, logger: Any) -> Iterator[None]:
        """Context manager around the logging of hyperparameters by a logger that has adopted a run."""
        yield

    def position(self, logger: Any) -> Any:
        """The position in the log, as plain values."""
        raise NotImplementedError

    def note(self, logger: Any, metrics: dict[str, Any], step: int) -> None:
        """Called after the engine has logged something."""

    def close(self, logger: Any) -> None:
        """Closes the files, before any is truncated."""

    def checked(self, position: Any) -> Any:
        """Checks a position that was read from a file.

        Raises:
            ValueError: it is invalid.
        """
        if type(position) is not int or position < 0:
            raise ValueError(f"the position {position!r} is no number")
        return position

    def take_back(self, logger: Any, position: Any, step: int) -> None:
        """Removes the points after `position`; the next optimizer step is number `step`."""
        raise NotImplementedError


class _Versions(_LoggerKind):
    """Loggers with a folder for each version."""

    may_be_taken_over = True

    def place(self, logger: Any) -> dict[str, Any]:
        return {"save_dir": absolute(str(logger.save_dir)), "name": logger.name}

    def id_of(self, logger: Any) -> Any:
        return logger.version

    def adopt(self, logger: Any, run_id: Any, owner: str) -> str | None:
        if type(run_id) is not int and not is_plain_name(run_id):
            return f"{run_id!r} is no version"
        chosen = logger._version  # Lightning: None until it is set or first read
        # The version of the default logger, the number of a SLURM job, is not the user's choice.
        if chosen not in (None, run_id) and getattr(logger, "chosen_version", None) != chosen:
            return f"version={chosen!r} was set, or read before fit"
        logger._version = run_id
        is_users = chosen is not None and getattr(logger, "chosen_version", None) is None
        if not is_users and not self.is_owned(logger, owner):
            folder, logger._version = logger.log_dir, chosen
            return f"{folder} has no mark of that run"
        return None

    def is_owned(self, logger: Any, owner: str) -> bool:
        try:
            return Files(logger.log_dir).read(_MARK, _MOST_MARK_BYTES).decode() == owner
        except (OSError, ValueError):
            return False

    def is_new(self, logger: Any) -> bool:
        fs, folder = resolve(logger.log_dir)
        return not fs.exists(folder) or not fs.ls(folder, detail=False)

    def mark(self, logger: Any, owner: str) -> None:
        replace_file(f"{logger.log_dir}/{_MARK}", owner.encode())


class _CSV(_Versions):
    logger_class = CSVLogger

    def is_new(self, logger: Any) -> bool:
        return True  # Lightning: deletes the rows of an earlier start

    def open(self, logger: Any) -> None:
        if logger._experiment is None:  # Lightning: None until the first use
            _move_unreadable(os.path.join(logger.log_dir, ExperimentWriter.NAME_METRICS_FILE))
            logger._experiment = _ContinuedWriter(log_dir=logger.log_dir)

    def position(self, logger: Any) -> Any:
        logger.save()
        return len(self._lines(logger))

    def take_back(self, logger: Any, position: Any, step: int) -> None:
        lines = self._lines(logger)
        if len(lines) <= position:
            return
        path, files = logger.experiment.metrics_file_path, logger.experiment._fs  # Lightning: an fsspec file system
        if not position:
            files.rm_file(path)
            logger.experiment.metrics_keys = []
            return
        replace_file(path, b"".join(lines[:position]))

    def _lines(self, logger: Any) -> list[bytes]:
        """The header and the rows of the file, which Lightning rewrites when a column is added."""
        writer = logger.experiment
        if not writer._fs.isfile(writer.metrics_file_path):
            return []
        return writer._fs.cat_file(writer.metrics_file_path).splitlines(keepends=True)


def _move_unreadable(path: str) -> None:
    """Renames a local file to which rows can't be added: a damaged one, a pipe, or a link to somebody else's."""
    try:
        if "://" in path or not os.path.lexists(path):
            return
        with open_plain(path, os.O_NOFOLLOW) as stream:
            rows = csv.reader(io.TextIOWrapper(stream, encoding="utf-8", newline=""))
            num_columns = len(next(rows, ()))
            if all(len(row) <= num_columns for row in rows):
                return
        reason = "it has more values in a row than columns"
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error)
    aside = f"{path}.damaged-{uuid.uuid4().hex[:12]}"
    os.rename(path, aside)
    rank_zero_warn(for_terminal(f"{path} is not continued: {reason}. It was renamed to {aside}."))


class _ContinuedWriter(ExperimentWriter):
    """Lightning's writer, which continues the existing file."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as stream:
                self.metrics_keys = list(csv.DictReader(stream).fieldnames or ())

    def _check_log_dir_exists(self) -> None:  # Lightning: deletes the rows of an earlier start
        pass


class _TensorBoard(_Versions):
    logger_class = TensorBoardLogger

    def place(self, logger: Any) -> dict[str, Any]:
        return {**super().place(logger), "sub_dir": logger.sub_dir}

    def checked(self, position: Any) -> Any:
        return _checked_sizes(position)

    def position(self, logger: Any) -> Any:
        logger.experiment.flush()
        return _sizes(logger.log_dir, _EVENTS)

    def close(self, logger: Any) -> None:
        logger.experiment.close()  # it opens another file when it next writes

    def take_back(self, logger: Any, position: Any, step: int) -> None:
        _cut(logger.log_dir, _EVENTS, position)
        # Tells TensorBoard to drop later points that it has already read, or that are not on this machine's disks.
        logger.experiment.purge_step = step


class _Wandb(_LoggerKind):
    """W&B writes rows to the disk every 15 s: the last rows of a killed process are lost.

    So a snapshot keeps the latest rows. A resumed run logs them again, each under its old number.
    """

    logger_class = WandbLogger

    def __init__(self) -> None:
        self._recent: WeakKeyDictionary[Any, deque[tuple[float, int, int, dict[str, str]]]] = WeakKeyDictionary()

    def place(self, logger: Any) -> dict[str, Any]:
        return {"save_dir": absolute(str(logger.save_dir or ".")), "project": logger.name}

    def id_of(self, logger: Any) -> Any:
        return logger.version

    def adopt(self, logger: Any, run_id: Any, owner: str) -> str | None:
        if not isinstance(run_id, str) or not _HEX_ID.fullmatch(run_id):
            return f"{run_id!r} is no id"
        if logger.version not in (None, run_id):
            return f"id={logger.version!r} was given"
        if logger._experiment is None:  # Lightning: the run, once there is one
            # Lightning: the arguments of wandb.init, which include resume="allow".
            logger._wandb_init["id"] = logger._id = run_id
        return None

    def note(self, logger: Any, metrics: dict[str, Any], step: int) -> None:
        next_row = self._next_row(logger)
        if next_row is None:
            return
        rows, now = self._recent.setdefault(logger, deque(maxlen=_MOST_ROWS)), time.monotonic()
        while rows and rows[0][0] < now - 2 * _FLUSH_S:
            rows.popleft()
        # As text, since a manifest has only finite numbers.
        values = {name: repr(float(value)) for name, value in metrics.items() if isinstance(value, (int, float))}
        rows.append((now, next_row - 1, step, values))

    def position(self, logger: Any) -> Any:
        recent: deque[list[Any]] = deque()
        num_bytes = 0
        for _, row, step, values in reversed(self._recent.get(logger, ())):
            num_bytes += len(json.dumps([row, step, values], indent=1))
            if num_bytes > _MOST_ROWS_BYTES:
                break
            recent.appendleft([row, step, values])
        return {"next": self._next_row(logger), "recent": [*recent]}

    def checked(self, position: Any) -> Any:
        if wrong := problem(position, _Rows, "its position"):
            raise ValueError(wrong)
        recent = position["recent"]
        rows = [(row, step, {name: float(text) for name, text in values.items()}) for row, step, values in recent]
        return {**position, "recent": rows}

    def take_back(self, logger: Any, position: Any, step: int) -> None:
        # W&B removes nothing; rows that are logged again get their old numbers.
        for row, at_step, metrics in position["recent"]:
            logger.experiment.log({}, step=row)
            logger.log_metrics(metrics, at_step)
        logger.experiment.log({}, step=position["next"])

    def _next_row(self, logger: Any) -> int | None:
        """Returns the number of the next row; None if this version of wandb does not tell."""
        # wandb: Run.step asks another process for it; `_step` in older versions.
        counters = (getattr(logger.experiment, name, None) for name in ("_local_step", "_step"))
        return next((row for row in counters if type(row) is int), None)


class _MLFlow(_LoggerKind):
    logger_class = MLFlowLogger

    def place(self, logger: Any) -> dict[str, Any]:
        # Lightning: both are arguments of the constructor.
        return {"experiment": logger._experiment_name, "tracking_uri": logger._tracking_uri}

    def id_of(self, logger: Any) -> Any:
        return logger.run_id

    def adopt(self, logger: Any, run_id: Any, owner: str) -> str | None:
        if not isinstance(run_id, str) or not _HEX_ID.fullmatch(run_id):
            return f"{run_id!r} is no id"
        chosen = logger._run_id  # Lightning: None until it is set or created
        if chosen not in (None, run_id):
            return f"run_id={chosen!r} was given"
        from mlflow.exceptions import MlflowException

        try:
            run = logger._mlflow_client.get_run(run_id)  # Lightning: the client; `experiment` would begin a run
        except MlflowException as gone:
            return f"its run is gone ({gone.error_code})"
        if run.info.lifecycle_stage == "deleted":
            return "its run was deleted"
        if chosen is None and run.data.tags.get(_TAG) != owner:
            return "it has no mark of that run"
        logger._run_id = run_id
        return None

    def is_owned(self, logger: Any, owner: str) -> bool:
        return logger._mlflow_client.get_run(logger.run_id).data.tags.get(_TAG) == owner

    def is_new(self, logger: Any) -> bool:
        return logger._run_id is None

    def mark(self, logger: Any, owner: str) -> None:
        logger.experiment.set_tag(logger.run_id, _TAG, owner)

    @contextmanager
    def logging_parameters(self, logger: Any) -> Iterator[None]:
        """MLflow refuses a second value of a parameter, so the values of the first start stay."""
        log = logger.log_hyperparams

        def log_new(params: Any) -> None:
            logged = logger.experiment.get_run(logger.run_id).data.params
            flat = _flatten_dict(_convert_params(params))
            log({name: value for name, value in flat.items() if name not in logged})

        logger.log_hyperparams = log_new
        try:
            yield
        finally:
            del logger.log_hyperparams

    def checked(self, position: Any) -> Any:
        return None if position is None else _checked_sizes(position)

    def position(self, logger: Any) -> Any:
        folder = self._folder(logger)
        return None if folder is None else _sizes(folder, "")

    def take_back(self, logger: Any, position: Any, step: int) -> None:
        logger.experiment.update_run(logger.run_id, status="RUNNING")
        folder = self._folder(logger)
        if folder is not None and position is not None:
            _cut(folder, "", position)

    def _folder(self, logger: Any) -> str | None:
        """The run's metrics in MLflow's file store; None for databases and servers, from which nothing is removed."""
        uri, ids = logger._tracking_uri, (logger.experiment_id, logger.run_id)
        is_elsewhere = "://" in uri and not uri.startswith("file:")
        if is_elsewhere or None in ids:  # tests have clients that give no ids
            return None
        return os.path.join(url2pathname(urlparse(uri).path if uri.startswith("file:") else uri), *ids, "metrics")


def _checked_sizes(sizes: Any) -> dict[str, int]:
    if not isinstance(sizes, dict) or any(type(size) is not int or size < 0 for size in sizes.values()):
        raise ValueError(f"the position {sizes!r} has no sizes of files")
    return sizes


def _sizes(folder: str, marker: str) -> dict[str, int]:
    """Returns the sizes of the files under a local folder whose names contain `marker`, by relative path; no links."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if marker in name and not os.path.islink(path):
                sizes[os.path.relpath(path, folder)] = os.path.getsize(path)
    return sizes


def _cut(folder: str, marker: str, sizes: dict[str, int]) -> None:
    """Truncates these files to `sizes`; files without a size are removed."""
    for name, size in _sizes(folder, marker).items():
        path = os.path.join(folder, name)
        if not sizes.get(name):
            os.remove(path)
        elif size > sizes[name] and os.stat(path).st_nlink > 1:  # its other name may be anybody's
            with open(path, "rb") as file:
                replace_file(path, file.read(sizes[name]))
        elif size > sizes[name]:
            os.truncate(path, sizes[name])


_KINDS: tuple[_LoggerKind, ...] = (_TensorBoard(), _CSV(), _Wandb(), _MLFlow())


def kind_of(logger: Any) -> _LoggerKind | None:
    """Returns the kind of a logger; None for other loggers, and for subclasses that create their writer differently."""
    for kind in _KINDS:
        if isinstance(logger, kind.logger_class):
            own, lightnings = (inspect.getattr_static(of, "experiment") for of in (type(logger), kind.logger_class))
            return kind if own is lightnings else None
    return None


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
        for number in self._adopted if self._trainer.is_global_zero else ():
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
                rank_zero_warn(f"{_shown(logger, newest)}, whose points after step {step} stay: {error}.")
            else:
                rank_zero_info(f"{_shown(logger, newest)} after step {step}; later points are repeated.")

    def note(self, logger: Any, metrics: dict[str, Any], step: int) -> None:
        """Called after `metrics` were logged."""
        kind = kind_of(logger)
        if kind is not None and self._trainer.is_global_zero:
            kind.note(logger, metrics, step)

    def take_over(self) -> None:
        """Goes on in the logs of a rank 0 that was killed; called on the new rank 0."""
        for logger in self._trainer.loggers:
            if (kind := kind_of(logger)) is not None:
                kind.open(logger)

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

    def _logger(self, number: int) -> tuple[Any, _LoggerKind]:
        logger = self._trainer.loggers[number]
        kind = kind_of(logger)
        assert kind is not None
        return logger, kind


def _owner(run: str, folder: str) -> str:
    """Returns the mark of a run's logs: its id, and the folder of its snapshots, as a copied manifest has another."""
    return f"{run} {os.path.realpath(folder) if '://' not in folder else folder}"


def _said_in(folder: str, root: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns the run that saves into `folder` and its loggers' entries, from its newest snapshot or its record."""
    fs, place = resolve(folder)
    for entry in list_entries(folder, FolderIndex(folder)) if fs.isdir(place) else []:
        if entry.manifest is not None and entry.manifest.kind != "weights":  # the newest of them was opened
            return entry.manifest.run, list(entry.manifest.loggers)
    record = read_record(folder, root)
    return ("", []) if record is None or record.has_saved else (record.run, list(record.loggers))


def _taken_from(entries: list[dict[str, Any]], name: str, place: dict[str, Any]) -> dict[str, Any] | None:
    """Removes the first entry of that class and place from `entries`, and returns it."""
    for number, entry in enumerate(entries):
        if entry.get("class") == name and entry.get("place") == place:
            return entries.pop(number)
    return None


def _shown(logger: Any, entry: dict[str, Any]) -> str:
    """``"TensorBoardLogger continues in lightning_logs/version_0"``."""
    public = next(kind.__name__ for kind in type(logger).__mro__ if not kind.__name__.startswith("_"))
    return f"{public} continues in {logger.log_dir or repr(entry['id'])}"
