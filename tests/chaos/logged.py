"""A run that is stopped again and again, and what its loggers have of it: one curve, each point once.

    python -m tests.chaos.logged --stops 20

With four loggers: every second stop is SIGTERM, the others are SIGKILL, at optimizer steps and in hooks drawn at
random; the same command then goes on. The points are compared with those of a run that nobody stopped, values to the
bit.
"""

import argparse
import csv
import json
import os
import random
import signal
import struct
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import wandb
from lightning.pytorch import Callback, LightningModule, seed_everything
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine

LOGGERS = ("csv", "mlflow", "tensorboard", "wandb")
STEPS_OF_EPOCH = 12
NUM_STEPS = 6 * STEPS_OF_EPOCH
WHOLE = {"max_steps": NUM_STEPS}
"""Flags of a start that comes to the end."""
Point = tuple[str, int, float]


class Stop(NamedTuple):
    """How a start ends."""

    step: int
    hook: str
    signal: int


def draw_stops(number: int, seed: int = 0) -> list[Stop]:
    """That many stops, at random places in the order of the steps; the last epoch is left for the last start."""
    draw = random.Random(seed)
    # So that each hook still comes, once a step is done.
    steps = sorted(draw.choices(range(1, NUM_STEPS - STEPS_OF_EPOCH), k=number))
    hooks = ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end", "on_train_epoch_end")
    signals = (signal.SIGTERM, signal.SIGKILL)
    return [Stop(step, draw.choice(hooks), signals[i % 2]) for i, step in enumerate(steps)]


class Curves(LightningModule):
    """Logs in steps, at the ends of epochs, and in validation.

    Args:
        logs_means: over each epoch as well, which a start in mid-epoch takes over the rest of it.
    """

    def __init__(self, logs_means: bool) -> None:
        super().__init__()
        self.logs_means = logs_means
        self.save_hyperparameters({"width": 8})
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        if self.logs_means:
            self.log("mean_loss", loss.detach(), on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("end", float(self.current_epoch))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Stopped(Callback):
    """Sends this process a signal in a hook, at a step or as soon after it as the hook is called."""

    def __init__(self, stop: Stop) -> None:
        def kill(trainer: Any, *_: Any, **__: Any) -> None:
            if trainer.global_step >= stop.step and not trainer.sanity_checking:
                os.kill(os.getpid(), stop.signal)

        setattr(self, stop.hook, kill)


def make_logger(name: str, folder: Path) -> Logger:
    """The logger of that name, as a script makes it: it knows of no earlier start."""
    if name == "csv":
        return CSVLogger(folder / "csv")
    if name == "tensorboard":
        return TensorBoardLogger(folder / "tensorboard")
    if name == "wandb":
        return WandbLogger(save_dir=folder, offline=True, project="curves")
    return MLFlowLogger("curves", tracking_uri=f"file:{folder}/mlruns")


def train(folder: Path, start: Stop | dict[str, Any]) -> None:
    """One start of the job, which a signal or a flag of the engine's ends."""
    seed_everything(3)
    data = torch.randn(2 * STEPS_OF_EPOCH, 4, generator=torch.Generator().manual_seed(1))
    stops = [Stopped(start)] if isinstance(start, Stop) else []
    flags = {"max_steps": NUM_STEPS} if isinstance(start, Stop) else start
    Engine(
        accelerator="cpu",
        devices=1,
        logger=[make_logger(name, folder) for name in LOGGERS],
        log_every_n_steps=1,
        **flags,
        val_check_interval=0.5,
        default_root_dir=folder,
        resume="auto",
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Snapshot(every_n_steps=3), *stops],
    ).fit(Curves("max_epochs" in flags), DataLoader(data, batch_size=2, shuffle=True), DataLoader(data, batch_size=12))  # type: ignore[arg-type]


def run(folder: Path, starts: Sequence[Stop | dict[str, Any]]) -> list[int]:
    """All starts of a job, one after the other, each in a process of its own; returns how they have ended."""
    os.environ.update(WANDB_SILENT="true", MLFLOW_ALLOW_FILE_STORE="true")
    folder.mkdir(exist_ok=True)
    endings = []
    for start in starts:
        child = os.fork()  # with all modules imported
        if child == 0:
            code = 1
            try:
                warnings.filterwarnings("ignore")
                train(folder, start)
                code = 0
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                wandb.finish(exit_code=code)  # what it does at the end of a process, which is none here
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        endings.append(os.waitstatus_to_exitcode(status))
    return endings


# --- what the loggers have


