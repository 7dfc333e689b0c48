"""`on_rank_loss="continue"` where no rank has all state: the result is that of a resumption from a snapshot."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.multiprocessing import ProcessRaisedException

from polyphase.callbacks import Snapshot
from polyphase.models import ByteGPT

from ...pairs import nightly
from ..parity import adamw, largest_difference
from .test_rank_loss_integration import (
    AT,
    BATCH,
    EPOCHS,
    RANKS,
    SIZE,
    Logged,
    Net,
    Outside,
    Several,
    Validated,
    Victim,
    die,
    fit,
    weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:Under .* the ranks have different values of")

STEPS = EPOCHS * -(-SIZE // BATCH)
SAVED = 6
"""The last snapshot before step `AT`, with which the second epoch begins: three steps lie between two of them."""


def snapshots(folder: Path, every: int = 3) -> Snapshot:
    return Snapshot(folder, every_n_steps=every, keep_last=100, in_background=False)


class Told(Callback):
    """Writes down the losses, and each `setup` and `teardown`, of each process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.own = folder, -1

    def _note(self, text: str) -> None:
        with (self.folder / f"told-{self.own}").open("a") as file:
            file.write(f"{text}\n")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.own = trainer.global_rank if self.own < 0 else self.own
        self._note("setup")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._note("teardown")

    def on_rank_loss(self, trainer: Any, pl_module: Any, lost: Any) -> None:
        self._note(re.sub(r" after \d+\.\d\d s", "", str(lost)))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._note(f"exception {exception}")


CASES = [
    ("fsdp_fork", 0, "backward", 0),
    ("fsdp_fork", 1, "forward", 0),
    ("fsdp_fork", 2, "optimizer", 0),
    ("hsdp_fork:shard=1", 1, "backward", 0),
    ("zero1_fork", 0, "optimizer", 0),
    ("zero1_fork", 2, "backward", 2),
]


@pytest.mark.parametrize(("strategy", "victim", "point", "workers"), CASES)
def test_weights_are_those_of_a_resumption_from_the_newest_snapshot(tmp_path, strategy, victim, point, workers):
    killed, resumed, flags = Net(0.3), Net(0.3), {"strategy": strategy, "workers": workers}
    folder = tmp_path / "snapshots"
    callbacks = [Victim(victim, point), snapshots(folder), Told(tmp_path)]
    engine = fit(killed, on_rank_loss="continue", callbacks=callbacks, **flags)
    assert engine.global_step == STEPS
    fit(resumed, devices=RANKS - 1, resume=folder / f"step={SAVED}", **flags)
    assert largest_difference(weights(killed), weights(resumed)) == 0
    assert largest_difference(dict(killed.named_buffers()), dict(resumed.named_buffers())) == 0
    left = [rank for rank in range(RANKS) if rank != victim]
    # Before the optimizer all gradients are averaged, so the others may make that step.
    loss = rf"rank {victim} lost after step {AT if point != 'optimizer' else '[78]'}, 2 left: went on from step {SAVED}"
    for rank in left:
        said = (tmp_path / f"told-{rank}").read_text()
        assert re.fullmatch(rf"setup\nteardown\nsetup\n{loss}\nteardown\n", said), said


FLAGS = [
    {"compression": "topk:0.1"},
    {"nonfinite": "skip"},
    {"strategy": "zero1_fork", "compression": "powersgd:2"},
    *nightly(
        {"compile": True},
        {"micro_batch_size": "auto"},
        {"sync_batchnorm": True},
        {"strategy": "ddp_fork:average_buffers=true"},
        {"strategy": "fsdp_fork", "sync_batchnorm": True},
        {"strategy": "fsdp_fork", "compile": True},
        {"strategy": "hsdp_fork:shard=1", "compression": "topk:0.1"},
    ),
]
"""With these a step can't be made again from its beginning."""


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_a_step_that_can_not_be_made_again_is_one_of_a_resumption(tmp_path, flags):
    killed, resumed = Net(0.3), Net(0.3)
    callbacks = [Victim(1, "backward"), snapshots(tmp_path), Told(tmp_path)]
    fit(killed, on_rank_loss="continue", callbacks=callbacks, **flags)
    fit(resumed, devices=2, resume=tmp_path / f"step={SAVED}", **flags)
    assert largest_difference(weights(killed), weights(resumed)) == 0
    assert largest_difference(dict(killed.named_buffers()), dict(resumed.named_buffers())) == 0
    assert f"rank 1 lost after step {AT}, 2 left: went on from step {SAVED}" in (tmp_path / "told-0").read_text()


