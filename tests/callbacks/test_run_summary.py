import os
import re
import shlex
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from polyphase.callbacks import MemoryMonitor, RunSummary, ThroughputMonitor
from polyphase.engine import Engine
from polyphase.engine.checkpoint import commands


class Net(LightningModule):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, width)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NeedsSize(Net):
    """Can't be made from its checkpoint alone."""

    def __init__(self, size):
        LightningModule.__init__(self)
        self.layer = torch.nn.Linear(4, size)


# Lightning, where a run goes on in a new folder of logs.
pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")

DATA = DataLoader(TensorDataset(torch.ones(20, 4)), batch_size=8)


def run(module=None, data=DATA, val=None, **flags):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    engine = Engine(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **flags})
    engine.fit(module or Net(), data, val)
    return engine


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_it_is_short_and_says_where_everything_is(capsys, tmp_path):
    best = ModelCheckpoint(monitor="val/loss", filename="best")
    run(val=DATA, callbacks=[best], logger=TensorBoardLogger(os.getcwd(), version="mine"))
    said = lines(capsys)
    assert len(said) <= 1 + 8
    assert max(map(len, said)) <= 100
    assert said[0].startswith("polyphase ")
    assert re.fullmatch(
        r"3 steps in [\d.]+ s, \d+% of it waiting for data; [\d,.]+ samples/s, peak memory .+ [MG]B", said[1]
    )
    assert re.fullmatch(r"best val/loss [\de.-]+: lightning_logs/mine/checkpoints/best.ckpt", said[2])
    assert said[3] == "logs: lightning_logs/mine   checkpoints: lightning_logs/mine/checkpoints"
    assert said[4] == "to go on, with a larger max_epochs:"


def test_how_it_says_to_load_a_file_works(capsys):
    for module in (Net(width=3), NeedsSize(7)):
        run(module)
        *_, said, load = lines(capsys)
        assert said == "to load it elsewhere:"
        model = NeedsSize(7)
        loaded = eval(load.strip(), {"Net": Net, "model": model, "torch": torch})
        found = model if isinstance(module, NeedsSize) else loaded
        for name, weight in module.state_dict().items():
            assert torch.equal(found.state_dict()[name], weight)


def test_how_it_says_to_load_a_directory_works(capsys, tmp_path):
    for module, expected in ((Net(width=3), "model.ckpt"), (NeedsSize(7), "model.safetensors")):
        run(module, checkpoint_format="directory")
        *_, said, export, load = lines(capsys)
        assert said == "to load it elsewhere, in a shell and in Python:"
        words = shlex.split(export)
        assert words[:3] == ["polyphase", "ckpt", "export"]
        assert words[-1] == expected
        assert commands.main(words[2:]) == 0
        capsys.readouterr()
        model = NeedsSize(7)
        import safetensors.torch

        loaded = eval(load.strip(), {"Net": Net, "model": model, "safetensors": safetensors})
        found = model if expected == "model.safetensors" else loaded
        for name, weight in module.state_dict().items():
            assert torch.equal(found.state_dict()[name], weight)


def test_how_it_says_to_go_on_works(capsys):
    module = Net()
    run(module)
    (path,) = re.findall(r"engine.fit\(..., ckpt_path='(.+)'\)", capsys.readouterr().out)
    engine = Engine(accelerator="cpu", devices=1, max_epochs=2, enable_progress_bar=False, enable_model_summary=False)
    engine.fit(Net(), DATA, ckpt_path=path)
    assert engine.global_step == 6
    assert re.search(r"^3 steps \(6 in all\) in ", capsys.readouterr().out, re.MULTILINE)


def figures(capsys):
    (said,) = (line for line in lines(capsys) if " steps in " in line)
    share = re.search(r"(\d+)% of it waiting for data", said)
    samples = re.search(r"([\d,.]+) samples/s", said)
    seconds = float(re.search(r"in ([\d.]+) s", said)[1])
    return seconds, share and int(share[1]), samples and float(samples[1].replace(",", ""))


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4)


