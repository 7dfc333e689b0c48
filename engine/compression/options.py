"""The options that may follow the colon of each compression's flag: its comm hook's arguments, read without torch."""

import dataclasses

__all__ = ["AutoOptions", "Int8Options", "NoOptions", "PowerSGDOptions", "SignOptions", "TopKOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoOptions:
    """For a method that has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Options:
    """Arguments of `Int8`."""

    block: int = 256
    """Number of values that share a scale; a multiple of 4."""
    feedback: bool = False
    """Add to the next gradient what the rounding has left out; not under fsdp, where no rank could keep it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSGDOptions:
    """Arguments of `PowerSGD`."""

    rank: int = 4
    """Number of columns of the two factors that are sent in the place of a matrix."""
    start: int = 10
    """Optimizer steps that send gradients as they are, before the first compressed one."""
    min_ratio: float = 2.0
    """Compress a matrix only if its factors have this many times fewer values."""
    feedback: bool = True
    """Add to the next gradient what was left out of this one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKOptions:
    """Arguments of `TopK`."""

    density: float = 0.01
    """Share of the values that are sent, those of largest magnitude."""
    start: int = 0
    """Optimizer steps that send gradients as they are, before the first compressed one."""
    feedback: bool = True
    """Add to the next gradient what was left out of this one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignOptions:
    """Arguments of `Sign`."""

    start: int = 0
    """Optimizer steps that send gradients as they are, before the first compressed one."""
    feedback: bool = True
    """Add to the next gradient what was left out of this one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Arguments of `Auto`."""

    steps: int = 3
    """Optimizer steps that are measured before a method is chosen."""
