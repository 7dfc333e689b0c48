import logging
import re
import warnings

import pytest
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.loop.runs import quiet

from ..tiny import Positions, Seen

NOISE = "GPU available|TPU available|Tip:|Seed set|Loading `train_dataloader`|FLOPs|distributed_backend|GLOBAL_RANK"


@pytest.fixture
def said(caplog, monkeypatch):
    """What Lightning logs, as its users' handlers get it."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    for logger in loggers:
        # Whether the root logger gets it, too, depends on what else was imported before Lightning.
        monkeypatch.setattr(logger, "propagate", False)
        logger.addHandler(caplog.handler)
    yield caplog
    for logger in loggers:
        logger.removeHandler(caplog.handler)


def make_and_run():
    Engine(accelerator="cpu", devices=1, max_epochs=1, logger=True, enable_checkpointing=False).fit(
        Seen(), DataLoader(Positions(2))
    )


def noise_in(said):
    return [message for message in said.messages if re.search(NOISE, message)]


def test_an_engine_that_is_made_and_runs_logs_no_noise(said):
    make_and_run()
    assert not noise_in(said)
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in said.messages, "what is no noise is shown"


def test_whoever_asked_for_lightnings_logs_gets_them_all(said):
    logger = logging.getLogger("lightning.pytorch")
    logger.setLevel(logging.DEBUG)
    try:
        make_and_run()
    finally:
        logger.setLevel(logging.INFO)
    assert any(message.startswith("GPU available") for message in said.messages)
    assert any("Tip: " in message for message in said.messages)


def test_after_a_run_the_stock_trainer_logs_as_before(said):
    make_and_run()
    said.clear()
    Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    seed_everything(3)
    assert "Seed set to 3" in said.messages
    assert any(message.startswith("GPU available") for message in said.messages)


def test_importing_the_engine_adds_no_filter():
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        assert not logging.getLogger(name).filters


def test_it_may_be_entered_again_and_lets_warnings_through(said):
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with quiet():
        with quiet():
            rank_zero_info("GPU available: True, used: False")
        rank_zero_info("GPU available: True, used: False")
        rank_zero_info("GPU memory is short")
        log.warning("GPU available: True, used: False")
        with pytest.warns(UserWarning, match="GPU available"):
            warnings.warn("GPU available: True, used: False", stacklevel=1)
    assert said.messages == ["GPU memory is short", "GPU available: True, used: False"]
    assert not log.filters


def test_a_run_that_fails_leaves_no_filter_behind():
    class Fails(Seen):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        Engine(accelerator="cpu", devices=1, max_epochs=1, logger=False).fit(Fails(), DataLoader(Positions(2)))
    assert not logging.getLogger("lightning.pytorch.utilities.rank_zero").filters