class SlowNet(Net):
    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        time.sleep(0.5)

    on_train_batch_end = lambda self, *_: time.sleep(0.05)  # noqa: E731


def test_its_figures_are_those_of_training(capsys):
    """20 samples in 3 steps of 0.15 s, after 0.4 s in the loader; a validation of 1.5 s is not of it."""
    run(SlowNet(), DataLoader(Slow(), batch_size=8), DataLoader(torch.ones(3), batch_size=1), limit_val_batches=3)
    seconds, share, samples_per_s = figures(capsys)
    # On a machine that is busy all takes longer. With the validation it would be 2.35 s at the least.
    assert 0.84 <= seconds < 2.3
    assert 10 <= share <= 75
    assert samples_per_s == pytest.approx(20 / seconds, rel=0.1)


def test_what_is_not_known_is_left_out(capsys):
    class Opaque:
        def __init__(self, tensor):
            self.tensor = tensor

    class Takes(Net):
        def training_step(self, batch, batch_idx):
            return self.layer(batch.tensor).sum()

    run(Takes(), DataLoader([torch.ones(4)] * 6, batch_size=2, collate_fn=lambda rows: Opaque(torch.stack(rows))))
    said = lines(capsys)[1]
    assert re.fullmatch(r"3 steps in [\d.]+ s, \d+% of it waiting for data; [\d,.]+ steps/s, peak memory .*", said), (
        said
    )


def test_what_a_throughput_monitor_counts_counts_here(capsys):
    run(callbacks=[ThroughputMonitor(num_samples=lambda batch: 1000)])
    assert figures(capsys)[2] > 1000


def test_it_prints_nothing_where_nothing_is_wanted(capsys, tmp_path):
    run(logger=False)
    run(enable_run_summary=False)
    with pytest.warns(UserWarning, match="barebones"):
        run(barebones=True, enable_progress_bar=None, enable_model_summary=None)
    assert not lines(capsys)
    run(enable_run_summary=True, logger=False, enable_checkpointing=False)
    header, end = lines(capsys)
    assert "logs" not in header
    assert "3 steps" in end


def test_one_of_the_users_own_takes_its_place(capsys):
    engine = run(callbacks=[RunSummary(), MemoryMonitor(every_n_steps=1)])
    assert sum(isinstance(c, RunSummary) for c in engine.callbacks) == 1
    assert len([line for line in lines(capsys) if line.startswith("polyphase")]) == 1


def test_only_training_is_summed_up(capsys):
    engine = Engine(accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False)
    engine.validate(Net(), DATA, verbose=False)
    assert not lines(capsys)


class Ends(Callback):
    def __init__(self, end):
        self.end = end

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            self.end()


def ctrl_c():
    raise KeyboardInterrupt


def test_ctrl_c_says_what_was_saved(capsys):
    with pytest.raises(SystemExit):
        run(callbacks=[Ends(ctrl_c)])
    assert lines(capsys)[1:] == [
        "Stopped by Ctrl-C after 2 steps. Nothing was saved; resume=auto saves every ten minutes."
    ]
    with pytest.raises(SystemExit):
        run(callbacks=[Ends(ctrl_c), ModelCheckpoint(every_n_train_steps=1, filename="{step}")])
    assert lines(capsys)[1:] == [
        "Stopped by Ctrl-C after 2 steps. The last checkpoint is lightning_logs/version_1/checkpoints/step=1.ckpt",
        "to go on: engine.fit(..., ckpt_path='lightning_logs/version_1/checkpoints/step=1.ckpt')",
    ]


def test_sigterm_says_what_was_saved(capsys, caplog):
    with pytest.raises(SystemExit):
        run(callbacks=[Ends(lambda: os.kill(os.getpid(), signal.SIGTERM))], resume="auto")
    assert lines(capsys)[-2:] == [
        "Stopped by SIGTERM after 2 steps. The last checkpoint is snapshots/step=2",
        "to go on: run it again (resume='auto')",
    ]
    run(resume="auto")
    assert "to go on: run it again with a larger max_epochs (resume='auto')" in lines(capsys)
    assert "Stopped by" not in caplog.text, "said once"


