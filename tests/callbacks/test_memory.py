from pathlib import Path

import pytest
import torch

from polyphase.callbacks import MemoryMonitor
from polyphase.callbacks import memory as memory_module

from .runs import (
    CollectivesAfter,
    CollectivesBefore,
    MemoryLogger,
    Report,
    TinyModule,
    batches,
    loader,
    quiet_trainer,
    reports,
)

BALLAST_MB = 200


def test_one_process_is_its_own_minimum_mean_and_maximum():
    logger, monitor = MemoryLogger(), MemoryMonitor(2)
    quiet_trainer(monitor, logger=logger).fit(TinyModule(), loader(batches(*[2] * 5)))
    rows = logger.of("memory/")
    assert [step for step, _ in rows] == [1, 3]
    assert rows[-1][1] == monitor.last
    assert sorted(monitor.last) == ["memory/max_mb", "memory/mean_mb", "memory/min_mb"]
    assert len(set(monitor.last.values())) == 1
    assert 50 < monitor.last["memory/max_mb"] < 1e5


def test_resident_memory_follows_what_is_allocated():
    cpu = torch.device("cpu")
    before = memory_module._used_bytes(cpu)
    ballast = torch.ones(BALLAST_MB * 10**6, dtype=torch.uint8)
    grown = memory_module._used_bytes(cpu) - before
    assert grown == pytest.approx(ballast.numel(), rel=0.2)


def test_without_proc_the_peak_stands_in(monkeypatch, tmp_path):
    resident = memory_module._used_bytes(torch.device("cpu"))
    monkeypatch.setattr(memory_module, "_STATM", Path(tmp_path / "absent"))
    assert memory_module._used_bytes(torch.device("cpu")) >= 0.9 * resident


class Heavy(TinyModule):
    """Rank 1 holds more memory."""

    def on_train_start(self):
        self.ballast = torch.ones(BALLAST_MB * 10**6 * self.global_rank, dtype=torch.uint8)

    def train_dataloader(self):
        return loader(batches(*[2] * 5))


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm_workers")
def test_two_ranks_share_their_figures_at_logging_steps_only(tmp_path):
    monitor, before = MemoryMonitor(2), CollectivesBefore()
    after = CollectivesAfter(before)
    callbacks = [before, monitor, after, Report(tmp_path, [monitor], after)]
    quiet_trainer(*callbacks, devices=2, strategy="ddp_spawn", logger=MemoryLogger()).fit(Heavy())
    ranks = reports(tmp_path)
    assert len(ranks) == 2
    assert ranks[0]["last"] == ranks[1]["last"]
    least, mean, most = (ranks[0]["last"][f"memory/{name}_mb"] for name in ("min", "mean", "max"))
    assert most - least == pytest.approx(BALLAST_MB, rel=0.5)
    assert mean == pytest.approx((least + most) / 2)
    for rank in ranks:
        assert rank["all_reduces"] == 2
        assert {int(step) for step, n in rank["collectives"].items() if n} == {2, 4}
    assert [step for step, _ in ranks[0]["rows"]] == [1, 3]
    assert ranks[1]["rows"] == []
