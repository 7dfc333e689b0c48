"""An engine and its callbacks can be pickled, before a run and after it, and run again."""

import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

from polyphase.callbacks import ProgressBar, Snapshot
from polyphase.engine import Engine

from .tiny import Positions, Seen


@pytest.mark.parametrize("bar", [None, TQDMProgressBar, RichProgressBar, ProgressBar])
def test_an_engine_is_pickled_before_and_after_a_run_and_runs_again(tmp_path, bar):
    callbacks: list[Any] = [Snapshot()] if bar is None else [bar()]
    engine = Engine(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=bar is None,
        callbacks=callbacks,
    )
    assert pickle.loads(pickle.dumps(engine)).max_epochs == 1  # noqa: S301 - our own
    engine.fit(Seen(), DataLoader(Positions(4), batch_size=2, shuffle=True))
    for callback in engine.callbacks:
        assert type(pickle.loads(pickle.dumps(callback))) is type(callback)  # noqa: S301 - our own
    if bar is None:
        return  # Snapshot's folder is the first run's
    again = pickle.loads(pickle.dumps(engine))  # noqa: S301 - our own
    module = Seen()
    again.fit_loop.max_epochs = 2
    again.fit(module, DataLoader(Positions(4), batch_size=2, shuffle=True))
    assert len(module.epochs) == 1
    assert again.global_step == 4
    again.save_checkpoint(tmp_path / "saved.ckpt")
    assert torch.equal(module.weight, Seen.load_from_checkpoint(tmp_path / "saved.ckpt").weight)
