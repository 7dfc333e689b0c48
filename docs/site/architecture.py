"""Pictures of the rooms of the package, and of the way of a batch, a gradient and a checkpoint through their files."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from .drawing import Drawing

ROOT = Path(__file__).parents[2]
WIDTH, NARROW, MARGIN = 600, 440, 12

Stop = tuple[str, str, str]
"""What happens, a line more about it, and the file."""

BATCH: Sequence[Stop] = (
    (
        "The order of the epoch is drawn",
        "as one process draws it, then dealt to the ranks, one position each in turn",
        "engine/data/global_order.py",
    ),
    (
        "The DataLoader reads this rank's part",
        "workers and their random states included",
        "engine/loop/data_connector.py",
    ),
    ("The loop fetches a batch", "the loop of an epoch: fetch, step, log, validate", "engine/loop/training.py"),
    ("It is copied to the device", "while the batch before is computed", "engine/loop/hooks.py"),
    (
        "training_step computes the loss",
        "forward; the hooks that are overridden, and no others",
        "engine/loop/optimization.py",
    ),
    (
        "The loss gets its weight",
        "by the samples (or tokens) of this micro-batch, of all in the step",
        "engine/loop/loss_weighting.py",
    ),
    ("self.log keeps tensors", "they become numbers when somebody reads them", "engine/loop/log.py"),
    ("The step ends", "signals, snapshots and validation come between two steps", "engine/loop/training.py"),
)
GRADIENT: Sequence[Stop] = (
    (
        "backward makes it",
        "on inner micro-batches of an accumulated step nothing is sent",
        "engine/loop/optimization.py",
    ),
    ("It joins its bucket, or its unit", "ddp: buckets of 25 MiB; fsdp: repeated blocks", "engine/strategies/ddp.py"),
    (
        "The comm hook compresses it",
        "adds what was not sent before, keeps what is not sent now",
        "engine/compression/base.py",
    ),
    (
        "A collective averages it over the ranks",
        "during backward; the wire counts the bytes of each comm hook",
        "engine/compression/counting_group.py",
    ),
    ("The norm is taken over all shards", "and the gradients are clipped by it", "engine/precision/clipping.py"),
    (
        "Not finite? The rank is named",
        "all values of a logging interval are read at once",
        "engine/reliability/nonfinite.py",
    ),
    (
        "The optimizer steps",
        "whole tensors, shards (DTensors), or this rank's parameters",
        "engine/strategies/whole_steps.py",
    ),
    ("The first two steps are checked", "between ranks, and against one process", "engine/loop/first_steps.py"),
)
CHECKPOINT: Sequence[Stop] = (
    ("Somebody asks for it", "Snapshot, ModelCheckpoint, save_checkpoint, SIGTERM", "callbacks/snapshot.py"),
    (
        "The state is collected",
        "weights, optimizer, loops; of each rank: random state, position in the data",
        "engine/resume/run_state.py",
    ),
    ("Tensors are copied to host memory", "a step waits only for this copy", "engine/checkpoint/staging.py"),
    ("Each rank writes its shards", "in a directory beside the final name", "engine/checkpoint/dcp_storage.py"),
    (
        "Rank 0 writes the manifest and renames",
        "sizes and checksums of all files; then the link `last`",
        "engine/checkpoint/publish.py",
    ),
    ("A run resumes: all files are checked", "each rank reads its share of them", "engine/checkpoint/opening.py"),
    (
        "The state is restored",
        "under any layout: by the names of the parameters",
        "engine/resume/checkpoint_connector.py",
    ),
    ("The data goes on at the next sample", "any number of ranks, any batch size", "engine/resume/data_position.py"),
)
WAYS = {"batch": BATCH, "gradient": GRADIENT, "checkpoint": CHECKPOINT}

ROOMS = (
    ("doctor/", "why a run is slow", 0, 0),
    ("callbacks/", "snapshots, monitors", 1, 0),
    ("models/", "to start from", 2, 0),
    ("engine/cli/", "the command", 3, 0),
    ("engine/engine.py", "Engine: flags become parts", 0, 1),
    ("engine/loop/", "fit, evaluate, log", 1, 1),
    ("engine/resume/", "loops, place in the data", 2, 1),
    ("engine/strategies/", "what is split, what is sent", 0, 2),
    ("engine/launch/", "starts the processes", 1, 2),
    ("engine/loggers/", "one curve a run", 2, 2),
    ("engine/data/", "order, shards, uneven ranks", 0, 3),
    ("engine/checkpoint/", "files, whole or not there", 1, 3),
    ("engine/compression/", "comm hooks, traffic", 2, 3),
    ("engine/reliability/", "watchdog, failure reports", 0, 4),
    ("engine/precision/", "mixed and true precision", 1, 4),
    ("engine/distributed/", "groups, the job's store", 2, 4),
    ("Lightning: Trainer, LightningModule, callbacks", "", 0, 5),
    ("torch.distributed: DDP, FSDP2, DTensor, pipelining, checkpoint", "", 0, 6),
)


def draw_way(name: str) -> Drawing:
    """The stops of one way, from top to bottom, each with its file.

    Raises:
        FileNotFoundError: a stop names a file that there is not.
    """
    drawing = Drawing(f"The way of a {name}", NARROW)
    y = float(MARGIN)
    for number, (what, more, file) in enumerate(WAYS[name]):
        if not (ROOT / file).exists():
            raise FileNotFoundError(f"{file}, a stop of the way of a {name}")
        lines = textwrap.wrap(more, 58)
        height = 52 + 17 * len(lines)
        drawing.box(MARGIN, y, NARROW - 2 * MARGIN, height, "card")
        drawing.text(MARGIN + 14, y + 22, f"{number + 1}. {what}", "bold")
        drawing.lines(MARGIN + 14, y + 41, lines, "soft")
        drawing.text(MARGIN + 14, y + height - 13, file, "code")
        y += height
        if number < len(WAYS[name]) - 1:
            drawing.arrow([(MARGIN + 30, y), (MARGIN + 30, y + 18)])
            y += 18
    return drawing


def draw_rooms() -> Drawing:
    """The folders of the package: what stands above imports what stands below."""
    drawing = Drawing("The rooms of the package", WIDTH, wide=True)
    for name, note, column, row in ROOMS:
        num_columns = sum(other == row for *_, other in ROOMS)
        width = (WIDTH - 2 * MARGIN - (num_columns - 1) * 14) / num_columns
        if "engine/" in name and not (ROOT / name).exists():
            raise FileNotFoundError(name)
        y = MARGIN + row * 76 - (26 if row == 6 else 0)
        if row >= 5:
            drawing.box(MARGIN, y, WIDTH - 2 * MARGIN, 36, "mark")
            drawing.text(WIDTH / 2, y + 23, name, "", "middle")
            continue
        x = MARGIN + column * (width + 14)
        drawing.box(x, y, width, 52, "card")
        drawing.text(x + 10, y + 21, name, "code bold")
        drawing.text(x + 10, y + 40, note, "soft")
        drawing.arrow([(x + width / 2, y + 52), (x + width / 2, y + 76)])
    return drawing
