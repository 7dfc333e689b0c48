"""Snapshots in one process: when they are saved, which are kept, and what a run continues from."""

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checkpoint import CheckpointError, find, lock, read_manifest

from ..engine.loop.costs import counted_calls
from ..engine.tiny import QUIET, Regression, engine, rows


def names(folder: Path) -> list[str]:
    return [Path(path).name for path, _ in find(folder)]


def train(folder: Path, *callbacks: Callback, **flags: Any) -> Engine:
    run = engine(default_root_dir=folder, callbacks=list(callbacks), **flags)
    run.fit(Regression(), rows(40))
    return run


class At(Callback):
    """Does something in one step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            self.action()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps must be a whole number of at least 1"),
        ({"every_minutes": -1}, "every_minutes"),
        ({"keep_last": 0}, "keep_last must be a whole number of at least 1"),
        ({"keep_every_n_steps": "x"}, "keep_every_n_steps must be a whole number"),
        ({"monitor": "loss", "mode": "mni"}, "Did you mean 'min'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Snapshot(**arguments)


def test_the_newest_few_are_kept_and_the_last_is_linked(tmp_path):
    run = train(tmp_path, Snapshot(every_n_steps=3))
    assert names(tmp_path / "snapshots") == ["step=10", "step=9"]
    assert os.readlink(tmp_path / "snapshots" / "last") == "step=10"
    assert run.last_checkpoint == str(tmp_path / "snapshots" / "step=10")


def test_those_of_every_k_th_step_stay(tmp_path):
    train(tmp_path, Snapshot(every_n_steps=1, keep_last=1, keep_every_n_steps=4))
    assert names(tmp_path / "snapshots") == ["step=10", "step=8", "step=4"]


class Logged(Regression):
    losses = (5.0, 4.0, 1.0, 3.0, 2.0)

    def training_step(self, batch, batch_idx):
        self.log("watched", self.losses[batch_idx // 2])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("mode", "best"), [("min", "step=6"), ("max", "step=2")])
def test_the_best_stays(tmp_path, mode, best):
    run = engine(callbacks=[Snapshot(tmp_path, every_n_steps=2, keep_last=1, monitor="watched", mode=mode)])
    run.fit(Logged(), rows(40))
    assert names(tmp_path) == ["step=10", best]


class CountsASave(Callback):
    """Counts what the third snapshot calls, in the writer's threads as well, and the removal of the first."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot, self.num_calls = snapshot, 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == 8:
            with counted_calls() as calls:
                self.snapshot.on_train_step_end(trainer, pl_module, save_now=True)
                trainer.finish_saving()
            self.num_calls = sum(of_thread.total() for of_thread in calls)


def test_one_of_a_tiny_module_takes_few_calls(tmp_path):
    counts = CountsASave(snapshot := Snapshot(every_n_steps=3))
    train(tmp_path, snapshot, counts)
    assert names(tmp_path / "snapshots") == ["step=10", "step=9"]
    # Some 2,400 of them are for the numbers of Python's and NumPy's generators, which torch's pickler and unpickler
    # look at one by one.
    assert 0 < counts.num_calls <= 7_300


def test_minutes(tmp_path):
    train(tmp_path, Snapshot(every_minutes=1e-9, keep_last=100))
    assert len(names(tmp_path / "snapshots")) > 2


def test_a_signal_has_it_saved_and_training_goes_on(tmp_path):
    snapshot = Snapshot(every_minutes=None)
    run = train(tmp_path, At(4, lambda: os.kill(os.getpid(), signal.SIGUSR1)), snapshot)
    assert names(tmp_path / "snapshots") == ["step=10", "step=5"]
    assert run.global_step == 10
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def weights(module: Regression) -> list[float]:
    return torch.cat([parameter.flatten() for parameter in module.parameters()]).tolist()


def resumed(folder: Path, **flags: Any) -> tuple[list[float], Engine]:
    module = Regression()
    run = Engine(**{**QUIET, "devices": 1, "max_epochs": 1, "default_root_dir": folder, "resume": "auto", **flags})
    run.fit(module, rows(40))
    return weights(module), run


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt, SystemExit])
def test_what_fails_is_saved_and_goes_on_as_if_nothing_had_been(tmp_path, failure, caplog):
    caplog.set_level("INFO")
    whole, _ = resumed(tmp_path / "whole")

    def fail():
        raise failure("on purpose")

    with pytest.raises((failure, SystemExit)):
        train(tmp_path / "run", At(7, fail), Snapshot(every_n_steps=3))
    assert names(tmp_path / "run" / "snapshots")[0] == "step=7"
    again, run = resumed(tmp_path / "run")
    assert again == whole
    assert run.global_step == 10
    assert "no checkpoint in" in caplog.text
    assert f"continues from {tmp_path / 'run' / 'snapshots' / 'step=7'}" in caplog.text


# --- a full disk


@pytest.fixture
def fill_disk() -> Iterator[Callable[[], None]]:
    """Lets no file grow beyond 1,000 bytes from its call on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class AtRest(At):
    """Does it when no save is in flight."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.finish_saving()
            self.action()


