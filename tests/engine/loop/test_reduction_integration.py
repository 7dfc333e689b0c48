"""What is logged with `sync_dist` is reduced exactly, in one go; names that differ are an error on every rank."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch.utils.data import DataLoader

from polyphase.engine.distributed.object_group import WORLD
from polyphase.engine.loop.metrics import _reduce_results
from tests.distributed import run_ranks
from tests.pairs import nightly

from ..tiny import Positions, Seen, as_rank, engine


class Constant(Seen):
    """Logs 1, and the number of the rank in two extremes and a sum."""

    def _log(self, batch):
        rank = float(self.global_rank)
        self.log("one", 1.0, on_step=False, on_epoch=True, sync_dist=True)
        self.log("mean", batch.float().mean(), on_step=False, on_epoch=True, sync_dist=True)
        for how in ("min", "max", "sum"):
            self.log(how, rank, on_step=False, on_epoch=True, reduce_fx=how, sync_dist=True)

    def training_step(self, batch, batch_idx):
        self._log(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self._log(batch)


def uneven(rank):
    """Of a sampler of the user's own: 3 batches on rank 0, 4 on rank 1, the last one shorter."""
    first, size = (0, 6) if rank == 0 else (6, 7)
    return DataLoader(Positions(13), batch_size=2, sampler=range(first, first + size))


def ours(num_ranks):
    return engine(strategy="ddp", devices=num_ranks, use_distributed_sampler=False)


def numbers_of_batches_that_differ(rank):
    as_rank(rank)
    (found,) = ours(2).validate(Constant(), uneven(rank), verbose=False)
    assert found["one"] == 1, "exactly"
    assert found["mean"] == pytest.approx(sum(range(13)) / 13, rel=1e-6)
    assert (found["min"], found["max"], found["sum"]) == (0, 1, 4)


def means_of_a_training_epoch(rank):
    as_rank(rank)
    trainer = engine(strategy="ddp", devices=2)
    trainer.fit(Constant(), DataLoader(Positions(13), batch_size=3))
    assert trainer.callback_metrics["one"] == 1
    assert (trainer.callback_metrics["min"], trainer.callback_metrics["max"]) == (0, 1)
    module = Constant()
    trainer = engine(strategy="ddp", devices=2)
    trainer.fit(module, DataLoader(Positions(12), batch_size=4))  # 4 and 2 samples each
    assert trainer.callback_metrics["mean"] == pytest.approx(sum(range(12)) / 12, rel=1e-6)


def of_rank(rank, **values):
    """Results as a rank has them that logs `values`: each a value and how it is reduced."""
    results = _ResultCollection(training=False)
    for name, (value, how) in values.items():
        arguments = {"sync_dist": True, "sync_dist_fn": print, "reduce_fx": how, "batch_size": 2}
        results.log("validation_step", name, torch.tensor(value), **arguments)
    return results


def names_that_differ(rank):
    def refused(message, **values):
        with pytest.raises(ValueError, match=message):
            _reduce_results(of_rank(rank, **values), Seen(), WORLD)

    refused(
        r"self\.log\('v0', .*`validation_step` on rank\(s\) \[0\], but not on rank\(s\) \[1, 2\]: log the same",
        **{f"v{rank}": (1.0, "mean")},
    )
    refused(
        r"self\.log\('lonely', .* on rank\(s\) \[1\], but not on rank\(s\) \[0, 2\]",
        **({"lonely": (1.0, "mean")} if rank == 1 else {}),
    )
    refused(
        r"self\.log\('v', .*with other arguments on some ranks: reduce_fx is \{0: 'min', 1: 'max', 2: 'max'\}",
        v=(1.0, "max" if rank else "min"),
    )


class Differs(Seen):
    def validation_step(self, batch, batch_idx):
        if self.global_rank == 1:
            self.log("lonely", 1.0, sync_dist=True)