def test_and_without_snapshots_it_is_refused_by_the_name_of_the_flag():
    with pytest.raises(ValueError, match=r"compression='topk:0.1' keeps a part of a step.*callbacks=\[Snapshot\(\)\]"):
        fit(Net(), compression="topk:0.1", on_rank_loss="continue")


class Layers(ByteGPT):
    """Layers that can be split in each way."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__(dim=24, num_layers=6, num_heads=6, context_length=8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        numbers, _ = batch
        return super().training_step((50 * numbers.abs()).long() % 256, batch_idx)

    def configure_optimizers(self) -> Any:
        return adamw(self)


@pytest.mark.parametrize("strategy", ["tp_fork", "pp_fork", *nightly("cp_fork")])
def test_where_layers_are_split_fewer_ranks_split_them_anew(tmp_path, strategy):
    callbacks = [Victim(1, "fetch"), snapshots(tmp_path), Told(tmp_path)]
    killed, resumed = Layers(), Layers()
    fit(killed, strategy=strategy, on_rank_loss="continue", callbacks=callbacks)
    fit(resumed, strategy=strategy, devices=2, resume=tmp_path / f"step={SAVED}")
    assert largest_difference(weights(killed), weights(resumed)) == 0
    assert f"rank 1 lost after step {AT}, 2 left: went on from step {SAVED}" in (tmp_path / "told-0").read_text()


GRIDS = [
    "pp+ddp_fork:pipeline_size=2",
    *nightly("fsdp+tp_fork:tp=2", "pp+fsdp_fork:pipeline_size=2", "fsdp+cp_fork:cp=2"),
]


@pytest.mark.parametrize("strategy", GRIDS)
def test_and_a_mesh_of_several_axes_becomes_smaller(tmp_path, strategy):
    callbacks = [Victim(3, "fetch"), snapshots(tmp_path), Told(tmp_path)]
    _goes_on_as_two_of_four(strategy, callbacks, tmp_path, Layers)
    assert f"ranks 2-3 lost after step {AT}, 2 left" in (tmp_path / "told-0").read_text()


class Attributes(Net):
    """Has what a process that resumes makes anew, and what a strategy may lose."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.kept = [self.net[0].weight]
        self.net[0].weight.rate = 0.5
        self.seen = 0
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        self.scale += 1
        return super().training_step(batch, batch_idx) * self.scale

    def on_train_start(self) -> None:
        assert self.seen == 0
        assert self.scale == 1
        assert self.kept[0] is self.net[0].weight
        assert self.kept[0].rate == 0.5


@pytest.mark.parametrize("strategy", ["fsdp_fork", "zero1_fork"])
def test_the_module_is_that_of_a_process_that_has_just_built_it(tmp_path, strategy):
    killed, resumed = Attributes(0.3), Attributes(0.3)
    callbacks = [Victim(1, "backward"), snapshots(tmp_path)]
    fit(killed, strategy=strategy, on_rank_loss="continue", callbacks=callbacks)
    fit(resumed, strategy=strategy, devices=2, resume=tmp_path / f"step={SAVED}")
    assert largest_difference(weights(killed), weights(resumed)) == 0


OUTSIDE = [(1, "validation"), (2, "epoch end"), (0, "epoch start"), (0, "save")]


