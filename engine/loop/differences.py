"""Differences between the first steps of a run and the same steps in one process, in words, and their tolerances."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .digests import Digests, unequal_replicas, whole
from .unsplit import Replay

__all__ = ["Weights", "between_ranks", "from_one_process"]

_LOSS_TOLERANCE, _NORM_TOLERANCE = 1e-4, 1e-3
"""The largest relative differences in float32; a different order of summation changes 1e-6 or less."""
_ROUNDED_TOLERANCE = 3e-2
"""The largest relative difference of loss and norm if the precision, or TF32, rounds to 10 bits or less."""
_GRADIENT_TOLERANCE, _GRADIENT_FLOOR = 1e-2, 1e-5
"""The largest difference of the norm of a parameter's gradient, relative to it, and to the norm of all gradients: where
the true gradient is zero, its norm is that of rounding errors of the others."""
_REPLICA_TOLERANCE = 1e-5
"""The largest relative difference of a gradient that ranks have got from the same reduction."""
_WEIGHTS_TOLERANCE = 3e-2
"""The largest difference of a weight, relative to the largest change in its tensor: Adam magnifies rounding errors."""


class Weights(NamedTuple):
    """Weights and buffers, by name."""

    before: dict[str, Tensor]
    """Those that both began with."""
    expected: dict[str, Tensor]
    """Those after the steps in one process."""
    actual: dict[str, Tensor]
    """Those after the steps of the run."""


def between_ranks(gradients: Sequence[Sequence[Digests]], weights: Sequence[Digests]) -> list[str]:
    """Describes in what the ranks differ that must be the same on several of them.

    Args:
        gradients: for each call of an optimizer, the digests of all ranks.
        weights: the digests of all ranks, after the steps.
    """
    differences = []
    for call, of_ranks in enumerate(gradients, start=1):
        if unequal := unequal_replicas(of_ranks, _REPLICA_TOLERANCE):
            name, text = unequal[0]
            where = f"the gradient of {name!r} in optimizer step {call}"
            differences.append(f"{where} is not the same on all ranks ({text})")
    if unequal := unequal_replicas(weights):
        name, text = unequal[0]
        differences.append(f"{name!r} is not the same on all ranks ({text})")
    return differences[:2]


def from_one_process(
    replay: Replay, gradients: Sequence[Sequence[Digests]], weights: Weights, is_rounded: bool
) -> list[str]:
    """Describes in what the steps of a run differ from those in one process.

    Args:
        replay: has repeated the steps.
        gradients: for each call of an optimizer, the digests of all ranks.
        weights: the weights.
        is_rounded: whether products are computed with fewer bits than float32 has.
    """
    differences = []
    for numbers, tolerance in ((replay.losses, _LOSS_TOLERANCE), (replay.norms, _NORM_TOLERANCE)):
        for quantity, actual, reference in numbers:
            if actual is None or reference is None:
                continue
            a, b = float(actual), float(reference)
            if abs(a - b) > (_ROUNDED_TOLERANCE if is_rounded else tolerance) * max(abs(a), abs(b)) + 1e-6:
                differences.append(f"the {quantity} is {a:.7g}, not {b:.7g}")
    if is_rounded:
        return differences[:3]
    return differences[:3] + _of_gradients(replay, gradients)[:1] + _of_weights(replay, weights)


def _of_gradients(replay: Replay, gradients: Sequence[Sequence[Digests]]) -> list[str]:
    differences = []
    for index, (step, expected) in sorted(replay.gradients.items()):
        actual = whole(gradients[index])
        floor = _GRADIENT_FLOOR * sum(norm**2 for _, norm in expected.values()) ** 0.5
        for name in dict.fromkeys([*expected, *actual]):
            (total, norm), (its_total, its_norm) = actual.get(name, (0.0, 0.0)), expected.get(name, (0.0, 0.0))
            allowed = _GRADIENT_TOLERANCE * max(norm, its_norm) + floor
            if abs(norm - its_norm) > allowed:
                differences.append(f"the gradient of {name!r} in {step} has the norm {norm:.7g}, not {its_norm:.7g}")
            elif abs(total - its_total) > allowed * replay.numels[name] ** 0.5:
                differences.append(f"the gradient of {name!r} in {step} has the sum {total:.7g}, not {its_total:.7g}")
    return differences


def _of_weights(replay: Replay, weights: Weights) -> list[str]:
    worst = (0.0, "")
    for name, value in weights.expected.items():
        if name not in weights.actual or name not in weights.before:
            continue
        difference, moved = _difference(
            weights.actual[name], value, weights.before[name], replay.above_rounding.get(name)
        )
        if difference > _WEIGHTS_TOLERANCE * moved:
            text = f"{name!r} has moved by {moved:.2e} there, and differs by {difference:.2e}"
            worst = max(worst, (difference / moved if moved else torch.inf, text))
    return [worst[1]] if worst[1] else []


def _difference(actual: Tensor, expected: Tensor, before: Tensor, above_rounding: Tensor | None) -> tuple[float, float]:
    """Returns the largest difference of comparable elements, above rounding, and the largest change of an element."""
    if actual.shape != expected.shape:
        return torch.inf, 0.0
    if expected.is_complex():
        actual, expected, before = (torch.view_as_real(tensor) for tensor in (actual, expected, before))
        above_rounding = None if above_rounding is None else above_rounding.unsqueeze(-1).expand(expected.shape)
    actual, expected, before = (tensor.to("cpu", torch.float64) for tensor in (actual, expected, before))
    differs, moved = (actual - expected).abs(), (expected - before).abs()
    if above_rounding is not None:
        differs, moved = differs[above_rounding.cpu()], moved[above_rounding.cpu()]
    if not differs.numel() or not bool(expected.isfinite().all()):
        return 0.0, 0.0
    rounding = 1e-5 * float(expected.abs().max()) + 1e-7
    return max(0.0, float(differs.nan_to_num(torch.inf).max()) - rounding), float(moved.max())
