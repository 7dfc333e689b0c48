"""Runs the zoo, and writes benchmarks/results/zoo-cpu.md, or of an accelerator zoo-DEVICE.md.

Exit code 1 if a cell is a failure.
"""

import argparse
import json
import logging
import platform
import re
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.report import slug

from .run import STRATEGIES, TOLERANCE, Cell, num_devices, run

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_UNUSED = " with `find_unused_parameters=true`"
_GENERAL = (
    (r"^[Uu]nder '\w+' ", ""),
    (r"^pipeline stage \d+ failed: ", ""),
    (r"^(?:the forward of \w+, )?[\w.]+\.py:\d+ in \S+: \".*?\",? (?=\w+ )", "a line of the code "),
    (r"(?:a line of the code )?where torch's DTensor raised \w+: ", "in torch's DTensor, "),
    (r"^[A-Z]\w+ (?=optimizes|has no|steps)", "the module "),
    (r"\b(layer|blocks) of [A-Z]\w+", r"\1"),
    (r"(?<!\w)'[^']*'( of [A-Z]\w+)?( and \d+ more)?", "..."),
    (r"\b(gradients|weights) of [\w.]+ and \d+ more", r"\1"),
    (r" \([^()]*\)(?=[ ,])", ""),
)
"""What is one model's in a message: the flag, the line, the names of its class and of its parts."""
_HEAD = """# Other people's models

Tiny models of other packages, and modules of the kinds that people bring, each in a `LightningModule`, trained for 3
steps of SGD on {where} and compared with a plain PyTorch loop in one process. `make zoo`
writes this page, from `tests/zoo`; {versions}.

The number is the largest difference of a weight under {strategies}, but for the strategies of the last
column: at most {tolerance:.0e} counts as equal, and the loop itself moves weights by more than a hundred
times that. Where a loss is no mean over samples, the loop takes the mean of the losses of the ranks' samples,
or of the micro-batches, as any DDP does. "Runs": each rank draws random numbers of its own, so nothing can be
compared. A number in brackets: refused by name (or warned of), before or in the first step; the number leads
to the reason, and the error's text also names the part of the module, and a remedy. [u]: with the option
`find_unused_parameters=true`.
"""


