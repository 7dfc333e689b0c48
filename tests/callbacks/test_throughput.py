import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from polyphase.callbacks import ThroughputMonitor

from .runs import (
    QUIET,
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

PAUSE_S = 0.3


class Sleepy(TinyModule):
    """Sleeps where it is told."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def sleep(self, where):
        if where == self.where:
            time.sleep(PAUSE_S)

    def training_step(self, batch, batch_idx):
        self.sleep("training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.sleep("validation")

    def on_save_checkpoint(self, checkpoint):
        self.sleep("saving")


class SlowData(list):
    def __getitem__(self, index):
        time.sleep(PAUSE_S / 10)
        return super().__getitem__(index)


def counts(figures):
    """Samples (and tokens) of a step, which don't depend on the clock."""
    step_s = figures["throughput/step_time_ms"] / 1e3
    return {name: rate * step_s for name, rate in figures.items() if name.endswith("_per_s")}


def test_samples_are_counted_over_all_micro_batches_of_the_interval():
    logger, monitor = MemoryLogger(), ThroughputMonitor(2)
    trainer = quiet_trainer(monitor, logger=logger, accumulate_grad_batches=2)
    trainer.fit(TinyModule(), loader(batches(1, 2, 3, 4, 5, 6, 7, 8)))
    rows = logger.of("throughput/")
    assert [step for step, _ in rows] == [1, 3]
    assert [counts(row)["throughput/samples_per_s"] * 2 for _, row in rows] == pytest.approx([1 + 2 + 3 + 4, 26])
    assert monitor.last == rows[-1][1]
    assert sorted(monitor.last) == [f"throughput/{n}" for n in ("data_wait_share", "samples_per_s", "step_time_ms")]
    assert 0 < monitor.last["throughput/data_wait_share"] < 1


def test_tokens_are_logged_where_a_batch_has_them():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    monitor = ThroughputMonitor(2)
    quiet_trainer(monitor).fit(TinyModule(), loader(batches(2, 2, attention_mask=mask)))
    assert counts(monitor.last) == pytest.approx({"throughput/samples_per_s": 2, "throughput/tokens_per_s": 4})


def test_the_users_functions_count():
    monitor = ThroughputMonitor(1, num_samples=lambda batch: 10, num_tokens=lambda batch: 30)
    quiet_trainer(monitor).fit(TinyModule(), loader(batches(2)))
    assert counts(monitor.last) == pytest.approx({"throughput/samples_per_s": 10, "throughput/tokens_per_s": 30})


def test_a_batch_that_lightning_skips_counts_nothing():
    monitor = ThroughputMonitor(2)
    with pytest.warns(UserWarning, match="yielded None"):
        quiet_trainer(monitor).fit(TinyModule(), loader([*batches(3), None, *batches(3)]))
    assert counts(monitor.last)["throughput/samples_per_s"] == pytest.approx(3)


def run_sleepy(where, *callbacks, data=None, **flags):
    monitor = ThroughputMonitor(4)
    # Validation and saves after steps 1, 2 and 3: all of them inside of the one interval.
    trainer = quiet_trainer(monitor, *callbacks, max_steps=4, num_sanity_val_steps=0, **flags)
    trainer.fit(Sleepy(where), loader(data or batches(*[2] * 4)), loader(batches(2)))
    return monitor.last["throughput/step_time_ms"] / 1e3, monitor.last["throughput/data_wait_share"]


def test_the_time_of_training_is_in_the_step_and_not_in_the_wait():
    step_s, wait_share = run_sleepy("training", limit_val_batches=0)
    assert step_s >= PAUSE_S
    assert wait_share < 0.2


def test_the_time_of_the_loader_is_the_wait():
    _, wait_share = run_sleepy("nowhere", data=SlowData(batches(*[2] * 4)), limit_val_batches=0)
    assert wait_share > 0.5


def test_validation_is_left_out():
    step_s, _ = run_sleepy("validation", val_check_interval=1)
    assert step_s < PAUSE_S / 3


@pytest.mark.parametrize("weights_only", [False, True])
def test_saving_a_checkpoint_is_left_out(tmp_path, weights_only):
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_weights_only=weights_only)
    step_s, wait_share = run_sleepy("saving", save, enable_checkpointing=True, limit_val_batches=0)
    assert step_s < PAUSE_S / 3
    assert wait_share <= 1
    assert list(tmp_path.glob("*.ckpt"))


