"""One rank of two is killed before the first step, or after the last one: how the others end, and after how long.

    python -m tests.chaos.early --strategy ddp fsdp pp --launcher plain hand --only setup

The ranks are started as those of `hooks` are. Each that is left has to end by itself, with an exit code that is not 0
and a message that names the one that is missing.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.hooks import AFTER, Ending, ending

__all__ = ["MOMENTS", "early_ending", "is_named"]

MOMENTS = (
    "import",
    "before the store",
    "before registration",
    "after registration",
    "setup",
    "configure_optimizers",
    "sanity check",
    "first save",
    "on_fit_end",
    AFTER,
)
HANG_TIMEOUT_S = 20.0


def early_ending(moment: str, launcher: str, strategy: str, victim: int, *, folder: Path) -> Ending:
    """Runs the job, in a folder of its own; the code of the rank that is killed is -9, if it was started here."""
    return ending(moment, launcher, strategy, str(victim), folder=folder, script=__file__)


def is_named(victim: int, output: str) -> bool:
    """Whether the others have said which rank is missing."""
    return any(f"{word} {victim}" in output for word in ("rank", "ranks"))


def _job(moment: str, strategy: str, victim: str) -> None:
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    Path(f"{os.getpid()}.pid").touch()

    def die(where: str) -> None:
        if rank == victim and where == moment:
            Path("raised").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    die("import")
    import torch
    from torch import nn

    from polyphase.engine.strategies import layout
    from tests.engine.tiny import QUIET, Engine, Regression, rows

    def at(where: str, called: Callable[..., Any], then: str | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            die(where)
            value = called(*args, **kwargs)
            die(then or "")
            return value

        return call

    layout.open_store = at("before the store", layout.open_store)
    layout.connect = at("before registration", layout.connect, "after registration")

    class Blocks(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self.net(batch) - batch).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            die("sanity check")
            self.log("loss", self.training_step(batch, batch_idx), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    hooks = {name: name for name in ("setup", "configure_optimizers", "on_fit_end")} | {
        "on_save_checkpoint": "first save"
    }
    for name, where in hooks.items():
        setattr(Blocks, name, at(where, getattr(Blocks, name)))
    flags = {**QUIET, "enable_checkpointing": True, "num_sanity_val_steps": 1, "max_epochs": 1, "devices": 2}
    engine = Engine(**flags, strategy=strategy, hang_timeout_s=HANG_TIMEOUT_S, default_root_dir=".")
    engine.fit(Blocks(), rows(), rows())
    die(AFTER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MOMENTS), choices=list(MOMENTS), metavar="MOMENT")
    parser.add_argument("--launcher", nargs="+", default=["plain", "hand"], choices=["plain", "hand"])
    parser.add_argument("--strategy", nargs="+", default=["ddp", "fsdp", "pp"])
    parser.add_argument("--victim", nargs="+", type=int, default=[1], choices=[0, 1])
    parser.add_argument("--outputs", type=Path, help="folder for what each job has printed")
    options = parser.parse_args()
    print(
        "| moment | strategy | launcher | killed | exit codes | seconds | named | left running |\n" + "| --- " * 8 + "|"
    )
    for moment in options.only:
        for strategy in options.strategy:
            for launcher in options.launcher:
                for victim in options.victim:
                    with tempfile.TemporaryDirectory() as folder:
                        end = early_ending(moment, launcher, strategy, victim, folder=Path(folder))
                    named = "yes" if is_named(victim, end.output) else "no"
                    cells = [moment, strategy, launcher, victim, end.codes, f"{end.seconds:.1f}", named, end.num_left]
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                    if options.outputs:
                        name = "-".join(map(str, cells[:4])).replace(" ", "_")
                        (options.outputs / f"{name}.txt").write_text(end.output)


if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):
        _job(*sys.argv[1:])
    else:
        main()