def main() -> int:
    """Runs what is asked for, but for cells that the results file has already."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        default=[""],
        help="run those whose names have one of these in it; the page keeps the rest",
    )
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES, choices=STRATEGIES)
    parser.add_argument("--accelerator", default="cpu", help="as torch names it (default: %(default)s)")
    parser.add_argument("--results", type=Path, help="a file of cells, to go on with after a stop; default: none")
    parser.add_argument("--output", type=Path, help="of the page; default: as above")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    groups = _groups()
    where, page = _place(asked.accelerator)
    page = asked.output or page
    known = json.loads(asked.results.read_text()) if asked.results and asked.results.exists() else {}
    for models in groups.values():
        for name, model in models.items():
            for strategy in asked.strategies:
                key = f"{strategy}: {name}"
                if not any(part in name for part in asked.models) or key in known:
                    continue
                known[key] = run(model, strategy, asked.accelerator)
                print(key, *known[key], flush=True)
                if asked.results:
                    asked.results.write_text(json.dumps(known, indent=1))
    cells = {key: Cell(*cell) for key, cell in known.items()}
    page.write_text(_page(groups, {**(_read(page.read_text()) if page.exists() else {}), **cells}, where))
    bad = [key for key, cell in cells.items() if not cell.is_good]
    print(f"{len(cells)} cells, {len(bad)} failures", *bad, sep="\n")
    return bool(bad)


def _groups() -> dict[str, dict]:
    from . import huggingface, methods, plain, unusual  # the first needs transformers

    return {
        "Modules of torch alone": plain.MODELS,
        "Modules whose step does more than it returns": unusual.MODELS,
        "Training methods": methods.MODELS,
        "Models of transformers, peft and diffusers": huggingface.MODELS,
    }


def _read(page: str) -> dict[str, Cell]:
    """The cells of a page."""
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE))
    cells = {}
    for label, shown, others in re.findall(r"^\| ([^|]+) \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE):
        name = label.partition(" (")[0]
        for flag in STRATEGIES:
            cells[f"{flag}: {name}"] = Cell("runs", "") if shown == "runs" else Cell("equal", shown)
        for flags, text in re.findall(r"([\w, ]+): ([^;]+)", others):
            kind, _, number = text.strip().removesuffix("]").rpartition("[")
            for key in (f"{flag}: {name}" for flag in flags.strip().split(", ")):
                if number == "u":
                    cells[key] = cells[key]._replace(detail=f"{cells[key].detail}{_UNUSED}".strip())
                elif number in reasons:
                    cells[key] = Cell(kind.strip() or "refused", reasons[number].replace("]\\(", "]("))
                else:  # not run
                    del cells[key]
    return {key: cell for key, cell in cells.items() if cell.detail or cell.kind == "runs"}


def _place(accelerator: str) -> tuple[str, Path]:
    """Where it was run, in words, and the file of the page."""
    if accelerator == "cpu":
        return "2 CPU processes", _RESULTS / "zoo-cpu.md"
    name = torch.cuda.get_device_name(0) if accelerator == "cuda" else accelerator
    return f"{num_devices(accelerator)} x {name}", _RESULTS / f"zoo-{slug(name)}.md"


def _page(groups: dict[str, dict], cells: dict[str, Cell], where: str) -> str:
    packages = ("torch", "lightning", "transformers", "peft", "diffusers")
    said = ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)])
    reasons: dict[str, int] = {}
    parts = [
        _HEAD.format(
            versions=said, tolerance=TOLERANCE, where=where, strategies=", ".join(f"`{name}`" for name in STRATEGIES)
        )
    ]
    for title, models in groups.items():
        lines = [f"## {title}\n", "| | equal | but |", "|---|---|---|"]
        for name, model in models.items():
            row = _row({strategy: cells.get(f"{strategy}: {name}") for strategy in STRATEGIES}, reasons)
            lines.append(f"| {name}{f' ({model.note})' if model.note else ''} | {' | '.join(row)} |")
        parts.append("\n".join(lines) + "\n")
    parts.append(
        "## Reasons\n\n" + "\n".join(f"{number}. {_unlinked(reason)}" for reason, number in reasons.items()) + "\n"
    )
    return "\n".join(parts)


def _brief(reason: str) -> str:
    """What a message says of every model: up to the remedy, without names."""
    for pattern, general in _GENERAL:
        reason = re.sub(pattern, general, reason)
    return re.split(r"[:;] |(?<!\.)\. |(?<!\.)[:.]$", reason, maxsplit=1)[0]


def _unlinked(reason: str) -> str:
    """A reason in which a shape and a placement, ``[8, 2](S(1))``, are no link."""
    return reason.replace("](", "]\\(")


def _row(found: dict[str, Cell | None], reasons: dict[str, int]) -> list[str]:
    """The two columns of a model: the largest difference where it is equal, and strategies of which there is more."""
    numbers = [cell.detail.partition(" ")[0] for cell in found.values() if cell and cell.kind == "equal"]
    runs = any(cell and cell.kind == "runs" for cell in found.values())
    others: dict[str, list[str]] = {}
    for strategy, cell in found.items():
        if cell is None:
            others.setdefault("not run", []).append(strategy)
        elif cell.kind not in ("equal", "runs"):
            number = f"[{reasons.setdefault(_brief(cell.detail), len(reasons) + 1)}]"
            others.setdefault(number if cell.kind == "refused" else f"{cell.kind} {number}", []).append(strategy)
        elif _UNUSED.strip() in cell.detail:
            others.setdefault("[u]", []).append(strategy)
    shown = "runs" if runs else max(numbers, key=float, default="")
    return [shown, "; ".join(f"{', '.join(flags)}: {text}" for text, flags in others.items())]


if __name__ == "__main__":
    sys.exit(main())
