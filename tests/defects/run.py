"""One defect, with and without the check of the first steps."""

import pkgutil
import re
from typing import Any, NamedTuple

from polyphase.engine import Engine
from tests.distributed import in_a_fork
from tests.zoo.model import build, loader, plain_loop
from tests.zoo.run import largest_difference

from .defects import Defect

__all__ = ["Found", "run"]

_QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Found(NamedTuple):
    """What came of it."""

    difference: str
    """Largest difference of a weight from a plain loop, without the check; or the error that the run ended with."""
    report: str
    """What the check says; empty if it says nothing."""


def run(defect: Defect, timeout_s: float = 60) -> Found:
    """Trains without what prevents the defect, in processes of their own."""
    difference = _alone(_difference, defect, timeout_s)
    return Found(difference, _alone(_report, defect, timeout_s))


def _difference(defect: Defect) -> str:
    module = build(defect.model)
    try:
        _fit(defect, module, check=False)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    return f"{largest_difference(plain_loop(defect.model, **_clip(defect)), module.state_dict()):.0e}"


def _clip(defect: Defect) -> dict[str, Any]:
    return {"clip": defect.flags["gradient_clip_val"]} if "gradient_clip_val" in defect.flags else {}


def _report(defect: Defect) -> str:
    try:
        _fit(defect, build(defect.model), check=True)
    except Exception as error:
        return _differences(" ".join(str(error).split()))
    return ""


def _differences(text: str) -> str:
    """The differences that an error of the check names; empty for any other error."""
    remedies = r"(?:`polyphase verify`|`ReplicaGuard`|The result is not that of one process)"
    if memory := re.search(r"FirstStepsError: .* train \w+ by different values of (.*?): what is kept", text):
        return f"{memory[1]} is that of the samples of a rank"
    said = re.search(rf"FirstStepsError: (.*?) {remedies}", text)
    return said[1].split(": ", 1)[1].removeprefix("with a batch in two parts, ") if said else ""


def _fit(defect: Defect, module: Any, check: bool) -> None:
    name, _, options = defect.strategy.partition(":")
    engine = Engine(
        strategy=f"{name}_fork{':' * bool(options)}{options}",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        check_first_steps=check,
        **defect.flags,
        **_QUIET,
    )
    for place, attribute, replacement in defect.without:
        owner = pkgutil.resolve_name(place) if isinstance(place, str) else place
        getattr(owner, attribute)  # it is still there
        setattr(owner, attribute, replacement)
    engine.fit(module, loader(defect.model, engine.data_size))


def _alone(function: Any, defect: Defect, timeout_s: float) -> str:
    try:
        return in_a_fork(function, defect, timeout_s=timeout_s)
    except (TimeoutError, EOFError) as error:
        return str(error)
