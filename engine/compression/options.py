"""The options after the colon of each compression flag (its comm hook's arguments), readable without torch."""

import dataclasses

__all__ = ["AutoOptions", "Int8Options", "NoOptions", "PowerSGDOptions", "SignOptions", "TopKOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a method without options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Options:
    """Arguments of `Int8`."""

    block: int = 256
    """Number of values that share a scale; a multiple of 4."""
    feedback: bool = False
    """Add the rounding error to the next gradient; not supported under fsdp, where no rank could keep it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGDOptions:
    """Arguments of `PowerSGD`."""

    rank: int = 4
    """Number of columns of the two factors that are sent instead of a matrix."""
    start: int = 10
    """Number of optimizer steps without compression at the beginning."""
    min_ratio: float = 2.0
    """Compress a matrix only if its factors have this many times fewer values."""
    feedback: bool = True
    """Add the unsent part of a gradient to the next one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKOptions:
    """Arguments of `TopK`."""

    density: float = 0.01
    """Share of the values that are sent; the values of largest magnitude are sent."""
    start: int = 0
    """Number of optimizer steps without compression at the beginning."""
    feedback: bool = True
    """Add the unsent part of a gradient to the next one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignOptions:
    """Arguments of `Sign`."""

    start: int = 0
    """Number of optimizer steps without compression at the beginning."""
    feedback: bool = True
    """Add the unsent part of a gradient to the next one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Arguments of `Auto`."""

    steps: int = 3
    """Number of optimizer steps to measure before a method is chosen."""
