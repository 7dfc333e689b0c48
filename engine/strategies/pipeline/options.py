"""What follows the colon of the flags `pp`, `pp+ddp` and `pp+fsdp`."""

import dataclasses
from typing import Literal

from ...flags import check_count, check_number

__all__ = ["PPDDPOptions", "PPFSDPOptions", "PPOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOptions:
    """What follows the colon of the `pp` flag."""

    stages: int | None = None
    """Number of ranks in a pipeline; left out, all processes, or what `replicate` or `shard` leaves over, or 2."""
    microbatches: int | None = None
    """Number of equal parts that a batch is cut into; left out, the largest that divides it up to 2 x `stages`."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    """Order of the micro-batches' forwards and backwards."""
    chunks: int | None = None
    """Stages on each rank; left out, 2 for `interleaved` and 1 for all others."""
    timeout_s: float = 1800.0
    """How long a collective may wait for the other ranks, in seconds."""

    def __post_init__(self) -> None:
        check_number("pp:timeout_s", self.timeout_s, above=0)
        for name in ("stages", "microbatches", "chunks"):
            if getattr(self, name) is not None:
                check_count(f"pp:{name}", getattr(self, name))
        if self.schedule in ("1f1b", "gpipe") and self.chunks not in (None, 1):
            raise ValueError(
                f"pp:chunks={self.chunks} needs schedule=interleaved or zero-bubble: {self.schedule} has one stage on"
                " each rank."
            )

    @property
    def stages_per_rank(self) -> int:
        """The number that `chunks` stands for."""
        return self.chunks or (2 if self.schedule == "interleaved" else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPDDPOptions(PPOptions):
    """What follows the colon of the `pp+ddp` flag: `pp`'s options, with `replicate`."""

    replicate: int | None = None
    """Number of pipelines, each with samples of its own; left out, what `stages` leaves over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPFSDPOptions(PPOptions):
    """What follows the colon of the `pp+fsdp` flag: `pp`'s options, with `shard`."""

    shard: int | None = None
    """Number of shards of each stage, each with samples of its own; left out, what `stages` leaves over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages_per_rank > 1 or self.schedule == "zero-bubble":
            raise ValueError(
                f"strategy 'pp+fsdp' can't do schedule={self.schedule}: with sharded stages it does 1f1b and gpipe."
                " Choose one of them, or pp+ddp."
            )
