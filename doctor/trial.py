"""`polyphase doctor fit`: runs some steps of a command, judges them, and measures the gain of its remedies.

Each run is a separate process, started like the command itself, with the callback `Doctor` and a temporary folder of
logs. A remedy that is a flag can be tried; a remedy that changes code can't.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from polyphase.engine.flags import check_count

from .figures import Figures
from .records import newest, read_run
from .rules import MIN_STEPS, Finding
from .verdict import Verdict, judge, show

__all__ = ["Trial", "main", "measure", "remedy_of"]

HELP = """\
usage: polyphase doctor fit [--steps N] [--try] [--json] FLAGS

Runs some steps of `polyphase fit FLAGS`, and says where their time goes, as `polyphase doctor RUN_DIR`
does of a run. Logs and checkpoints go to a folder that is removed; what you give a path of its own
goes there.

  --steps N  optimizer steps of each run (default: 60)
  --try      tries each remedy that is a flag, alone, with as many steps: what was forecast, and
             what was measured
  --json     for programs

  polyphase doctor fit --try --model DigitsClassifier --data Digits --strategy ddp --devices 2
"""

_STEPS = 60
_NUM_TRIED = 4
_NUM_LINES = 30
"""Number of output lines of a failed run that are shown."""
_OURS = ("max_steps", "min_steps", "min_epochs", "max_time", "default_root_dir", "fast_dev_run", "barebones")
"""Flags for the length of a run and the folder that it writes to."""


_WRONG_FLAGS = 2
"""Exit code of the command where its flags are wrong: it says so at once, before it imports torch."""


class RunError(RuntimeError):
    """The command itself failed."""


@dataclasses.dataclass(frozen=True)
class _Remedy:
    """Changes to a command.

    Args:
        words: flags to add.
        environment: environment variables to set.
        warning: side effects of the change; empty if there are none.
    """

    words: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    warning: str = ""

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), *self.words])


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of trying a remedy.

    Args:
        finding: the finding that the remedy addresses.
        remedy: the remedy; None if no flag can change the cause.
        before_s: time of a step without the remedy.
        after_s: time of a step with it; None: it was not run, or failed.
        error: the reason of the failure.
    """

    finding: Finding
    remedy: _Remedy | None
    before_s: float
    after_s: float | None = None
    error: str = ""

    @property
    def gain(self) -> float | None:
        """The saved part of the time, comparable with the finding's forecast; negative if a step takes longer."""
        return None if self.after_s is None else 1 - self.after_s / self.before_s

    def plain(self) -> dict[str, Any]:
        """Returns the trial as JSON values."""
        times = {"before_s": self.before_s, "after_s": self.after_s, "measured": self.gain}
        remedy = None if self.remedy is None else str(self.remedy)
        return {
            "cause": self.finding.cause,
            "remedy": remedy,
            "forecast": self.finding.gain,
            **times,
            "error": self.error,
        }


def main(words: Sequence[str]) -> int:
    """Runs ``polyphase doctor fit`` with its arguments; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    try:
        steps, tries, as_json, flags = _parse(words)
        _check(flags)
        console = Console(stderr=as_json)
        _say(console, f"{steps} steps of: polyphase fit {' '.join(flags)}", "dim")
        verdict = measure(flags, steps)
        trials = _try_all(verdict, flags, steps, console) if tries else []
    except RunError as error:
        print(f"polyphase: error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"polyphase: error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps({**verdict.plain(), "trials": [trial.plain() for trial in trials]}, indent=2))
    else:
        show(verdict, console)
        for trial in trials:
            _show(trial, console)
    return 0


def _parse(words: Sequence[str]) -> tuple[int, bool, bool, list[str]]:
    """Returns the steps, whether to try remedies, whether to print JSON, and the flags of the command."""
    steps, flags, rest = str(_STEPS), [], iter(words)
    for word in rest:
        name, _, value = word.partition("=")
        if name == "--steps":
            steps = value or next(rest, "")
        elif word not in ("--try", "--json"):
            flags.append(word)
    if not steps.isdecimal():
        raise ValueError(f"--steps must be a whole number, but got {steps!r}.")
    least = MIN_STEPS + 4  # rules ignore the first three steps
    check_count("--steps", int(steps))
    if int(steps) < least:
        raise ValueError(f"--steps must be at least {least}, of which the first ones are not judged, but got {steps}.")
    return int(steps), "--try" in words, "--json" in words, flags


def _check(flags: Sequence[str]) -> None:
    """Refuses flags that can't be used here, before any process starts; the command itself refuses others."""
    from polyphase.engine.distributed.environment import num_launched

    if num_launched() > 1:
        raise ValueError("doctor fit starts the processes itself: run it alone, not under torchrun, srun or mpiexec.")
    names = {flag.partition("=")[0].removeprefix("--").removeprefix("trainer.") for flag in flags}
    for name in _OURS:
        if name in names:
            raise ValueError(f"doctor fit decides for how long it runs and where it writes: leave out --{name}.")