def test_a_checkpoint_that_is_saved_within_validation_is_left_out_once():
    class SaveInValidation(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint("inside.ckpt", weights_only=False)

    step_s, wait_share = run_sleepy("saving", SaveInValidation(), val_check_interval=1)
    assert 0 < step_s < PAUSE_S / 3
    assert 0 <= wait_share <= 1


def test_validation_without_training_needs_no_clock():
    monitor = ThroughputMonitor(1)
    quiet_trainer(monitor).validate(TinyModule(), loader(batches(2)), verbose=False)
    assert monitor.last == {}


def test_the_trainer_is_left_as_it_was():
    trainer = quiet_trainer(ThroughputMonitor(1))
    trainer.fit(TinyModule(), loader(batches(2)))
    assert "save_checkpoint" not in vars(trainer)


def test_the_trainer_is_left_as_it_was_after_an_error():
    trainer = quiet_trainer(ThroughputMonitor(1))
    with pytest.raises(ValueError, match=r"of a batch of type list is not known.*num_samples="):
        trainer.fit(NoTensor(), loader([[("a text", "and another")]]))
    assert "save_checkpoint" not in vars(trainer)


class NoTensor(TinyModule):
    def training_step(self, batch, batch_idx):
        return self.layer.weight.sum()


class Ragged(TinyModule):
    """Rank 0 has batches of 1 and rank 1 of 3 samples; only rank 1 has tokens."""

    def train_dataloader(self):
        fields = {"tokens": torch.ones(3, 5, dtype=torch.int64)} if self.global_rank else {}
        return loader(batches(*[1 + 2 * self.global_rank] * 6, **fields))


class SharedBatches(DDPStrategy):
    """Tells samplers, as tensor parallel strategies do, that all ranks are one replica of the data."""

    @property
    def distributed_sampler_kwargs(self):
        return {"num_replicas": 1, "rank": 0}


def fit_on_two_ranks(folder, strategy):
    monitor, before = ThroughputMonitor(2), CollectivesBefore()
    after = CollectivesAfter(before)
    callbacks = [before, monitor, after, Report(folder, [monitor], after)]
    flags = {"devices": 2, "strategy": strategy, "logger": MemoryLogger(), "max_epochs": 1}
    trainer = quiet_trainer(*callbacks, **{**QUIET, **flags})
    trainer.fit(Ragged())
    return reports(folder)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm_workers")
def test_two_ranks_are_counted_together_by_one_all_reduce(tmp_path):
    ranks = fit_on_two_ranks(tmp_path, "ddp_spawn")
    assert len(ranks) == 2
    for rank in ranks:
        assert counts(rank["last"]) == pytest.approx({"throughput/samples_per_s": 4, "throughput/tokens_per_s": 15})
        assert rank["all_reduces"] == 3
        assert {step: n > 0 for step, n in rank["collectives"].items()} == {
            str(step): step in (2, 4, 6) for step in range(7)
        }
    assert ranks[0]["last"] == ranks[1]["last"]
    assert [step for step, _ in ranks[0]["rows"]] == [1, 3, 5]
    assert ranks[1]["rows"] == []


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_batch_that_ranks_share_counts_once(tmp_path):
    ranks = fit_on_two_ranks(tmp_path, SharedBatches(start_method="spawn"))
    assert counts(ranks[0]["last"])["throughput/samples_per_s"] == pytest.approx((1 + 3) / 2)
