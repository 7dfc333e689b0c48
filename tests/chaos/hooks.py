"""One rank of two raises an exception in a hook: how each rank ends, and after how many seconds.

    python -m tests.chaos.hooks --launcher plain hand --only training_step teardown

The ranks are started by the engine ("plain"), or one by one with torchrun's variables ("hand"), so that nobody else
ends them. Each has to end by itself with an exit code that is not 0, after one message about the exception.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tests import warm
from tests.distributed import ROOT, free_port, warmed

__all__ = ["AFTER", "BEFORE", "HOOKS", "Ending", "ending"]

BEFORE, AFTER = "before fit", "after fit"
CALLED_ON_RANK_0 = ("prepare_data",)
HOOKS = (
    BEFORE,
    "configure_callbacks",
    "prepare_data",
    "setup",
    "configure_model",
    "configure_optimizers",
    "train_dataloader",
    "val_dataloader",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "training_step",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "on_before_zero_grad",
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "validation_step",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
    "teardown",
    AFTER,
)
"""The hooks of a module, in about the order in which they are called, and what is around `fit`."""
MESSAGE = "this rank has had enough"
LIMIT_S = 180.0


class Ending(NamedTuple):
    """How the ranks have ended."""

    codes: list[int]
    """Exit codes of the processes that were started: rank 0's, or all ranks'; -9 if one had to be killed."""
    seconds: float
    """From the exception to the end of all."""
    num_messages: int
    """How often the exception was printed."""
    num_left: int
    """Processes that were there when those had ended."""
    output: str


def ending(hook: str, launcher: str, strategy: str = "ddp", *more: str, folder: Path, script: str = __file__) -> Ending:
    """Runs the job, in a folder of its own; `more` are words for another `script`."""
    words = warmed([sys.executable, script, hook, strategy, *more])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    meeting = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"] if launcher == "hand" else [{}]
    with ExitStack() as stack, (folder / "log.txt").open("w") as log:
        started = [
            subprocess.Popen(
                words, cwd=folder, env={**environment, **more}, stdout=log, stderr=log, start_new_session=True
            )
            for more in ranks
        ]
        stack.callback(_end_all, started)
        deadline, codes = time.monotonic() + LIMIT_S, []
        for process in started:
            try:
                codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(-9)
        ended = time.time()
        pids = [int(path.name.removesuffix(".pid")) for path in folder.glob("*.pid")]
        left = [pid for pid in pids if _is_there(pid)]
    output = (folder / "log.txt").read_text()
    raised = folder / "raised"
    seconds = ended - float(raised.read_text()) if raised.exists() else float("nan")
    num_messages = sum(line.endswith(f"RuntimeError: {MESSAGE}") for line in output.splitlines())
    return Ending(codes, seconds, num_messages, len(left), output)


def _end_all(started: list[subprocess.Popen]) -> None:
    for process in started:
        warm.kill_rest(process.pid)
        process.kill()
        process.wait()


def _is_there(pid: int, patience_s: float = 1.0) -> bool:
    deadline = time.monotonic() + patience_s
    while os.path.exists(f"/proc/{pid}") and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def _job(hook: str, strategy: str) -> None:
    import torch

    from tests.engine.tiny import QUIET, Engine, Regression, rows

    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0")
    raises = rank == ("0" if hook in CALLED_ON_RANK_0 else "1")
    Path(f"{os.getpid()}.pid").touch()

    def fail(where: str) -> None:
        if raises and where == hook:
            Path("raised").write_text(str(time.time()))
            raise RuntimeError(MESSAGE)

    class Fails(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", super().training_step(batch, batch_idx), sync_dist=True)

        def train_dataloader(self) -> Any:
            return rows()

        def val_dataloader(self) -> Any:
            return rows()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    if hook not in (BEFORE, AFTER):
        called = getattr(Fails, hook)

        def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
            fail(hook)
            return called(self, *args, **kwargs)

        setattr(Fails, hook, failing)
    flags = {**QUIET, "enable_checkpointing": True, "num_sanity_val_steps": 0, "max_epochs": 1}
    engine = Engine(**flags, strategy=strategy, devices=2, hang_timeout_s=60, default_root_dir=".")
    fail(BEFORE)
    engine.fit(Fails())
    fail(AFTER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(HOOKS), choices=list(HOOKS), metavar="HOOK")
    parser.add_argument("--launcher", nargs="+", default=["plain", "hand"], choices=["plain", "hand"])
    parser.add_argument("--strategy", default="ddp")
    options = parser.parse_args()
    print("| hook | launcher | exit codes | seconds | messages | left running |\n| --- | --- | --- | --- | --- | --- |")
    for hook in options.only:
        for launcher in options.launcher:
            with tempfile.TemporaryDirectory() as folder:
                found = ending(hook, launcher, options.strategy, folder=Path(folder))
            codes = ", ".join(map(str, found.codes))
            print(
                f"| {hook} | {launcher} | {codes} | {found.seconds:.1f} | {found.num_messages} | {found.num_left} |",
                flush=True,
            )


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        _job(*sys.argv[1:])
    else:
        main()
