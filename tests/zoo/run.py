"""One model under one strategy: equal to the plain loop, refused by name, or a failure."""

import os
import re
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import polyphase.engine
from polyphase.engine import Engine
from tests.distributed import in_a_fork

from .model import STEPS, Model, build, by_micro_batch, by_rank, loader, plain_loop

STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "cp", "pp")
"""Flags; two processes each, or as many as there are devices. How many have samples of their own says the engine."""

TOLERANCE = 1e-5
"""Largest difference of a weight. Three steps in float32: sums in another order are 1e-7 apart."""

_SAID = (
    "in a pipeline",
    "which is what a pipeline trains with",
    "the ranks have different values of",
    "is not the mean of steps on its parts",
)
"""Parts of the warnings of a difference that the engine leaves."""
_UNUSED = "find_unused_parameters=true"
_OURS = str(Path(polyphase.engine.__file__ or "").parent)
_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Cell(NamedTuple):
    """What came of it."""

    kind: str
    """``"equal"``, ``"runs"``, ``"refused"``, ``"warned"``; or ``"different"``, ``"failed"``, ``"hangs"``."""
    detail: str
    """The largest difference, or the message."""

    @property
    def is_good(self) -> bool:
        return self.kind in ("equal", "runs", "refused", "warned")


def num_devices(accelerator: str, most: int = 2) -> int:
    """So many processes of a CPU, or as many as there are devices."""
    return most if accelerator == "cpu" else min(most, torch.accelerator.device_count())


def run(model: Model, strategy: str, accelerator: str = "cpu", devices: int = 2, timeout_s: float = 120) -> Cell:
    """Runs it in a process of its own, that takes its children along.

    Args:
        model: of the zoo.
        strategy: flag.
        accelerator: as torch names it.
        devices: at most so many; of an accelerator, those that are there.
        timeout_s: seconds until all of its processes are ended.
    """
    try:
        found = in_a_fork(_report, model, strategy, accelerator, devices, timeout_s=timeout_s)
    except TimeoutError as error:
        found = Cell("hangs", str(error))
    except EOFError as error:
        found = Cell("failed", str(error))
    return Cell(found.kind, re.sub(r"(/[^\s:\"]*/)?([\w-]+\.py)", r"\2", found.detail))  # no paths of a machine


def _report(model: Model, strategy: str, accelerator: str, devices: int) -> Cell:
    os.environ["POLYPHASE_TRACEBACK"] = "full"  # to see who has raised
    devices = num_devices(accelerator, devices)
    if accelerator != "cpu":
        torch.backends.cudnn.allow_tf32 = False  # torch rounds what convolutions multiply to 10 bits there
    flags = {"devices": devices, "accelerator": accelerator, "sync_batchnorm": model.sync_batchnorm and devices > 1}
    name, colon, options = strategy.partition(":")
    # One device needs no process but this one.
    return _run(model, f"{name}_fork{colon}{options}" if devices > 1 else strategy, flags)


def _run(model: Model, strategy: str, flags: dict[str, Any]) -> Cell:
    found = _run_under(model, strategy, flags)
    if found.kind == "refused" and strategy.startswith(("ddp", "zero1")) and _UNUSED in found.detail:  # as it says
        found = _run_under(model, f"{strategy}:{_UNUSED}", flags)
        return found._replace(detail=f"{found.detail} with `{_UNUSED}`".strip())
    if found.kind == "different":  # was it said?
        warnings.filterwarnings("error", message=f"(?s).*({'|'.join(_SAID)})")
        warned = _run_under(model, strategy, flags)
        if warned.kind != "different":
            return Cell("warned", warned.detail)
    return found


def _run_under(model: Model, strategy: str, flags: dict[str, Any]) -> Cell:
    module = build(model)
    try:
        engine = Engine(strategy=strategy, max_epochs=1, **flags, **_QUIET)
        engine.fit(module, loader(model, engine.data_size))
    except Exception as error:
        return _of_error(error)
    if model.is_random:
        return Cell("runs", "")
    # A loss that is no mean over samples is that of a rank's samples, every W-th of a batch, or of a micro-batch.
    part = by_rank if engine.data_size > 1 else by_micro_batch if strategy.startswith("pp") else None
    expected = plain_loop(model, device=flags["accelerator"], cut=None if model.is_mean else part)
    # A process that was itself the only rank has one shard of each parameter, the whole.
    found = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in module.state_dict().items()}
    difference = largest_difference(expected, found)
    num_batches = engine.fit_loop.epoch_loop.batch_progress.total.completed
    if num_batches < STEPS:
        return Cell("failed", f"{num_batches} batches of {STEPS}")
    moved = largest_difference(build(model).state_dict(), expected)
    if moved < 100 * TOLERANCE:
        return Cell("failed", f"the plain loop moves weights by {moved:.0e} only, which shows nothing")
    return Cell("equal" if difference <= TOLERANCE else "different", f"{difference:.0e}")


def _of_error(error: Exception) -> Cell:
    """Refused, if the engine raised it itself; else whoever did."""
    text = "".join(traceback.format_exception(error))
    raised = [line for line in text.splitlines() if line.startswith("  File ")]
    # Of a rank's, the traceback is in the message.
    said = re.split(r"^\s*[\w.]*(?:Error|Warning): ", str(error).strip(), flags=re.MULTILINE)[-1]
    said = " ".join(said.split()) or type(error).__name__
    is_named = (raised and _OURS in raised[-1]) or "choose another strategy" in said or said.startswith("under '")
    is_slip = re.search(r"^\s*(Attribute|Key|Index|Name|Assertion)Error\b", text, re.MULTILINE)
    return Cell("refused" if is_named and not is_slip else "failed", said)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    if a.keys() != b.keys():
        return float("inf")
    return max(float((a[name].cpu() - b[name].cpu()).abs().double().max()) for name in a if a[name].numel())
