"""The verdict on a run: where its time went, what costs most of it, and what mends that."""

import dataclasses
from typing import Any

from ..phases import PHASES
from .figures import Figures, figures_of
from .records import Run
from .rules import MIN_STEPS, RULES, Finding

__all__ = ["Verdict", "judge"]

_NUM_FINDINGS = 2
"""Findings that the summary has: five lines in all."""
_SHOWN = 0.005


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The findings on a run.

    Args:
        figures: that they looked at.
        findings: the most costly first.
        caveats: what makes it less certain.
    """

    figures: Figures
    findings: list[Finding]
    caveats: list[str]

    def lines(self) -> list[str]:
        """At most five lines: where the time went, and the first findings."""
        if not self.figures.totals:
            return ["doctor: no step was measured"]
        shares = [f"{share:.0%} {name(phase)}" for phase, share in self.figures.mean_shares().items() if share > _SHOWN]
        lines = [f"doctor: a step takes {1e3 * self.figures.step_s:.3g} ms: {', '.join(shares[:5])}"]
        for finding in self.findings[:_NUM_FINDINGS]:
            gain = "" if finding.gain is None else f" (up to {finding.gain:.0%} less time)"
            lines += [f"  {finding.cause}: {finding.evidence}", f"    try {finding.remedy}{gain}"]
        if not self.findings:
            lines.append(f"  {self.caveats[0]}" if self.caveats else "  nothing stands out")
        return lines

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it; see docs/doctor.md."""
        ranks = self.figures.totals
        return {
            "num_steps": self.figures.num_steps,
            "step_s": self.figures.step_s,
            "shares": {rank: {phase: self.figures.share(phase, rank) for phase in PHASES} for rank in ranks},
            "findings": [{**vars(finding), "ranks": list(finding.ranks)} for finding in self.findings],
            "caveats": self.caveats,
        }


def judge(run: Run) -> Verdict:
    """Applies all rules."""
    figures = figures_of(run)
    caveats = []
    if run.missing:
        caveats.append(f"ranks {', '.join(map(str, run.missing))} are missing, whose files may lie on other hosts")
    if figures.num_steps < MIN_STEPS:
        caveats.append(f"{figures.num_steps} steps were measured after the first ones: {MIN_STEPS} are needed to judge")
        return Verdict(figures, [], caveats)
    findings = [finding for rule in RULES if (finding := rule.find(figures, rule.threshold)) is not None]
    findings.sort(key=lambda finding: -(finding.gain or 0.0))
    return Verdict(figures, findings, caveats)


def name(phase: str) -> str:
    """A phase, as a person reads it."""
    return phase.replace("_", " ")
