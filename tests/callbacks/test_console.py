import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from polyphase.callbacks import ConsoleLogger, ProgressBar, ThroughputMonitor, default_progress_bar

from .runs import Stream, TinyModule, batches, loader, quiet_trainer


def lines(capsys, *beginnings):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(beginnings or ("epoch", "val"))]


def console_trainer(*callbacks, **flags):
    return quiet_trainer(*callbacks, enable_progress_bar=True, **flags)


def test_a_line_at_each_interval_and_at_the_last_step(capsys):
    console_trainer(ConsoleLogger(2), max_epochs=2).fit(TinyModule(), loader(batches(*[2] * 3)))
    value = r"train/value_loss \d\S*  \d+\.\d steps/s  eta 0:00:\d\d"
    expected = [f"epoch {epoch}/2  step {step}/6  {value}" for epoch, step in ((1, 2), (2, 4), (2, 6))]
    printed = lines(capsys)
    assert len(printed) == 3
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(expected, printed, strict=True)), printed


def test_the_last_step_is_printed_where_no_interval_ends(capsys):
    console_trainer(ConsoleLogger(2), accumulate_grad_batches=2).fit(TinyModule(), loader(batches(*[2] * 5)))
    assert [line.split("  ")[1] for line in lines(capsys)] == ["step 2/3", "step 3/3"]


def test_a_loader_of_unknown_length_has_no_end_and_no_eta(capsys):
    console_trainer(ConsoleLogger(1)).fit(TinyModule(), DataLoader(Stream(batches(2)), batch_size=None))
    (line,) = lines(capsys)
    assert re.fullmatch(r"epoch 1/1  step 1  train/value_loss \S+  \S+ steps/s", line)


def test_endless_epochs_show_the_steps_that_end_the_run(capsys):
    console_trainer(ConsoleLogger(2), max_epochs=-1, max_steps=4).fit(TinyModule(), loader(batches(2, 2)))
    assert [line.split("  ")[:2] for line in lines(capsys)] == [["epoch 1", "step 2/4"], ["epoch 2", "step 4/4"]]


def test_a_second_fit_goes_on(capsys):
    trainer, module = console_trainer(ConsoleLogger(2)), TinyModule()
    trainer.fit(module, loader(batches(2, 2)))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(batches(2, 2)))
    assert [line.split("  ")[1] for line in lines(capsys)] == ["step 2/2", "step 4/4"]


def test_samples_per_second_are_those_of_the_throughput_monitor(capsys):
    monitor = ThroughputMonitor(2)
    console_trainer(monitor, ConsoleLogger(2)).fit(TinyModule(), loader(batches(2, 2)))
    assert f"  {monitor.last['throughput/samples_per_s']:.1f} samples/s  eta 0:00:00" in lines(capsys)[0]


def test_validation_prints_what_it_logged_and_no_sanity_check(capsys):
    trainer = console_trainer(ConsoleLogger(1), max_epochs=2)
    trainer.fit(TinyModule(), loader(batches(2)), loader(batches(2)))
    assert lines(capsys, "validation") == [f"validation after step {step}  val/loss 2  accuracy 0.5" for step in (1, 2)]


class LogsNowAndThen(TinyModule):
    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.log("sometimes", float(batch_idx), prog_bar=True, batch_size=1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.tensor(2.0), batch_size=1, prog_bar=True)


def test_a_line_has_the_values_that_are_new(capsys):
    trainer = console_trainer(ConsoleLogger(1), max_epochs=2, check_val_every_n_epoch=2)
    trainer.fit(LogsNowAndThen(), loader(batches(2, 2, 2)), loader(batches(2)))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(LogsNowAndThen(), loader(batches(2, 2)), loader(batches(2)))
    names = [re.findall(r"(\S+) [\d.e-]+(?=  |$)", line.partition("  step")[2] or line) for line in lines(capsys)]
    assert [{"sometimes", "val/loss"} & set(of_line) for of_line in names] == [
        {"sometimes"}, set(), {"sometimes"}, {"sometimes"}, set(), {"sometimes"}, {"val/loss"}, {"sometimes"}, set(),
    ]  # fmt: skip


def test_results_are_printed_once_and_by_the_trainer(capsys):
    trainer, module = console_trainer(ConsoleLogger(1)), TinyModule()
    for entry, name in ((trainer.test, "test/loss"), (trainer.validate, "val/loss")):
        entry(module, loader(batches(2)))
        assert capsys.readouterr().out.count(name) == 1, "in Lightning's table"
        entry(module, loader(batches(2)), verbose=False)
        assert capsys.readouterr().out == ""


def test_disabled_prints_nothing(capsys):
    bar = ConsoleLogger(1)
    trainer = console_trainer(bar)
    bar.disable()
    trainer.fit(TinyModule(), loader(batches(2)), loader(batches(2)))
    trainer.test(TinyModule(), loader(batches(2)), verbose=False)
    bar.print("hidden")
    bar.enable()
    bar.print("shown", end="!\n")
    assert lines(capsys, "epoch", "validation", "test", "hidden", "shown") == ["shown!"]


def test_each_line_is_flushed(monkeypatch):
    class Buffered:
        """Hands over what was flushed."""

        def __init__(self):
            self.held = self.flushed = ""

        def write(self, text):
            self.held += text

        def flush(self):
            self.flushed, self.held = self.flushed + self.held, ""

    out = Buffered()
    monkeypatch.setattr(sys, "stdout", out)
    ConsoleLogger().print("a line")
    assert out.flushed == "a line\n"


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, ProgressBar), (False, ConsoleLogger)])
def test_the_default_bar_depends_on_the_output(monkeypatch, is_terminal, expected):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert type(default_progress_bar()) is expected


class OneValidation(TinyModule):
    """Its metrics are reduced over ranks, so that reading one on rank 0 alone would hang if it began a reduction."""

    def train_dataloader(self):
        return loader(batches(2, 2))

    val_dataloader = train_dataloader


@pytest.mark.timeout(120)
def test_rank_0_alone_prints_also_what_is_reduced_over_ranks(capfd):
    console_trainer(ConsoleLogger(1), devices=2, strategy="ddp_fork").fit(OneValidation(sync_dist=True))
    printed = lines(capfd)
    assert [line.split("  ")[:2] for line in printed] == [
        ["epoch 1/1", "step 1/2"],
        ["epoch 1/1", "step 2/2"],
        ["validation after step 2", "val/loss 2"],
    ]
