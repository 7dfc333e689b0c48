"""The launchers of workers: the port that they meet at, and what is told of those that end."""

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from polyphase.engine import Engine
from polyphase.engine.launch.worker_launcher import _Stored, _Workers, check_forks
from tests.engine.tiny import QUIET, Regression, rows

pytestmark = pytest.mark.timeout(60)


class Validated(Regression):
    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)


class WritesPort(Callback):
    """Rank 0's port, on a line of its own in a file, for every run."""

    def setup(self, trainer, pl_module, stage):
        if trainer.is_global_zero:
            with open("ports", "a") as file:
                print(os.environ["MASTER_PORT"], file=file)


def ports() -> list[int]:
    with open("ports") as file:
        return [int(line) for line in file]


@contextmanager
def taken(port: int) -> Iterator[None]:
    """As another program's port may be, once the run is over."""
    try:
        server = socket.create_server(("", port))
    except OSError:  # it is another program's
        yield
        return
    with server:
        yield


def engine(strategy: str) -> Engine:
    return Engine(strategy=strategy, devices=2, max_steps=1, limit_val_batches=0, callbacks=[WritesPort()], **QUIET)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_every_run_has_a_port_of_its_own(strategy, monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    engine(strategy).fit(Regression(), rows())
    with taken(ports()[0]):
        engine(strategy).fit(Regression(), rows())
    first, second = ports()
    assert first != second
    assert "MASTER_PORT" not in os.environ


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_the_process_that_started_workers_saves_what_they_trained(tmp_path):
    one, module = engine("ddp_fork"), Regression()
    one.fit(module, rows())
    one.save_checkpoint("after.ckpt")
    weights = torch.load("after.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
    with pytest.warns(UserWarning, match="no state of optimizers: it was saved after its workers had ended"):
        Engine(max_steps=2, **QUIET).fit(Regression(), rows(), ckpt_path="after.ckpt")


def test_the_runs_of_one_engine_have_too(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    one = engine("ddp_fork")
    one.validate(Validated(), rows(), verbose=False)
    with taken(ports()[0]):
        one.fit(Regression(), rows())


def test_a_port_that_is_named_later_is_taken_too(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    one = engine("ddp_fork")
    one.validate(Validated(), rows(), verbose=False)
    named = LightningEnvironment().main_port
    monkeypatch.setenv("MASTER_PORT", str(named))
    one.fit(Regression(), rows())
    assert ports()[1:] == [named]


def test_a_port_that_is_named_is_taken(monkeypatch):
    named = LightningEnvironment().main_port
    monkeypatch.setenv("MASTER_PORT", str(named))
    engine("ddp_fork").fit(Regression(), rows())
    assert ports() == [named]
    assert os.environ["MASTER_PORT"] == str(named)


class Collects(Callback):
    def on_train_start(self, trainer, pl_module):
        gc.collect()


def test_a_fork_keeps_what_its_parent_has_dropped():
    """As an earlier run's process group may be, in a notebook: its threads are not there to be joined."""
    dropped = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    dropped.append(dropped)
    gc.disable()
    try:
        del dropped
        Engine(strategy="ddp_fork", devices=2, max_steps=1, callbacks=[Collects()], **QUIET).fit(Regression(), rows())
    finally:
        gc.enable()
        gc.collect()


def test_what_is_unpickled_again_is_in_a_folder_of_the_users_own():
    """As docs/security.md says."""
    stored = _Stored({"any": object})
    folder = Path(stored.path).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_uid == os.getuid()
    assert stored.take() == {"any": object}
    assert not folder.exists()


class Stuck(Callback):
    """Says which process a rank is, and gets no further."""

    def on_train_start(self, trainer, pl_module):
        Path(f"rank{trainer.global_rank}").write_text(str(os.getpid()))
        time.sleep(60)


def test_workers_do_not_outlive_a_launch_that_is_broken_off():
    def break_off(*_):
        raise TimeoutError("long enough")

    flags = {**QUIET, "max_steps": 1, "callbacks": [Stuck()]}
    before = signal.signal(signal.SIGALRM, break_off)  # pytest-timeout's, which is put back with what is left of it
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, 8)
    try:
        with pytest.raises(TimeoutError, match="long enough"):
            Engine(strategy="ddp_fork", devices=2, **flags).fit(Regression(), rows())
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s)
    pids = [int(Path(f"rank{rank}").read_text()) for rank in range(2)]
    workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(workers, timeout=5)[1]


class Crashes(Callback):
    """Ends rank 1 as a fault in an extension does."""

    def on_train_start(self, trainer, pl_module):
        if trainer.global_rank == 1:
            os.abort()
        time.sleep(60)  # until it is ended


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_a_worker_that_crashes_says_where(strategy, capfd):
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGABRT"):
        Engine(strategy=strategy, devices=2, **{**QUIET, "max_steps": 1, "callbacks": [Crashes()]}).fit(
            Regression(), rows()
        )
    said = capfd.readouterr().err
    assert "Fatal Python error: Aborted" in said
    assert f'{Path(__file__).name}", line' in said
    assert "in on_train_start" in said


def ends(rank: int, how: str) -> None:
    if rank == 1:
        raise KeyError("lost early")
    time.sleep(1)
    if how == "raises":
        raise ValueError("of its own")
    sys.exit(143)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("stops", ProcessExitedException, "terminated with exit code 143$"),
        ("raises", ProcessRaisedException, r"(?s)of its own.*Before that, process 1 had failed:.*lost early"),
    ],
)
def test_a_worker_that_was_lost_hides_no_end_of_others(how, error, text):
    started = start_processes(ends, (how,), nprocs=2, join=False, start_method="fork")
    workers = _Workers(started, lambda rank, code: rank == 1, lambda: False)
    assert not workers.join()  # the first of them is gone
    with pytest.raises(error, match=text):
        workers.join()


