import io
import pickle
import re
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from polyphase.callbacks import ProgressBar
from tests.terminal import Window, on_window

from .runs import Stream, TinyModule, batches, loader, quiet_trainer


@pytest.fixture
def window(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    window = Window(100, 30)
    yield window
    window.close()


class Look(Callback):
    """Keeps what is on the screen after each batch; comes after the bar."""

    def __init__(self, window):
        self.window = window
        self.train, self.validation, self.sanity = [], [], []

    def on_train_batch_end(self, *args):
        self.train.append(counts(self.window.look())[-1])

    def on_validation_batch_end(self, trainer, *args):
        (self.sanity if trainer.sanity_checking else self.validation).append(counts(self.window.look())[-1])


def counts(rows):
    """The descriptions and counts of all bars."""
    found = (re.fullmatch(r"(\w.*?)  (?:\S+ +)?(\d+/(?:\d+|\?))  .*", row) for row in rows)
    return [" ".join(match.groups()) for match in found if match]


EPOCH = r"epoch {}  \d\.\d s  train/value_loss \d\S*"


def bar_trainer(*callbacks, bar=None, **flags):
    return quiet_trainer(bar or ProgressBar(refresh_rate=10_000), *callbacks, enable_progress_bar=True, **flags)


@on_window
def test_epochs_are_counted_from_one_and_each_leaves_a_line(window):
    look = Look(window)
    bar_trainer(look, max_epochs=2).fit(TinyModule(), loader(batches(2, 2, 2)))
    expected = [f"Epoch {epoch}/2 {done}/3" for epoch in (1, 2) for done in (1, 2, 3)]
    assert look.train == expected
    first, second = window.look()
    assert re.fullmatch(EPOCH.format("1/2"), first)
    assert re.fullmatch(EPOCH.format("2/2"), second)
    assert "write" not in vars(window.file)


class Improves(TinyModule):
    """A validation whose loss and accuracy are given for each epoch."""

    VALUES = ((3.0, 0.1), (1.0, 0.2), (2.0, 0.3))

    def validation_step(self, batch, batch_idx):
        loss, accuracy = self.VALUES[self.current_epoch]
        self.log("val/loss", torch.tensor(loss), batch_size=1)
        self.log("val/accuracy", torch.tensor(accuracy), batch_size=1, prog_bar=True)
        self.log("val/rest", torch.tensor(7.0), batch_size=1)


def values_of(rows):
    return [row.split("  ", 3)[3] for row in rows]


@on_window
def test_the_line_of_an_epoch_has_the_validation_and_marks_the_best_so_far(window):
    bar_trainer(max_epochs=3, num_sanity_val_steps=0).fit(Improves(), loader(batches(2)), loader(batches(2)))
    rest = "val/rest 7"
    assert values_of(window.look()) == [
        f"val/loss 3*  val/accuracy 0.1  {rest}",
        f"val/loss 1*  val/accuracy 0.2  {rest}",
        f"val/loss 2  val/accuracy 0.3  {rest}",
    ]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@on_window
def test_the_best_is_of_the_value_that_a_callback_monitors(window, tmp_path):
    best = ModelCheckpoint(tmp_path, monitor="val/accuracy", mode="max")
    module, data = Improves(), loader(batches(2))
    flags = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    bar_trainer(best, max_epochs=2, **flags).fit(module, data, data)
    assert ["val/accuracy 0.2*" in row for row in window.look()] == [False, True]
    again = ModelCheckpoint(tmp_path, monitor="val/accuracy", mode="max")
    module.VALUES = (*module.VALUES[:2], (0.0, 0.15))  # the best of before the resumption counts
    bar_trainer(again, max_epochs=3, **flags).fit(module, data, data, ckpt_path=best.best_model_path)
    assert "val/accuracy 0.15  " in window.look()[-1]


@on_window
def test_an_epoch_without_a_validation_has_no_values_of_the_last_one(window):
    trainer = bar_trainer(max_epochs=2, check_val_every_n_epoch=2, num_sanity_val_steps=0)
    trainer.fit(Improves(), loader(batches(2)), loader(batches(2)))
    assert ["val/loss" in row for row in window.look()] == [False, True]


@on_window
def test_where_a_row_is_full_the_rest_is_counted(window):
    class Many(TinyModule):
        def training_step(self, batch, batch_idx):
            self.log_dict({f"a_value_of_some_length_{i}": float(i) for i in range(9)}, batch_size=1)
            return super().training_step(batch, batch_idx)

    bar_trainer().fit(Many(), loader(batches(2)))
    (row,) = window.look()
    assert len(row) < 100
    assert re.fullmatch(r"epoch 1/1  \S+ s  a_value_of_some_length_0 0  .*train/value_loss \S+  \+8", row)


@on_window
def test_leave_leaves_every_epoch(window):
    bar_trainer(bar=ProgressBar(leave=True), max_epochs=3).fit(TinyModule(), loader(batches(2)), loader(batches(2)))
    assert counts(window.look()) == ["Epoch 1/3 1/1", "Epoch 2/3 1/1", "Epoch 3/3 1/1"]
    assert len(window.look()) == 6, "each with its metrics"


@on_window
def test_sanity_check_and_several_validation_loaders(window):
    look = Look(window)
    loaders = [loader(batches(2, 2, 2)), loader(batches(2))]
    trainer = bar_trainer(look, val_check_interval=1, num_sanity_val_steps=1)
    trainer.fit(Several(), loader(batches(2, 2)), loaders)
    assert look.sanity == ["Sanity Checking 1/2 1/1", "Sanity Checking 2/2 1/1"]
    first, second = "Epoch 1/1, validation 1/2", "Epoch 1/1, validation 2/2"
    assert look.validation == [f"{first} 1/3", f"{first} 2/3", f"{first} 3/3", f"{second} 1/1"] * 2
    assert look.train == ["Epoch 1/1 1/2", "Epoch 1/1 2/2"]
    assert counts(window.look()) == []
    assert len(window.look()) == 1, "the line of the epoch"


class Several(TinyModule):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("val/loss", torch.tensor(2.0), batch_size=1, prog_bar=True)


@on_window
def test_validate_test_and_predict_leave_a_bar_each(window):
    trainer, module = bar_trainer(), Predicts()
    trainer.validate(module, loader(batches(2)), verbose=False)
    trainer.test(module, [loader(batches(2)), loader(batches(2, 2))], verbose=False)
    trainer.predict(module, loader(batches(2, 2, 2)))
    assert counts(window.look()) == ["Validation 1/1", "Testing 2/2 2/2", "Predicting 3/3"]


class Predicts(TinyModule):
    def predict_step(self, batch, batch_idx):
        return batch["x"]

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        pass


@on_window
def test_a_loader_of_unknown_length(window):
    look = Look(window)
    bar_trainer(look).fit(TinyModule(), DataLoader(Stream(batches(2, 2)), batch_size=None))
    assert look.train == ["Epoch 1/1 1/?", "Epoch 1/1 2/?"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"max_epochs": -1, "max_steps": 5}, ["Epoch 1 3/3", "Epoch 2 2/2"]),
        ({"max_epochs": 4, "max_steps": 5}, ["Epoch 1/4 3/3", "Epoch 2/4 2/2"]),
        ({"max_epochs": 1, "max_steps": 1, "accumulate_grad_batches": 2}, ["Epoch 1/1 2/2"]),
        ({"max_epochs": -1, "max_steps": 3, "accumulate_grad_batches": 2}, ["Epoch 1 3/3", "Epoch 2 2/2"]),
    ],
    ids=str,
)
@on_window
def test_max_steps_ends_the_bar(window, flags, expected):
    bar_trainer(bar=ProgressBar(leave=True), **flags).fit(TinyModule(), loader(batches(2, 2, 2)))
    assert counts(window.look()) == expected


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@on_window
def test_a_run_that_is_resumed_in_mid_epoch_goes_on_there(window, tmp_path):
    bar_trainer(SaveAt(1, tmp_path / "mid.ckpt")).fit(TinyModule(), loader(batches(2, 2, 2, 2)))
    look = Look(window)
    trainer = bar_trainer(look)
    trainer.fit(TinyModule(), loader(batches(2, 2, 2, 2)), ckpt_path=tmp_path / "mid.ckpt", weights_only=False)
    assert look.train == ["Epoch 1/1 3/4", "Epoch 1/1 4/4"]