def points(name: str, folder: Path) -> list[Point]:
    """All points of all curves: metric, step, value."""
    return {"csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}[name](folder)


def num_runs(name: str, folder: Path) -> int:
    """Number of versions, or runs, that the logger's program shows."""
    if name in ("csv", "tensorboard"):
        return len(list((folder / name / "lightning_logs").iterdir()))
    if name == "wandb":
        return len({path.name.rsplit("-", 1)[-1] for path in folder.glob("wandb/offline-run-*")})
    return len(list(folder.glob("mlruns/*/*/meta.yaml")))


def _csv(folder: Path) -> list[Point]:
    found: list[Point] = []
    for path in folder.glob("csv/lightning_logs/*/metrics.csv"):
        with path.open(newline="") as stream:
            for row in csv.DictReader(stream):
                step = int(row.pop("step"))
                found += [(metric, step, float(value)) for metric, value in row.items() if value]
    return found


def _tensorboard(folder: Path) -> list[Point]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: list[Point] = []
    for path in (folder / "tensorboard" / "lightning_logs").iterdir():
        events = EventAccumulator(str(path), size_guidance={"scalars": 0})
        events.Reload()
        for metric in events.Tags()["scalars"]:
            if metric != "hp_metric":  # once for each start, with the hyperparameters
                found += [(metric, event.step, event.value) for event in events.Scalars(metric)]
    return found


def _mlflow(folder: Path) -> list[Point]:
    found: list[Point] = []
    for path in folder.glob("mlruns/*/*/metrics/*"):
        for line in path.read_text().splitlines():
            _, value, step = line.split()
            found.append((path.name, int(step), float(value)))
    return found


def _wandb(folder: Path) -> list[Point]:
    """Of the rows with the same number, which W&B takes for one, that of the newest start."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        of_start: dict[int, dict[str, Any]] = {}
        for content in _records(path.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("history"):
                row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
                of_start.setdefault(record.history.step.num, {}).update(row)
        rows |= of_start
    found: list[Point] = []
    for row in rows.values():
        if "trainer/global_step" not in row:  # it says when it was written, and no more
            continue
        step = row["trainer/global_step"]
        found += [(key, step, value) for key, value in row.items() if key[0] != "_" and key != "trainer/global_step"]
    return found


def _records(content: bytes) -> list[bytes]:
    """The records of a file of W&B's: LevelDB's log format, after a header of seven bytes."""
    found, part, at = [], b"", 7
    while at + 7 <= len(content):
        if (left := -at % 32768) < 7 and left:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        at += 7
        part += content[at : at + size]
        if kind in (1, 4):  # a whole one, or the last of its parts
            found.append(part)
            part = b""
        at += size
    return found


class Outcome(NamedTuple):
    """What became of a run that was stopped, beside one that was not."""

    num_starts: int
    num_runs: int
    num_points: int
    missing: int
    repeated: int
    different: int

    @property
    def is_one_curve(self) -> bool:
        """Whether nothing shows that the run was stopped."""
        return self[1] == 1 and self.num_points > 0 and not any(self[3:])

    def __str__(self) -> str:
        return (
            f"{self.num_starts} starts, {self.num_runs} run(s), {self.num_points} points: {self.missing} missing,"
            f" {self.repeated} repeated, {self.different} with another value"
        )


def judge(name: str, folder: Path, calm: Path, num_starts: int) -> Outcome:
    """Compares the curves of two jobs."""
    found, expected = Counter(points(name, folder)), Counter(points(name, calm))
    places, expected_places = (_places(curves) for curves in (found, expected))
    return Outcome(
        num_starts,
        num_runs(name, folder),
        found.total(),
        missing=(expected_places - places).total(),
        repeated=(places - expected_places).total(),
        different=len(found.keys() - expected.keys()),
    )


def _places(curves: Counter[Point]) -> Counter[tuple[str, int]]:
    """How often each metric has a point at each step; Lightning logs the epoch with each row."""
    places: Counter[tuple[str, int]] = Counter()
    for (metric, step, _), number in curves.items():
        places[metric, step] += number
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, calm = Path(temporary) / "stopped", Path(temporary) / "calm"
        run(calm, [WHOLE])
        endings = run(folder, [*draw_stops(options.stops, options.seed), WHOLE])
        outcomes = {name: judge(name, folder, calm, len(endings)) for name in LOGGERS}
    for name, outcome in outcomes.items():
        print(f"{name}: {outcome}; ended by {dict(Counter(endings))}", flush=True)
    sys.exit(not all(outcome.is_one_curve for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
