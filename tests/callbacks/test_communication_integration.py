"""`CommunicationMonitor` under every strategy, and against the counters of a network interface."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.multiprocessing.spawn import ProcessRaisedException

from polyphase.callbacks import CommunicationMonitor
from polyphase.engine import Engine
from tests.callbacks import traffic_job
from tests.callbacks.runs import CollectivesAfter, CollectivesBefore, MemoryLogger
from tests.chaos.hosts import Namespaces, enter
from tests.distributed import run_ranks
from tests.engine.compression.test_runs_integration import Two, rows
from tests.engine.tiny import QUIET, Regression
from tests.engine.tiny import rows as few_rows
from tests.pairs import nightly

NUM_PARAMETERS = sum(p.numel() for p in Two().parameters())
TIMES = {"communication/time_ms", "communication/bandwidth_mb_per_s"}
SYNC = {"communication/sync_latency_ms", "communication/exposed_share"}


class Writes(Callback):
    """Writes the monitor's last figures, and what the logger got, for each rank."""

    def __init__(self, monitor: CommunicationMonitor, folder: Path) -> None:
        self.monitor, self.folder = monitor, folder

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        logged = trainer.loggers[0].rows if trainer.loggers else []
        (self.folder / str(trainer.global_rank)).write_text(json.dumps([self.monitor.last, logged]))


def run(folder: Path, strategy: str, devices: int, **flags: Any) -> tuple[dict[str, float], list[Any]]:
    monitor = CommunicationMonitor(every_n_steps=4)
    flags = {**QUIET, "strategy": strategy, "devices": devices, "max_steps": 8, "logger": MemoryLogger(), **flags}
    Engine(**{**flags, "callbacks": [monitor, Writes(monitor, folder)]}).fit(Two(), rows(devices))
    last, logged = json.loads((folder / "0").read_text())
    for rank in range(1, devices):
        assert json.loads((folder / str(rank)).read_text())[0].keys() == last.keys()
    return last, [row for row in logged if "communication/sent_mb" in row[1]]


@pytest.mark.parametrize(
    ("strategy", "devices", "compression", "sent", "ratio"),
    [
        ("ddp_fork", 2, "none", {"all_reduce": 4 * NUM_PARAMETERS}, 1),
        *nightly(("ddp_fork", 4, "none", {"all_reduce": 1.5 * 4 * NUM_PARAMETERS}, 1)),
        ("ddp_fork", 2, "bf16", {"all_reduce": 2 * NUM_PARAMETERS}, 2),
        # A quarter of the weights with their places, and all biases without.
        ("ddp_fork", 2, "topk:0.25", {"all_gather": 8 * (NUM_PARAMETERS - 40) / 4 + 4 * 40}, 808 / (768 / 2 + 40)),
        # FSDP2's all-gather in forward and none in backward, as the whole module is one unit here; its reduce-scatter,
        # which gloo does by an all-reduce.
        ("fsdp_fork", 2, "none", {"all_gather": 2 * NUM_PARAMETERS, "reduce_scatter": 4 * NUM_PARAMETERS}, None),
        ("fsdp_fork", 2, "bf16", {"all_gather": 2 * NUM_PARAMETERS, "reduce_scatter": 2 * NUM_PARAMETERS}, 2),
        *nightly((
            "hsdp_fork:replicate=2", 4, "none",
            {"all_gather": 2 * NUM_PARAMETERS, "reduce_scatter": 4 * NUM_PARAMETERS, "all_reduce": 2 * NUM_PARAMETERS},
            1,
        )),
        (
            "hsdp_fork:replicate=2", 4, "bf16",
            {"all_gather": 2 * NUM_PARAMETERS, "reduce_scatter": 4 * NUM_PARAMETERS, "all_reduce": NUM_PARAMETERS}, 2,
        ),
    ],
)  # fmt: skip
def test_bytes_by_collective(tmp_path, strategy, devices, compression, sent, ratio):
    last, logged = run(tmp_path, strategy, devices, compression=compression)
    assert last["communication/sent_mb"] == pytest.approx(sum(sent.values()) / 1e6)
    for collective, num_bytes in sent.items():
        assert last[f"communication/sent_mb/{collective}"] == pytest.approx(num_bytes / 1e6), collective
    assert last["communication/sent_mb/bucket_0"] == last["communication/sent_mb"]
    assert last.get("communication/compression_ratio") == (None if ratio is None else pytest.approx(ratio))
    assert last.keys() >= TIMES
    assert (last.keys() >= SYNC) == (not strategy.startswith("fsdp"))
    assert all(value > 0 for value in last.values())
    assert 0 <= last.get("communication/exposed_share", 0) <= 1
    assert [step for step, _ in logged] == [3, 7]