def measure(flags: Sequence[str], steps: int, environment: Mapping[str, str] | None = None) -> Verdict:
    """Runs some steps of ``polyphase fit`` in a separate process, and judges them.

    Args:
        flags: flags of the command.
        steps: number of optimizer steps.
        environment: environment variables to set.

    Raises:
        RunError: the run failed, or it had no step.
        ValueError: the command refused its flags; the message is its own.
    """
    from polyphase.engine.distributed.environment import environment_with

    has_doctor = any(flag.rpartition("=")[2].rpartition(".")[2] == "Doctor" for flag in flags)
    doctor = [] if has_doctor else ["--callbacks+=Doctor"]
    with tempfile.TemporaryDirectory(prefix="polyphase-doctor-") as folder:
        words = [*flags, *doctor, f"--max_steps={steps}", "--max_epochs=-1", f"--default_root_dir={folder}"]
        command = [sys.executable, "-m", "polyphase.engine", "fit", *words]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment_with(environment or {}),
            check=False,
        )
        output = "\n".join(done.stdout.rstrip().splitlines()[-_NUM_LINES:])
        if done.returncode == _WRONG_FLAGS:
            raise ValueError(output.rpartition("polyphase: error: ")[2])
        if done.returncode != 0:
            raise RunError(f"the run ended with exit code {done.returncode}:\n{output}")
        try:
            return judge(read_run(newest(folder)))
        except (OSError, ValueError) as error:
            raise RunError(f"the run noted nothing ({error}):\n{output}") from error


def remedy_of(finding: Finding, figures: Figures) -> _Remedy | None:
    """Returns the flags that address a finding; None if no flag can.

    Args:
        finding: one of the verdict's findings.
        figures: the verdict's figures.
    """
    info = figures.info
    strategy = info.strategy.partition(":")[0]
    if finding.cause == "slow_loader" and info.num_workers is not None and not finding.ranks:
        spare = max(1, min(8, int(info.num_cpus / max(info.local_ranks, 1)) - 1))
        return _Remedy((f"--data.num_workers={2 * info.num_workers or spare}",))
    if finding.cause == "exposed_communication" and info.compression == "none":
        if strategy in ("ddp", "zero1"):
            return _Remedy(("--compression=bf16",), warning="gradients are rounded to 16 bits")
        if strategy.startswith(("fsdp", "hsdp")):
            return _Remedy(("--precision=bf16-mixed",), warning="it computes in 16 bits")
    if finding.cause == "slow_logging":
        return _Remedy(("--log_every_n_steps=50",))
    if finding.cause == "thread_oversubscription":
        return _Remedy(environment={"OMP_NUM_THREADS": str(max(1, int(info.num_cpus / max(info.local_ranks, 1))))})
    return None


def _try_all(verdict: Verdict, flags: list[str], steps: int, console: Console) -> list[Trial]:
    trials = []
    for finding in verdict.findings[:_NUM_TRIED]:
        remedy = remedy_of(finding, verdict.figures)
        trial = Trial(finding, remedy, verdict.figures.step_s)
        if remedy is not None:
            _say(console, f"{steps} steps with {remedy}", "dim")
            try:
                after = measure([*flags, *remedy.words], steps, remedy.environment)
                trial = dataclasses.replace(trial, after_s=after.figures.step_s)
            except (RunError, ValueError) as error:
                trial = dataclasses.replace(trial, error=str(error).splitlines()[-1])
        trials.append(trial)
    return trials


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(text, highlight=False, markup=False, style=style, soft_wrap=True)


def _show(trial: Trial, console: Console) -> None:
    """Prints the remedy that was tried, and the times before and after."""
    if trial.remedy is None:
        _say(console, f"\n{trial.finding.cause}: not tried, since no flag mends it: {trial.finding.remedy}")
        return
    _say(console, f"\n{trial.finding.cause}: tried {trial.remedy}", "bold")
    if trial.gain is None or trial.after_s is None:
        _say(console, f"   it does not run: {trial.error}", "red")
        return
    change = f"{trial.gain:.0%} less" if trial.gain >= 0 else f"{-trial.gain:.0%} more"
    forecast = "" if trial.finding.gain is None else f"; up to {trial.finding.gain:.0%} less was forecast"
    before_ms, after_ms = 1e3 * trial.before_s, 1e3 * trial.after_s
    _say(console, f"   a step takes {after_ms:.3g} ms instead of {before_ms:.3g} ms: {change} time{forecast}")
    if trial.remedy.warning:
        _say(console, f"   note: {trial.remedy.warning}", "yellow")