class SaveAt(Callback):
    def __init__(self, batch_idx, path):
        self.batch_idx, self.path = batch_idx, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch_idx:
            trainer.save_checkpoint(self.path)


@on_window
def test_an_error_leaves_the_bar_and_the_streams(window):
    class Fails(TinyModule):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise ValueError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="mine"):
        bar_trainer().fit(Fails(), loader(batches(2, 2, 2)))
    assert counts(window.look()) == ["Epoch 1/1 2/3"]
    assert "write" not in vars(window.file)


@on_window
def test_what_the_user_and_the_loaders_workers_print_is_above(window):
    class Prints(TinyModule):
        def training_step(self, batch, batch_idx):
            print("step", batch_idx)
            self.print("by the module")
            return super().training_step(batch, batch_idx)

    data = DataLoader(Speaks(), batch_size=None, num_workers=1)
    bar_trainer().fit(Prints(), data)
    *rows, last = window.look()
    assert sorted(rows) == ["by the module"] * 2 + ["sample 0", "sample 1", "step 0", "step 1"]
    assert re.fullmatch(EPOCH.format("1/1"), last)


class Speaks(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        print("sample", end=" ")
        print(index)
        return batches(2)[0]


@pytest.mark.parametrize("bar", [ProgressBar(), ProgressBar(refresh_rate=0)], ids=["disabled", "refresh_rate=0"])
@on_window
def test_a_disabled_bar_does_nothing(window, bar):
    if bar.refresh_rate:
        bar.disable()
    trainer, module = bar_trainer(bar=bar), Predicts()
    trainer.fit(module, loader(batches(2)), loader(batches(2)))
    for entry in (trainer.validate, trainer.test):
        entry(module, loader(batches(2)), verbose=False)
    trainer.predict(module, loader(batches(2)))
    assert window.look() == []


def test_a_file_gets_the_lines_of_epochs_without_escape_codes(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    bar_trainer(max_epochs=2).fit(TinyModule(), loader(batches(2, 2)))
    rows = out.getvalue().splitlines()
    assert len(rows) == 2
    assert all(re.fullmatch(EPOCH.format(f"{epoch}/2"), row) for epoch, row in enumerate(rows, start=1))


@on_window
def test_the_bar_can_be_sent_to_another_process_in_mid_run(window):
    class Pickles(Callback):
        def on_train_batch_end(self, trainer, *args):
            bar = trainer.progress_bar_callback
            bar._trainer = None
            self.copy = pickle.loads(pickle.dumps(bar))  # noqa: S301
            bar._trainer = trainer

    pickles = Pickles()
    bar_trainer(pickles).fit(TinyModule(), loader(batches(2)))
    assert pickles.copy.is_enabled
    bar_trainer(bar=pickles.copy).fit(TinyModule(), loader(batches(2)))
    assert all(re.fullmatch(EPOCH.format("1/1"), row) for row in window.look())
    assert len(window.look()) == 2
