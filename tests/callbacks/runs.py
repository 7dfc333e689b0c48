"""What the tests of callbacks share: a tiny module, its data, quiet trainers, and a count of collectives."""

import atexit
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import DataLoader, IterableDataset

NUM_FEATURES = 4


class TinyModule(LightningModule):
    """Logs under names that a search for "val" would mix up."""

    def __init__(self, sync_dist: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(NUM_FEATURES, 1)
        self.sync_dist = sync_dist

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch["x"]).pow(2).mean()
        self.log("train/value_loss", loss, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.tensor(2.0), batch_size=1, sync_dist=self.sync_dist)
        self.log("accuracy", torch.tensor(0.5), batch_size=1, sync_dist=self.sync_dist)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", torch.tensor(3.0), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stream(IterableDataset):
    """Batches without a length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def batches(*sizes: int, **fields: Any) -> list[dict[str, Any]]:
    """One batch of each size."""
    return [{"x": torch.ones(size, NUM_FEATURES), **fields} for size in sizes]


def loader(list_of_batches) -> DataLoader:
    return DataLoader(list_of_batches, batch_size=None)


class MemoryLogger(Logger):
    """Keeps what it is given."""

    name = "memory"
    version = 0

    def __init__(self):
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass

    def of(self, prefix: str) -> list[tuple[int, dict[str, float]]]:
        """The rows of one monitor."""
        return [(step, row) for step, row in self.rows if any(name.startswith(prefix) for name in row)]


class EndGroupAtExit(Callback):
    """Ends the process group before a rank exits, as the engine's strategies do.

    Lightning does so for NCCL only; about one in ten of these spawned runs then ended in gloo's SIGABRT ("terminate
    called without an active exception").
    """

    def setup(self, trainer, pl_module, stage):
        if trainer.world_size > 1:
            atexit.register(dist.destroy_process_group)


QUIET = {
    "accelerator": "cpu",
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "use_distributed_sampler": False,
}


def quiet_trainer(*callbacks: Callback, **flags: Any) -> Trainer:
    """A trainer without what these tests don't look at."""
    defaults = {**QUIET, "devices": 1, "logger": False, "enable_progress_bar": False, "max_epochs": 1}
    return Trainer(**{**defaults, **flags}, callbacks=[EndGroupAtExit(), *callbacks])


class CollectivesBefore(Callback):
    """Begins to count; `CollectivesAfter` ends it: what is between the two in the trainer's list is counted."""

    def __init__(self):
        self.open = ExitStack()

    def on_train_batch_start(self, *args):
        self.mode = self.open.enter_context(CommDebugMode())

    on_train_batch_end = on_train_batch_start


class CollectivesAfter(Callback):
    """The number of collectives by optimizer step; both hooks of all its micro-batches are added up."""

    def __init__(self, before: CollectivesBefore):
        self.before = before
        self.by_step: dict[int, int] = {}
        self.all_reduces = 0

    def on_train_batch_start(self, trainer, *args):
        self.before.open.close()
        counts = {str(op): n for op, n in self.before.mode.get_comm_counts().items()}
        self.all_reduces += sum(n for op, n in counts.items() if "allreduce" in op)
        self.by_step[trainer.global_step] = self.by_step.get(trainer.global_step, 0) + sum(counts.values())

    on_train_batch_end = on_train_batch_start


class Report(Callback):
    """Writes what each rank saw to ``rank<r>.json``."""

    def __init__(self, folder: Path, monitors: list[Any], after: CollectivesAfter):
        self.folder, self.monitors, self.after = folder, monitors, after

    def on_train_end(self, trainer, pl_module):
        seen = {
            "last": {name: value for monitor in self.monitors for name, value in monitor.last.items()},
            "collectives": self.after.by_step,
            "all_reduces": self.after.all_reduces,
            "rows": [row for row in trainer.loggers[0].rows if "epoch" not in row[1]] if trainer.loggers else [],
        }
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