@pytest.mark.parametrize(("victim", "point"), OUTSIDE)
def test_a_loss_outside_of_a_step_is_returned_from_as_well(tmp_path, victim, point):
    killed, resumed = Validated(0.3), Validated(0.3)
    place = Outside(victim, point)
    place.on_train_end = lambda *_: None
    flags = {"strategy": "fsdp_fork", "limit_val_batches": 4}
    engine = fit(killed, on_rank_loss="continue", callbacks=[place, snapshots(tmp_path, 4)], **flags)
    assert engine.global_step == STEPS
    # The second epoch begins with step 6 and ends with step 12, in whose save the rank is killed that is in one.
    newest = {"epoch start": 4, "save": 4, "validation": 8, "epoch end": 12}[point]
    fit(resumed, devices=2, resume=tmp_path / f"step={newest}", **flags)
    assert largest_difference(weights(killed), weights(resumed)) == 0


@pytest.mark.parametrize("strategy", ["fsdp_fork", "zero1_fork"])
def test_one_rank_can_be_left(tmp_path, strategy):
    callbacks = [Several(), snapshots(tmp_path, 1)]
    engine = fit(Net(), strategy=strategy, on_rank_loss="continue", callbacks=callbacks)
    assert engine.global_step == STEPS


class Again(Victim):
    """Another rank is killed while the run begins again."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.world_size == RANKS and trainer.global_rank == 0:
            die()


def test_a_loss_while_the_others_return_is_one_more(tmp_path):
    callbacks = [Again(1, "backward"), Victim(3, "forward"), snapshots(tmp_path)]
    _goes_on_as_two_of_four("fsdp_fork", callbacks, tmp_path)


def _goes_on_as_two_of_four(strategy: str, callbacks: list[Any], folder: Any, kind: Any = Net) -> None:
    killed, resumed = kind(0.3), kind(0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Victim, "_is_due", _is_last_of_four)
        engine = fit(killed, devices=4, strategy=strategy, on_rank_loss="continue", callbacks=callbacks)
    assert engine.global_step == STEPS
    fit(resumed, devices=2, strategy=strategy, resume=folder / f"step={SAVED}")
    assert largest_difference(weights(killed), weights(resumed)) == 0


def _is_last_of_four(victim: Victim, trainer: Any) -> bool:
    return trainer.world_size == 4 and trainer.global_rank == 3 == victim.rank and trainer.global_step == AT


def test_a_group_of_hsdp_without_all_its_shards_leaves(tmp_path):
    callbacks = [Victim(3, "forward"), snapshots(tmp_path), Told(tmp_path)]
    _goes_on_as_two_of_four("hsdp_fork:shard=2", callbacks, tmp_path)
    assert f"ranks 2-3 lost after step {AT}, 2 left" in (tmp_path / "told-0").read_text()


def test_too_few_ranks_for_the_mesh_end_the_run_by_name(tmp_path):
    callbacks = [Victim(2, "forward"), snapshots(tmp_path)]
    with pytest.raises(ProcessRaisedException, match=r"the 2 left are too few for the mesh .*resume='auto'"):
        fit(Net(), strategy="hsdp_fork:shard=3", on_rank_loss="continue", callbacks=callbacks)


def test_logs_are_continued_from_the_snapshot(tmp_path):
    logger = CSVLogger(tmp_path, version="log", flush_logs_every_n_steps=1)
    callbacks = [Victim(0, "backward"), snapshots(tmp_path / "snapshots")]
    flags = {"strategy": "fsdp_fork", "logger": logger, "log_every_n_steps": 1}
    fit(Logged(), on_rank_loss="continue", callbacks=callbacks, **flags)
    rows = csv.DictReader((tmp_path / "lightning_logs" / "log" / "metrics.csv").read_text().splitlines())
    assert [int(row["step"]) for row in rows if row["last"]] == list(range(STEPS))


def test_a_loss_before_the_first_snapshot_ends_the_run_by_name(tmp_path):
    callbacks = [Victim(1, "forward"), snapshots(tmp_path, 100)]
    with pytest.raises(ProcessRaisedException, match="rank 1 lost before the first snapshot"):
        fit(Net(), strategy="fsdp_fork", on_rank_loss="continue", callbacks=callbacks)


def test_a_run_without_snapshots_is_refused():
    with pytest.raises(ValueError, match=r"(?s)under strategy 'fsdp_fork' no other rank.*callbacks=\[Snapshot\(\)\]"):
        fit(Net(), strategy="fsdp_fork", on_rank_loss="continue")
