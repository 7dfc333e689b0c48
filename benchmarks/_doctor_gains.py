"""The gain that a finding forecasts, beside what the same run gains with the fault's remedy."""

from collections.abc import Sequence
from dataclasses import dataclass

from _doctor_kinds import Trial
from report import Table

__all__ = ["REMEDIES", "Gain", "gains_table", "num_within"]

REMEDIES = {
    "slow_loader": "a loader as quick as the others'",
    "slow_loaders": "a quick loader",
    "sleep_in_step": "the sleep left out",
    "heavy_step": "as much work as the others'",
    "paused_rank": "no pauses",
    "cpu_burner": "the neighbours ended",
    "slow_stage": "the work in both stages alike",
    "few_micro_batches": "twice as many",
    "more_samples": "as many samples as the others'",
    "slow_in_turn": "the same work in each step",
    "slow_callback": "its work left out",
    "slow_callbacks": "its work left out",
    "slow_module_hook": "its work left out",
    "slow_logger": "a quick logger",
    "logs_too_often": "log_every_n_steps=50",
    "slow_saves": "no saves",
    "saves_too_often": "no saves",
    "slow_validation": "no validation",
    "slow_transfer": "its work left out",
    "slow_transfer_of_one": "its work left out",
    "padding": "samples of one length",
    "small_buckets": "bucket_cap_mb left out",
    "costly_compression": "compression='none'",
    "small_units": "`shard_units()` without them",
    "many_collectives": "one of all values",
    "small_operators": "one operator",
    "sync_while_accumulating": "no_sync()",
    "threads": "one thread a rank",
}
"""What is done about each fault by which a step gets shorter; of others no gain is forecast, or none is in a step."""
NEAR = 0.2
"""Forecast and measurement are near each other where they differ by this part of the larger one, or less."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A fault, and the same run with its remedy."""

    trial: Trial
    forecast: float
    """The part of a step's time that the finding says to go."""
    step_s: float
    mended_s: float
    """A step with the remedy."""

    @property
    def measured(self) -> float:
        """The part of a step's time that went."""
        return 1.0 - self.mended_s / self.step_s

    @property
    def is_near(self) -> bool:
        """Whether they are within `NEAR` of each other."""
        return abs(self.forecast - self.measured) <= NEAR * max(self.forecast, self.measured)


def num_within(gains: Sequence[Gain]) -> str:
    """``"19 of 23"``."""
    return f"{sum(gain.is_near for gain in gains)} of {len(gains)}"


def gains_table(gains: Sequence[Gain]) -> Table:
    """A row for each."""
    rows = [
        {
            "run": str(gain.trial),
            "remedy": REMEDIES[gain.trial.kind],
            "a step, ms": f"{1e3 * gain.step_s:.0f}",
            "with the remedy, ms": f"{1e3 * gain.mended_s:.0f}",
            "gain forecast": f"{gain.forecast:.1%}",
            "gain measured": f"{gain.measured:.1%}",
            "difference": f"{gain.forecast - gain.measured:+.1%}",
            f"within {NEAR:.0%} of each other": "yes" if gain.is_near else "no",
        }
        for gain in gains
    ]
    return Table(title=f"Gains, forecast and measured: {num_within(gains)} within {NEAR:.0%} of each other", rows=rows)