def test_the_monitor_changes_nothing_that_is_computed(tmp_path):
    for strategy in ("ddp_fork", "hsdp_fork:replicate=2"):
        seen, unseen = Two(), Two()
        flags = {**QUIET, "strategy": strategy, "devices": 2, "max_steps": 6}
        Engine(**flags, callbacks=[CommunicationMonitor(2)]).fit(seen, rows(2))
        Engine(**flags).fit(unseen, rows(2))
        for name, value in unseen.state_dict().items():
            torch.testing.assert_close(seen.state_dict()[name], value, atol=1e-6, rtol=0)


def test_the_monitor_itself_sends_nothing(tmp_path):
    before = CollectivesBefore()
    after = CollectivesAfter(before)
    monitor = CommunicationMonitor(every_n_steps=1)

    class Ends(Callback):
        def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
            (tmp_path / "counts").write_text(json.dumps([sum(after.by_step.values()), len(monitor.last)]))

    engine = Engine(**QUIET, strategy="ddp_fork", devices=2, max_steps=3, callbacks=[before, monitor, after, Ends()])
    engine.fit(Two(), rows(2))
    collectives, figures = json.loads((tmp_path / "counts").read_text())
    assert collectives == 0
    assert figures > 4


def test_accumulation_is_one_step(tmp_path):
    last, _ = run(tmp_path, "ddp_fork", 2, accumulate_grad_batches=2, max_steps=4)
    assert last["communication/sent_mb"] == pytest.approx(4 * NUM_PARAMETERS / 1e6)


def test_one_process_sends_nothing():
    monitor = CommunicationMonitor(every_n_steps=1)
    Engine(**QUIET, devices=1, max_steps=2, callbacks=[monitor]).fit(Regression(), few_rows())
    assert monitor.last["communication/sent_mb"] == 0


@pytest.mark.parametrize(
    ("made_by", "strategy", "message"),
    [
        (Engine, "ps_fork", "what strategy 'ps_fork' sends, since it pushes and pulls by remote calls: choose 'ddp'"),
        (Trainer, "ddp_fork", "what strategy 'DDPStrategy' sends, since it is not the engine's own"),
    ],
)
def test_what_can_not_be_counted_is_refused(made_by, strategy, message):
    trainer = made_by(**QUIET, strategy=strategy, devices=2, max_steps=1, callbacks=[CommunicationMonitor()])
    with pytest.raises(ProcessRaisedException, match=message):
        trainer.fit(Regression(), few_rows())


# --- where the bytes leave


def _sends(rank: int, wire: Namespaces, compression: str, folder: Path) -> None:
    enter(wire.names[rank])
    ranks = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": wire.addresses[0], "MASTER_PORT": "29555"}
    os.environ.update(ranks, GLOO_SOCKET_IFNAME=wire.interfaces[rank])
    traffic_job.main(compression, folder, wire.interfaces[rank])


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="only root can make network namespaces")
@pytest.mark.parametrize("compression", ["int8", *nightly("none", "topk:0.1")])
def test_the_interface_has_sent_as_much(compression, tmp_path):
    """Of two ranks in two namespaces; the interface's own counter is read at two steps, headers and all."""
    with Namespaces() as wire:
        run_ranks(_sends, 2, wire, compression, tmp_path, start_method="fork", connects=False)
    for rank in range(2):
        counted, seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert counted > 5e6
        # Headers of TCP, IP and Ethernet add to what is sent.
        assert seen == pytest.approx(counted, rel=0.05), (rank, seen / counted)