class Unfinished(CSVLogger):
    """Finds no room when the run ends."""

    def finalize(self, status: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("logger", [None, Unfinished], ids=["no logger", "a logger that can't write"])
def test_an_error_on_a_full_disk_stays_the_users_and_the_folder_is_free(tmp_path, fill_disk, logger):
    def fail():
        fill_disk()
        raise ValueError("the user's own")

    flags = {"logger": logger(tmp_path)} if logger else {}
    with (
        pytest.raises(ValueError, match="the user's own"),
        pytest.warns(UserWarning, match="step=7 is not saved") as told,
    ):
        train(tmp_path, AtRest(7, fail), Snapshot(every_n_steps=3, keep_last=1), **flags)
    said = " ".join(str(warning.message) for warning in told)
    assert "step=7 is not saved: " in said
    assert "File too large: '" in said
    assert ".saving-" in said
    assert names(tmp_path / "snapshots") == ["step=6"]
    lock(tmp_path / "snapshots")()


class Fails(Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_callback_that_fails_at_the_end_neither_hides_the_error_nor_keeps_the_lock(tmp_path, caplog):
    def fail():
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        train(tmp_path, Fails(), At(7, fail), Snapshot(every_n_steps=3))
    assert "While the run ended after an error, another one was raised: OSError" in caplog.text
    lock(tmp_path / "snapshots")()


@pytest.mark.parametrize("last", [6, 10], ids=["the last step was saved", "it was not"])
def test_a_run_whose_end_could_not_be_saved_ends_with_an_error(tmp_path, fill_disk, last):
    flags = {"max_epochs": -1, "max_steps": last}
    with (
        pytest.warns(RuntimeWarning, match=r"step=\d+ could not be saved: .*File too large: '/"),
        pytest.raises(CheckpointError, match="The run is over, but its end could not be saved in"),
    ):
        train(tmp_path, AtRest(4, fill_disk), Snapshot(every_n_steps=3, keep_last=1), **flags)
    assert names(tmp_path / "snapshots") == ["step=3"]
    lock(tmp_path / "snapshots")()


def test_a_save_that_failed_when_the_run_does_hides_no_error_either(tmp_path, fill_disk, caplog):
    """The save in flight is waited for when the run ends; its warning is an error here."""

    def fail():
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        train(tmp_path, AtRest(5, fill_disk), At(6, fail), Snapshot(every_n_steps=6))
    assert "step=6 could not be saved" in caplog.text
    lock(tmp_path / "snapshots")()


def test_a_run_whose_end_was_saved_ends_well_whatever_failed_before(tmp_path, fill_disk):
    def free():
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    with pytest.warns(RuntimeWarning, match="step=6 could not be saved"):
        train(tmp_path, AtRest(4, fill_disk), AtRest(8, free), Snapshot(every_n_steps=3, keep_last=1))
    assert names(tmp_path / "snapshots") == ["step=10"]


def test_a_run_that_is_over_stays_over(tmp_path):
    first, _ = resumed(tmp_path)
    second, run = resumed(tmp_path)
    assert (first, run.global_step) == (second, 10)


@pytest.mark.filterwarnings("ignore:.* is damaged. it was renamed to")
def test_a_damaged_snapshot_is_moved_aside(tmp_path):
    whole, _ = resumed(tmp_path)
    train(tmp_path, Snapshot(every_n_steps=4))  # a run of its own, whose snapshots are not called like the first one's
    newest = tmp_path / "snapshots" / "step=10-v1"
    shards = next(newest.glob("*.safetensors"))
    shards.write_bytes(shards.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"step=10-v1 is damaged: .*safetensors has .* An older one is used"):
        again, _ = resumed(tmp_path)
    assert again == whole
    (aside,) = newest.parent.glob("step=10-v1.damaged-*")
    assert read_manifest(aside).step == 10


def test_two_runs_in_one_folder(tmp_path):
    release = lock(tmp_path)  # of this process, which a child can't have
    child = os.fork()
    if child == 0:
        try:
            lock(tmp_path)
        except CheckpointError as refused:
            os._exit(0 if f"process {os.getppid()}" in str(refused) and "in use" in str(refused) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    release()


def test_validation_does_not_disturb(tmp_path):
    """Saved after a step and the validation that belongs to it; neither is done again."""
    seen: list[str] = []

    class Validated(Regression):
        def training_step(self, batch, batch_idx):
            seen.append(f"train {self.global_step}")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.append(f"validate {self.global_step}")

        def on_save_checkpoint(self, checkpoint):
            seen.append(f"save {self.global_step}")

    flags = {"val_check_interval": 5, "num_sanity_val_steps": 0, "max_steps": 10}
    snapshot = Snapshot(tmp_path, every_n_steps=5, every_minutes=None)
    engine(**flags, callbacks=[snapshot]).fit(Validated(), rows(40), rows(4))
    whole = seen.copy()
    assert whole[5:8] == ["validate 5", "save 5", "train 5"]
    seen.clear()
    engine(**flags).fit(Validated(), rows(40), rows(4), ckpt_path=tmp_path / "step=5")
    assert seen == whole[7:-1]
