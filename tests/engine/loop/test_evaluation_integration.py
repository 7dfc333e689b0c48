"""What several ranks evaluate and predict is what one process does, whatever the sizes: each sample once."""

import logging

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassPrecision

from polyphase.engine.distributed.object_group import WORLD
from tests.distributed import run_ranks
from tests.pairs import nightly

from ..tiny import as_rank, engine

PRIMES = (1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
NUM_CLASSES = 3
MORE = [("ddp", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 1), ("fsdp", 3), ("fsdp", 4), ("hsdp:replicate=2", 4)]
MATRIX = [("ddp", 3), ("fsdp", 2), *nightly(*MORE)]


class Classifier(LightningModule):
    """Logs all there is to log of each of its loaders, and notes each sample it sees."""

    def __init__(self, num_loaders: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))
        self.means = nn.ModuleList(MeanMetric() for _ in range(num_loaders))
        pair = lambda: [MulticlassAccuracy(NUM_CLASSES), MulticlassPrecision(NUM_CLASSES)]  # noqa: E731
        self.accuracies = nn.ModuleList(MetricCollection(pair()) for _ in range(num_loaders))
        self.aurocs = nn.ModuleList(BinaryAUROC() for _ in range(num_loaders))  # which keeps all samples
        self.seen: list[list[int]] = [[] for _ in range(num_loaders)]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        ids, x, y = batch
        self.seen[dataloader_idx].append(ids.tolist())
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        self.means[dataloader_idx].update(x[:, 0])
        self.accuracies[dataloader_idx].update(out, y)
        self.aurocs[dataloader_idx].update(out[:, 0].sigmoid(), y.clamp(max=1))
        self.log("loss", loss, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("max", x.max(), reduce_fx="max", sync_dist=True)
        self.log("min", x.min(), reduce_fx="min", sync_dist=True)
        self.log("sum", x.sum(), reduce_fx="sum", sync_dist=True)
        self.log("mean", self.means[dataloader_idx])
        self.log("auroc", self.aurocs[dataloader_idx])
        self.log_dict(self.accuracies[dataloader_idx])

    test_step = validation_step

    def on_validation_epoch_end(self):
        self.log("num", float(sum(len(ids) for seen in self.seen for ids in seen)), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen[dataloader_idx].append(batch[0].tolist())
        return {"ids": batch[0], "out": self.net(batch[1])}


def loader(size, batch_size):
    draws = torch.Generator().manual_seed(size)
    x, y = torch.randn(size, 4, generator=draws), torch.randint(NUM_CLASSES, (size,), generator=draws)
    return DataLoader(TensorDataset(torch.arange(size), x, y), batch_size=batch_size)


def evaluate(stage, sizes, **flags):
    """The module afterwards, and the results; the same weights and statistics each time."""
    module = Classifier(len(sizes))
    arguments = {} if stage == "predict" else {"verbose": False}
    results = getattr(engine(**flags), stage)(module, [loader(*size) for size in sizes], **arguments)
    return module, results if stage != "predict" or len(sizes) > 1 else [results]


def check(stage, sizes, strategy, num_ranks):
    module, found = evaluate(stage, sizes, strategy=strategy, devices=num_ranks)
    _, expected = evaluate(stage, sizes)
    for index, (size, batch_size) in enumerate(sizes):
        everyones = WORLD.all_gather_object(module.seen[index])
        assert sorted(i for seen in everyones for ids in seen for i in ids) == list(range(size)), (stage, size)
        if stage != "predict":
            assert found[index].keys() == expected[index].keys()
            assert found[index] == pytest.approx(expected[index], rel=1e-6, abs=1e-6), (stage, size, batch_size)
            continue
        ids, out = (torch.cat([part[name] for part in found[index]]) for name in ("ids", "out"))
        assert ids.tolist() == list(range(size)), "in order, on every rank"
        torch.testing.assert_close(out, torch.cat([part["out"] for part in expected[index]]), rtol=1e-6, atol=1e-6)
    assert all(metric.update_count == 0 for metric in module.modules() if isinstance(metric, MeanMetric))


def draws_of_all_ranks(rank, strategy, num_ranks, num_draws):
    as_rank(rank)
    pairs = st.lists(st.tuples(st.sampled_from(PRIMES), st.integers(1, 40)), min_size=1, max_size=6)

    # The same examples on all ranks; to shrink one would part them.
    @settings(
        max_examples=num_draws,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(pairs, st.sampled_from(["validate", "test", "predict"]))
    def drawn(sizes, stage):
        check(stage, sizes, strategy, num_ranks)

    drawn()
    for stage in ("validate", "test", "predict"):  # and what a draw may leave out
        check(stage, [(1, 3), (97, 7), (num_ranks * 4 + 1, 4), (num_ranks + 1, 1)], strategy, num_ranks)


@pytest.mark.timeout(170)
@pytest.mark.filterwarnings("default")  # torchmetrics and Lightning warn of data as small, and logged, as these
@pytest.mark.parametrize("num_draws", [1, *nightly(3)])
@pytest.mark.parametrize(("strategy", "num_ranks"), MATRIX)
def test_results_and_predictions_are_those_of_one_process(strategy, num_ranks, num_draws):
    run_ranks(draws_of_all_ranks, num_ranks, strategy, num_ranks, num_draws, timeout_s=160, start_method="fork")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_limit_of_whole_batches_is_told_with_what_it_comes_to(num_ranks, tmp_path):
    run = engine(
        strategy="ddp_fork" if num_ranks > 1 else "single",
        devices=num_ranks,
        limit_val_batches=3,
        limit_predict_batches=2,
        limit_test_batches=0.5,
    )
    handler = logging.FileHandler(tmp_path / "told", delay=False)  # of the ranks, too, which are forks
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        for entry in (run.validate, run.predict, run.test):
            entry(Classifier(1), loader(32, 2))
    finally:
        logger.removeHandler(handler)
        handler.close()
    told = (tmp_path / "told").read_text()
    if num_ranks == 1:
        assert "counts batches" not in told
    else:
        assert told.count("limit_val_batches=3 counts batches of each rank: 6 in all") == 1
        assert told.count("limit_predict_batches=2 counts batches of each rank: 4 in all") == 1
        assert "limit_test_batches" not in told
