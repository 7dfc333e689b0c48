"""`LightDoctor` on two ranks: it finds the slow one with one gather at the end."""

import json

import pytest
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from polyphase.doctor import judge, light, read_run
from polyphase.engine import Engine
from tests.doctor.doctor_runs import STEPS, Blocks, Rows, SlowBlocks
from tests.engine.loop.costs import Costs
from tests.engine.tiny import QUIET


def fit(folder, module, *callbacks, **flags):
    flags = {**QUIET, "logger": CSVLogger(folder), "enable_doctor": True, **flags}
    trainer = Engine(
        strategy="ddp_fork", devices=2, max_steps=STEPS, check_first_steps=False, log_every_n_steps=6,
        callbacks=callbacks, default_root_dir=folder, **flags,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(), batch_size=4))


def test_the_slow_rank_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(light, "_WORTH_S", 0.1)
    fit(tmp_path, SlowBlocks(1))
    noted = read_run(str(tmp_path / "lightning_logs" / "version_0"))
    assert sorted(noted.intervals) == [0, 1]
    assert ("slow_rank", (1,)) in [(finding.cause, finding.ranks) for finding in judge(noted).findings]
    waited = [sum(each.seconds["waiting"] for each in noted.intervals[rank]) for rank in range(2)]
    assert waited[0] > 5 * waited[1]
    for interval in noted.intervals[0]:
        assert sum(interval.seconds.values()) == pytest.approx(interval.wall_s, rel=0.01)


def test_nothing_is_sent_or_read_while_it_trains(tmp_path, monkeypatch):
    """The same run without it has as many collectives and reads in each step, where its intervals end, too."""
    monkeypatch.setattr(light, "INTERVAL_STEPS", 4)
    counts = []
    for wanted in (False, True):
        folder = tmp_path / str(wanted)
        folder.mkdir()
        fit(folder, Blocks(), Costs(folder), enable_doctor=wanted)
        counts.append([json.loads((folder / f"costs-{rank}.json").read_text()) for rank in range(2)])
    for without, with_doctor in zip(*counts, strict=True):
        # As it ends, there is the gather.
        assert [each[:-1] for each in without.values()] == [each[:-1] for each in with_doctor.values()]
