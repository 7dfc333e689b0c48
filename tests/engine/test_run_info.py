import re

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from polyphase.engine import __version__, run_info

from .tiny import Positions, Seen, Stream, engine


class Header(Callback):
    """What the header says as training begins."""

    text = ""

    def on_train_start(self, trainer, pl_module):
        self.text = run_info.header(trainer)


def header(data, **flags):
    seen = Header()
    trainer = engine(callbacks=[seen, *flags.pop("callbacks", [])], **flags)
    trainer.fit(Seen(), data)
    return seen.text


def test_all_that_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    flags = {"strategy": "single", "accumulate_grad_batches": 2, "logger": CSVLogger(tmp_path, name="", version="mine")}
    assert header(DataLoader(Positions(8), batch_size=2), precision="bf16-mixed", **flags) == (
        f"polyphase {__version__} | single on cpu | bf16-mixed | global batch 4 = 1 x 2 x 2 | seed 7 | logs: mine"
    )


@pytest.mark.parametrize(
    ("data", "flags", "expected"),
    [
        (DataLoader(Positions(8), batch_size=4), {}, "global batch 4 = 1 x 4 x 1"),
        (DataLoader(Positions(9), batch_size=4), {"global_batch_size": 7}, "global batch 7, at most 1 x 4 x 2"),
        (DataLoader(Positions(8), batch_size=4), {"global_batch_size": 8}, "global batch 8 = 1 x 4 x 2"),
        (DataLoader(Stream(8), batch_size=2), {}, "global batch 2 = 1 x 2 x 1"),
        (DataLoader(Stream(8), batch_size=None), {}, None),
        ([torch.ones(2), torch.ones(2)], {}, None),
        ({"a": DataLoader(Positions(4)), "b": DataLoader(Positions(4))}, {}, None),
        (DataLoader(Positions(8)), {"callbacks": [GradientAccumulationScheduler({0: 2, 1: 4})]}, None),
    ],
)
def test_the_batch_is_true_or_left_out(data, flags, expected, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(Seen, "training_step", lambda self, *_: next(self.parameters()).sum(), raising=True)
    found = header(data, **flags)
    assert found == " | ".join(filter(None, [f"polyphase {__version__}", "single on cpu", "32-true", expected]))


def test_git_is_asked_quietly(tmp_path, monkeypatch, capfd):
    assert run_info.git_commit() is None, "no repository"
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nexec sleep 30\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(run_info, "_GIT_TIMEOUT_S", 0.2)
    assert run_info.git_commit() is None, "no answer"
    git.unlink()
    assert run_info.git_commit() is None, "no git"
    assert capfd.readouterr() == ("", "")


def test_parameters_are_flat_and_plain(tmp_path):
    callback = Callback()
    trainer = engine(callbacks=[callback], default_root_dir=tmp_path, max_time={"hours": 1})
    found = run_info.run_parameters(trainer)
    assert found["polyphase/callbacks"] == "Callback"
    assert found["polyphase/default_root_dir"] == str(tmp_path)
    assert found["polyphase/max_time/hours"] == 1
    assert found["polyphase/logger"] is False
    assert all(value is None or type(value) in (bool, int, float, str) for value in found.values())
    assert all(re.fullmatch(r"polyphase(/\w+)+", name) for name in found)


def test_paths_are_shown_from_here(tmp_path):
    assert run_info.shown_path(str(tmp_path / "a" / "b")) == "a/b"
    assert run_info.shown_path(str(tmp_path.parent)) == str(tmp_path.parent)
    assert run_info.shown_path("s3://bucket/a") == "s3://bucket/a"
