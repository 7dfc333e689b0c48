"""The verdict on a run: where its time went, the most expensive causes, and their remedies."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polyphase.engine.phases import PHASES

from .figures import Figures, figures_of
from .records import Run
from .rules import MIN_STEPS, RULES, Finding

__all__ = ["Verdict", "judge", "show"]

_NUM_FINDINGS = 2
"""Number of findings in the summary, which has five lines in total."""
_SHOWN = 0.005
_LEAST_SHOWN = 0.0005
"""The smallest share that is not printed as 0.0%."""
_NUM_SHARES = 5
"""Number of shares in the summary; the others are summed up."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The findings on a run.

    Args:
        figures: the figures that the findings are based on.
        findings: findings, the most expensive first.
        caveats: reasons why the verdict is less certain.
    """

    figures: Figures
    findings: list[Finding]
    caveats: list[str]

    def lines(self) -> list[str]:
        """Returns at most five lines: where the time went, and the first findings."""
        if not self.figures.totals:
            return ["doctor: no step was measured"]
        by_phase = {phase: share for phase, share in self.figures.mean_shares().items() if share > _SHOWN}
        shares = [f"{share:.0%} {name(phase)}" for phase, share in [*by_phase.items()][:_NUM_SHARES]]
        if (rest := 1.0 - sum([*by_phase.values()][:_NUM_SHARES])) > _SHOWN:
            shares.append(f"{rest:.0%} other")
        rate = f", {text}" if (text := rate_text(self.figures, ("flops_per_s", "mfu"))) else ""
        lines = [f"doctor: a step takes {1e3 * self.figures.step_s:.3g} ms{rate}: {', '.join(shares)}"]
        for finding in self.findings[:_NUM_FINDINGS]:
            gain = "" if finding.gain is None else f" (up to {finding.gain:.0%} less time)"
            lines += [f"  {finding.cause}: {finding.evidence}", f"    remedy: {finding.remedy}{gain}"]
        if not self.findings:
            lines.append(f"  {self.caveats[0]}" if self.caveats else "  nothing stands out")
        return lines

    def plain(self) -> dict[str, Any]:
        """Returns the verdict as JSON values; see docs/doctor.md."""
        ranks = self.figures.totals
        return {
            "num_steps": self.figures.num_steps,
            "step_s": self.figures.step_s,
            "shares": {rank: {phase: self.figures.share(phase, rank) for phase in PHASES} for rank in ranks},
            "rates": {rank: self.figures.rates(rank) for rank in ranks},
            "findings": [{**vars(finding), "ranks": list(finding.ranks)} for finding in self.findings],
            "caveats": self.caveats,
        }


_ENDANGER_THE_RUN = (
    "replicas_differ",
    "gradient_spikes",
    "loss_scale_falls",
    "dead_parameters",
    "lr_stands_still",
    "memory_leak",
    "full_memory",
    "full_shared_memory",
)
"""Causes of a wrong result or an early end, which come before those of lost time."""


def judge(run: Run) -> Verdict:
    """Applies all rules to a run."""
    figures = figures_of(run)
    caveats = []
    if run.missing:
        caveats.append(f"ranks {', '.join(map(str, run.missing))} are missing, whose files may lie on other hosts")
    if figures.num_steps < MIN_STEPS:
        caveats.append(f"{figures.num_steps} steps were measured after the first ones: {MIN_STEPS} are needed to judge")
        return Verdict(figures, [], caveats)
    findings: list[Finding] = []
    for rule in sorted(RULES, key=lambda candidate: candidate.is_last):
        if (not rule.is_last or not findings) and (finding := rule.find(figures, rule.threshold)) is not None:
            findings.append(finding)
    findings.sort(key=lambda finding: (finding.cause not in _ENDANGER_THE_RUN, -(finding.gain or 0.0)))
    return Verdict(figures, findings, caveats)


def rate_text(figures: Figures, names: Sequence[str] = ("samples_per_s", "tokens_per_s", "flops_per_s", "mfu")) -> str:
    """``"812 samples/s, 1.2 TFLOP/s, 31% of the peak"`` of a device; empty if nothing is known."""
    rates = figures.mean_rates()
    peak = "measured peak" if figures.totals and figures.info.device == "cpu" else "peak"
    texts = {
        "samples_per_s": lambda value: f"{value:,.4g} samples/s",
        "tokens_per_s": lambda value: f"{value:,.0f} tokens/s",
        "flops_per_s": lambda value: f"{_with_unit(value)}FLOP/s",
        "mfu": lambda value: f"{value:.1%} of the {peak}",
    }
    return ", ".join(texts[name](rates[name]) for name in names if name in rates)


def _with_unit(value: float) -> str:
    for unit, size in {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6}.items():
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "


def name(phase: str) -> str:
    """Returns the readable name of a phase."""
    return phase.replace("_", " ")


def show(verdict: Verdict, console: Console) -> None:
    """Prints the verdict: the findings, and the shares of each rank."""
    figures = verdict.figures
    if not figures.totals:
        console.print("No step was measured.", highlight=False)
        return
    info = figures.info
    sizes = " x ".join(f"{axis}={size}" for axis, size in info.layout.items() if size > 1)
    kind = f"{info.strategy}, {sizes}" if sizes else info.strategy
    console.print(
        f"{kind} on {info.device}: {figures.num_steps} steps of {1e3 * figures.step_s:.3g} ms, without the first ones",
        highlight=False,
        markup=False,
    )
    if rates := rate_text(figures):
        console.print(f"on each device: {rates}", highlight=False, markup=False)
    for caveat in verdict.caveats:
        console.print(Text.assemble(("Note", "yellow"), f": {caveat}"))
    for number, finding in enumerate(verdict.findings, start=1):
        gain = "" if finding.gain is None else f" [green](up to {finding.gain:.0%} less time)[/]"
        console.print(f"\n[bold red]{number}. {finding.cause}[/]{gain}", highlight=False)
        console.print(f"   {finding.evidence}", highlight=False, markup=False)
        console.print(f"   remedy: {finding.remedy}", highlight=False, markup=False, style="bold")
    if not verdict.findings and not verdict.caveats:
        console.print("\n[green]Nothing stands out.[/]")
    console.print()
    console.print(_table(verdict))


def _table(verdict: Verdict) -> Table:
    figures = verdict.figures
    table = Table(title="share of the time", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    ranks = sorted(figures.totals)
    shown = ranks if len(ranks) <= 8 else [*ranks[:4], *ranks[-4:]]
    for rank in shown:
        table.add_column(f"rank {rank}", justify="right")
    shares = {phase: [figures.share(phase, rank) for rank in shown] for phase in figures.mean_shares()}
    rows = {name(phase): of_ranks for phase, of_ranks in shares.items() if max(of_ranks) > _SHOWN}
    sums = [sum(of_phases) for of_phases in zip(*shares.values(), strict=True)]
    hidden = [of_ranks for phase, of_ranks in shares.items() if name(phase) not in rows]
    others = [sum(of_phases) for of_phases in zip(*hidden, strict=True)]
    if max(others, default=0.0) >= _LEAST_SHOWN:
        rows["other"] = others
    for label, values in {**rows, "all": sums}.items():
        table.add_row(label, *(f"{value:.1%}" for value in values))
    return table
