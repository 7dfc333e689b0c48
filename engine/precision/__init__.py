"""The precisions of the flag `precision`, the same under every strategy and on every device.

Torch is not needed to read or check their names.
"""

from typing import Any

from ..flags import did_you_mean

__all__ = ["ALIASES", "FLOAT8", "OF_BLOCKS", "PRECISIONS", "TRANSFORMER_ENGINE", "canonical_precision"]

ALIASES = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}

PRECISIONS = {
    "32-true": "float32 throughout",
    "bf16-mixed": "matrix products in bfloat16, weights in float32",
    "16-mixed": "matrix products in float16 with a loss scale, weights in float32",
    "bf16-true": "weights and arithmetic in bfloat16",
    "16-true": "weights and arithmetic in float16",
    "64-true": "float64 throughout",
    "bf16-blocks": "as bf16-mixed, with all of the repeated blocks in bfloat16",
    "float8": "as bf16-mixed, with products of the blocks in float8, by torchao",
    "float8-rowwise": "as float8, with a scale for each row, which rounds less",
}
"""Precisions by the name of their flag, and what each means."""

FLOAT8 = {"float8": "tensorwise", "float8-rowwise": "rowwise"}
"""Precisions of which torchao computes the products, and its names for them."""

OF_BLOCKS = ("bf16-blocks", *FLOAT8)
"""Precisions that replace what the repeated blocks of a module compute."""

TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-float16")
"""Lightning's float8 precisions, for single and ddp: NVIDIA's package of this name replaces layers."""


def canonical_precision(flag: Any) -> str:
    """Returns the full name of a precision flag: 16 -> ``"16-mixed"``, None -> ``"32-true"``.

    Raises:
        ValueError: no such precision.
    """
    text = "32-true" if flag is None else str(flag)
    name = ALIASES.get(text, text)
    if name in PRECISIONS or name in TRANSFORMER_ENGINE:
        return name
    # The message begins like Lightning's.
    names = sorted([*PRECISIONS, *TRANSFORMER_ENGINE])
    near = did_you_mean(name.lower(), names, cutoff=0.5, kind="precision")
    raise ValueError(f"Precision {flag!r} is invalid.{near} Allowed: {', '.join(names)}.")