@pytest.mark.timeout(60)
def test_a_name_that_one_rank_logs_ends_the_run():
    trainer = engine(strategy="ddp_fork", devices=2)
    with pytest.raises(Exception, match=r"'lonely', .*on rank\(s\) \[1\], but not on rank\(s\) \[0\]: log the same"):
        trainer.validate(Differs(), DataLoader(Positions(4)), verbose=False)


def ranks_without_a_batch(rank):
    """They log nothing, and nobody minds; where a value is each rank's own, they have rank 0's."""
    as_rank(rank)

    class Own(Constant):
        def validation_step(self, batch, batch_idx):
            self.log("own", 10.0 + self.global_rank)
            super().validation_step(batch, batch_idx)

        def on_validation_batch_end(self, *_):
            self.log("hook", 2.0, sync_dist=True)

    for _ in range(2):
        trainer = engine(strategy="ddp", devices=3)
        module = Own()
        for size, own, low, top, total in (
            (2, [10, 11, 10], 0, 1, 1),
            (1, [10, 10, 10], 0, 0, 0),
            (5, [10, 11, 12], 0, 2, 3),
        ):
            (found,) = trainer.validate(module, DataLoader(Positions(size), batch_size=4), verbose=False)
            assert found["own"] == own[rank]
            assert (found["one"], found["hook"], found["min"], found["max"], found["sum"]) == (1, 2, low, top, total)
            assert trainer.callback_metrics["one"] == 1


def one_gather_for_all_values(rank):
    as_rank(rank)
    calls = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda *args, **kwargs: calls.append(args) or gather(*args, **kwargs)
    engine(strategy="ddp", devices=2).validate(Constant(), DataLoader(Positions(12)), verbose=False)
    assert len(calls) == 2, "one for the batches, one for what the hooks at the end have logged"


class NotANumber(Seen):
    """Logs a metric of its own samples, by which a scheduler lowers the rate, that rank 1 can't compute."""

    def training_step(self, batch, batch_idx):
        self.log("own", float("nan") if self.global_rank else 1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "monitor": "own"}]


def a_metric_that_one_rank_can_not_compute(rank):
    as_rank(rank)
    trainer = engine(strategy="ddp", devices=2, max_steps=1)
    trainer.fit(NotANumber(), DataLoader(Positions(8), batch_size=2))
    assert len(set(WORLD.all_gather_object(trainer.optimizers[0].param_groups[0]["lr"]))) == 1


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore:It is recommended to use .*sync_dist=True")  # the subject of one of them
@pytest.mark.parametrize(
    ("check", "num_ranks"),
    [
        (a_metric_that_one_rank_can_not_compute, 2),
        (numbers_of_batches_that_differ, 2),
        (means_of_a_training_epoch, 2),
        (names_that_differ, 3),
        (ranks_without_a_batch, 3),
        (one_gather_for_all_values, 2),
    ],
)
def test_reduction(check, num_ranks):
    run_ranks(check, num_ranks, timeout_s=90, start_method="fork")


SIZES = list(product(range(1, 10), (1, 2, 3, 4, 10)))
"""Of a data set and of a batch."""


def of_sizes(rank, sizes):
    as_rank(rank)
    for size, batch_size in sizes:
        loader = DataLoader(Positions(size), batch_size=batch_size)
        (found,) = engine(strategy="ddp", devices=2).validate(Constant(), loader, verbose=False)
        assert found["one"] == 1
        assert found["mean"] == pytest.approx((size - 1) / 2, rel=1e-6), (size, batch_size)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("sizes", [SIZES[::4], *nightly(SIZES)], ids=len)
def test_no_sample_counts_twice(sizes):
    run_ranks(of_sizes, 2, sizes, timeout_s=90, start_method="fork")


def test_an_engine_of_one_process_needs_none_of_it():
    (found,) = engine().validate(Constant(), DataLoader(Positions(5), batch_size=2), verbose=False)
    assert found["mean"] == torch.tensor(2.0)
