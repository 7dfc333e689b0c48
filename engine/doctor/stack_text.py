"""Formats the stacks of a run's ranks as text; ranks with the same stack are grouped."""

import linecache
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

__all__ = ["describe", "lines", "show"]

_SOURCES = Path(__file__).parents[2]
_KEPT = 2
"""Number of innermost calls that are always shown."""
_OURS = tuple(f"{_SOURCES / name}{os.sep}" for name in ("callbacks", "engine"))
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.path.dirname(os.__file__)}{os.sep}")


def show(answers: Mapping[int, Any], *, all_threads: bool, all_frames: bool) -> None:
    """Prints the result of `lines`."""
    for line in lines(answers, all_threads=all_threads, all_frames=all_frames):
        print(line)


def lines(answers: Mapping[int, Any], *, all_threads: bool = False, all_frames: bool = False) -> list[str]:
    """Returns one line about the position of each rank, then each different stack with the ranks that have it.

    Args:
        answers: answers by rank; a text gives the reason for a missing answer.
        all_threads: show all threads, not only the training thread.
        all_frames: show all frames of libraries and of the engine, not only the innermost ones.
    """
    shown_lines = [_place(rank, answer) for rank, answer in sorted(answers.items())]
    by_stack: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        if not isinstance(answer, str):
            by_stack.setdefault(_stacks(answer, all_threads, all_frames), []).append(rank)
    for stack, ranks in by_stack.items():
        shown_lines += ["", f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:", stack]
    return shown_lines


def _place(rank: int, answer: Any) -> str:
    if isinstance(answer, str):
        return f"rank {rank}: no stacks: {answer}"
    note = f" ({answer['note']})" if answer.get("note") else ""
    where = f"rank {rank} on {answer['host']}, process {answer['pid']}"
    return f"{where}: {describe(answer)}{note}" if "phase" in answer else f"{where}{note}"


def describe(answer: Mapping[str, Any]) -> str:
    """Describes the position of a rank: phase, step, and whether it waits for other ranks."""
    pending = answer.get("pending")
    doing = f", waits for other ranks in {pending}" if pending else ""
    line = f", at {answer['line']}" if answer.get("line") else ""
    return f"phase {answer['phase']!r} of step {answer['step']}, batch {answer['batch']}{doing}{line}"


def _stacks(answer: Mapping[str, Any], all_threads: bool, all_frames: bool) -> str:
    threads = answer["threads"]
    # If the training thread is unknown (py-spy uses other names, or it has ended), all threads are shown.
    shown = threads if all_threads or not any(thread["runs"] for thread in threads) else threads[:1]
    shown_lines = []
    for thread in shown:
        if len(shown) > 1:
            shown_lines.append(f"  thread {thread['name']}:")
        shown_lines += _calls(thread["calls"], all_frames) or ["  (no Python frame)"]
    return "\n".join(shown_lines)


def _calls(calls: Sequence[Any], all_frames: bool) -> list[str]:
    """Formats calls like a traceback, with the innermost call last."""
    shown_lines = []
    shown = {number for number, call in enumerate(calls) if all_frames or number < _KEPT or not _is_library(call[0])}
    for is_shown, group in groupby(reversed(range(len(calls))), lambda number: number in shown):
        numbers = list(group)
        if is_shown:
            shown_lines += [line for number in numbers for line in _call(*calls[number])]
        else:
            shown_lines.append(f"  ... {len(numbers)} calls of libraries and of the engine (--all-frames)")
    return shown_lines


def _call(file: str, line: int, name: str) -> list[str]:
    if not line:
        return [f"  {name} ({file})"]
    text = linecache.getline(file, line).strip()
    return [f'  File "{file}", line {line}, in {name}', *([f"    {text}"] if text else [])]


def _is_library(file: str) -> bool:
    return not file.endswith(".py") or any(part in file for part in _LIBRARIES) or file.startswith(_OURS)