def test_another_failure_is_not_summed_up(capsys):
    def fail():
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        run(callbacks=[Ends(fail)])
    assert len(lines(capsys)) == 1


@pytest.mark.parametrize("short", [True, False])
def test_the_command_is_the_one_that_was_given(capsys, monkeypatch, short):
    import lightning.pytorch.cli  # noqa: F401

    long = [] if short else ["--a_long_flag", "x" * 80]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/polyphase", "fit", "--model", "Net", "--ckpt_path", "old", *long])
    run(default_root_dir="r", max_epochs=-1, max_steps=2)
    said = capsys.readouterr().out
    path = "r/lightning_logs/version_0/checkpoints/epoch=0-step=2.ckpt"
    if short:
        assert f"to go on, with a larger max_steps:\n    polyphase fit --model Net --ckpt_path {path}" in said
    else:
        assert f"to go on, with a larger max_steps:\n    the same command and --ckpt_path {path}" in said


def test_outside_of_a_run_the_callbacks_are_the_users(tmp_path):
    class Looks(Callback):
        def on_train_start(self, trainer, pl_module):
            self.seen = list(trainer.callbacks)

    looks = Looks()
    engine = run(callbacks=[looks], enable_checkpointing=False)
    for _ in range(2):
        engine.fit(Net(), DATA)
        assert sum(isinstance(c, RunSummary) for c in looks.seen) == 1
        assert engine.callbacks == [looks]


def test_a_run_that_a_finder_ends_is_over_once(tmp_path):
    class Counts(Callback):
        ends = 0

        def on_run_end(self, trainer, pl_module, exception):
            self.ends += 1

    counts = Counts()
    engine = Engine(accelerator="cpu", devices=1, max_steps=2, logger=False, callbacks=[counts])
    Tuner(engine).lr_find(Net(), DATA, num_training=2, update_attr=False)
    assert counts.ends == 1


class AsksToStop(Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = True


class StopsItself(Net):
    def on_train_batch_end(self, *args):
        self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (
            EarlyStopping("val/loss", patience=1, min_delta=1e9),
            r"EarlyStopping: Monitored metric val/loss did not improve in the last 1 records\. Best score: [\d.]+\.",
        ),
        (Timer(timedelta(microseconds=1)), r"Timer: max_time was over after [\d.]+ s"),
        (AsksToStop(), r"AsksToStop \(trainer\.should_stop\)"),
        (StopsItself(), r"StopsItself \(trainer\.should_stop\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_says_who_has_stopped_the_run(stops, expected, capsys):
    is_module = isinstance(stops, LightningModule)
    callbacks = [] if is_module else [stops]
    engine = run(stops if is_module else None, val=DATA, callbacks=callbacks, max_epochs=9)
    assert engine.current_epoch < 9
    said = [line for line in lines(capsys) if line.startswith("stopped by ")]
    assert len(said) == 1
    assert re.fullmatch(f"stopped by {expected}", said[0])
    (path,) = Path(engine.log_dir).glob("events.*")
    written = EventAccumulator(str(path))
    written.Reload()
    text = written.Tensors("stopped_by/text_summary")[0].tensor_proto.string_val[0].decode()
    assert f"stopped by {text}" == said[0]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_a_run_that_ends_by_its_limit_names_nobody(capsys):
    engine = run(callbacks=[AsksToStop()], max_epochs=9)
    engine.fit_loop.max_epochs, engine.callbacks[:] = 10, [c for c in engine.callbacks if type(c) is not AsksToStop]
    capsys.readouterr()
    engine.fit(Net(), DATA)
    assert "stopped by" not in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_it_names_the_rank_that_asked(capfd):
    class OnRank1(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_rank == 1:
                trainer.should_stop = True

    run(callbacks=[OnRank1()], max_epochs=500, strategy="ddp_fork", devices=2)
    assert "\nstopped by OnRank1 (trainer.should_stop) on rank 1\n" in capfd.readouterr().out