def test_results_that_the_last_of_the_workers_left_has_not_returned_are_an_error():
    started = start_processes(ends, ("stops",), nprocs=2, join=False, start_method="fork")
    workers = _Workers(started, lambda rank, code: True, lambda: False)
    assert not workers.join()
    with pytest.raises(ProcessExitedException, match="terminated with exit code 143"):
        workers.join()


@pytest.mark.parametrize("is_used", [True, False])
def test_a_process_that_has_used_a_device_is_not_forked(is_used):
    # Torch's module, which says so of itself, needs a device.
    modules = [SimpleNamespace(__name__="torch.cuda", is_initialized=lambda: is_used), torch.xpu]
    if not is_used:
        check_forks("ddp_notebook", modules)
        return
    with pytest.raises(RuntimeError, match=r"(?s)'ddp_notebook' forks .* has used torch\.cuda; .* restart the kernel"):
        check_forks("ddp_notebook", modules)


class Logs(Validated):
    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0, prog_bar=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return batch


def metrics_after_each_run(**flags):
    trainer, module = Engine(max_steps=1, limit_val_batches=0, **flags, **QUIET), Logs()
    found = []
    for run in (trainer.fit, trainer.predict):
        run(module, rows())
        found.append((trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics))
    return found


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_the_process_that_started_workers_has_the_metrics_of_the_last_run_alone(strategy):
    expected = metrics_after_each_run(strategy="single", devices=1)
    assert [len(metrics) for metrics in expected[0]] == [1, 1, 1]
    assert metrics_after_each_run(strategy=strategy, devices=2) == expected


class Grows(LightningModule):
    """Makes a layer in one of the hooks of a run."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def grow(self, hook: str) -> None:
        if hook == self.hook and not hasattr(self, "layer"):
            self.layer = torch.nn.Linear(1, 1)

    def setup(self, stage):
        self.grow("setup")

    def configure_model(self):
        self.grow("configure_model")

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[:, :1]) - 2).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_the_process_that_started_workers_makes_the_layers_that_they_made(hook):
    module = Grows(hook)
    trainer = Engine(strategy="ddp_fork", devices=2, max_epochs=3, **QUIET)
    trainer.fit(module, rows(), rows())
    trained = trainer.callback_metrics["loss"]
    (result,) = trainer.validate(module, rows(), verbose=False)
    assert result["loss"] == pytest.approx(float(trained))


class GrowsLate(Regression):
    def on_train_start(self):
        self.late = torch.nn.LayerNorm(1).requires_grad_(False)


def test_values_that_have_no_place_are_named():
    with pytest.warns(UserWarning, match=r"trained a module with late.bias, late.weight, which the module of this"):
        engine("ddp_fork").fit(GrowsLate(), rows())
