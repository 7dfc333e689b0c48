"""The last rule: little of the time is computing, and no single cause stands out."""

from ...phases import PHASES
from ..figures import Figures
from .finding import Finding

__all__ = ["low_compute"]

_USEFUL = ("compute", "optimizer")
_APART = ("validation", "checkpoint")
"""Phases outside of a step."""
_SHOWN, _NUM_SHOWN = 0.02, 3
_REMEDIES = {
    "data_wait": "more loader workers: num_workers, persistent_workers, prefetch_factor",
    "copy": "pin_memory=True, and a lighter `on_after_batch_transfer`",
    "communication": "a larger batch, or accumulate_grad_batches, which sends half as often",
    "waiting": "steps that are alike on all ranks: batches of one length, CPUs of their own",
    "bubble": "more micro-batches: pp:microbatches=...",
    "callbacks": "fewer or lighter hooks: `polyphase doctor RUN_DIR --json` has the slowest",
    "logging": "a larger log_every_n_steps",
    "engine": "a larger batch: the loop takes as long for each step, whatever it computes",
}


def low_compute(figures: Figures, threshold: float) -> Finding | None:
    """Forward, backward and optimizer take a small part of the time."""
    useful = list(_USEFUL)
    if figures.info.device == "cpu":
        # On CPUs collectives compute as well; they have a rule of their own, as bubbles have.
        useful += ["communication", "bubble"] if figures.info.layout.get("pp", 1) > 1 else ["communication"]
    ranks = figures.totals
    share = sum(sum(_share(figures, phase, rank) for phase in useful) for rank in ranks) / len(ranks)
    if share >= threshold:
        return None
    others = {
        phase: sum(_share(figures, phase, rank) for rank in ranks) / len(ranks)
        for phase in PHASES
        if phase not in useful and phase not in _APART
    }
    largest = sorted(others, key=lambda phase: -others[phase])[:_NUM_SHOWN]
    shown = [f"{phase.replace('_', ' ')} {others[phase]:.0%}" for phase in largest if others[phase] >= _SHOWN]
    return Finding(
        cause="low_compute",
        evidence=f"{', '.join(useful[:-1])} and {useful[-1]} take {share:.0%} of a step's time; {', '.join(shown)}",
        numbers={"share": share, **others},
        remedy=_REMEDIES[largest[0]],
        gain=1.0 - share / threshold,
    )


def _share(figures: Figures, phase: str, rank: int) -> float:
    return figures.totals[rank].seconds.get(phase, 0.0) / figures.training_s(rank)
