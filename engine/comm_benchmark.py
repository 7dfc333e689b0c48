"""The speed of this cluster's network, and the compression under which a module trains fastest there."""

import dataclasses
import json
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from .compression import Forecast, Link
from .compression.forecast import advice

__all__ = ["NUM_STEPS", "ReportWriter", "WireReport"]

NUM_STEPS = 6
"""Steps until `compression="auto"` has chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireReport:
    """The result of `Engine.bench_comm`."""

    num_ranks: int
    links: dict[str, Link]
    """Latency and bandwidth between the ranks, by collective."""
    forecasts: list[Forecast]
    """Forecasts of a step, one for each compression."""
    recommended: str
    """The compression to set; may be ``"none"``."""

    def __str__(self) -> str:
        lines = [f"between {self.num_ranks} ranks     latency    bandwidth"]
        lines += [
            f"  {name:20} {1e3 * link.latency_s:7.2f} ms {link.bytes_per_s / 1e6:7.1f} MB/s"
            for name, link in self.links.items()
        ]
        lines.append("compression             step (forecast)   times none   sent by a rank")
        plain_s = next((forecast.step_s for forecast in self.forecasts if forecast.compression == "none"), None)
        lines += [
            f"  {forecast.compression:20} {1e3 * forecast.step_s:12.1f} ms"
            + (f" {forecast.step_s / plain_s:12.3f}" if plain_s else " " * 13)
            + f" {forecast.sent_bytes / 1e6:13.3f} MB"
            for forecast in self.forecasts
        ]
        why = "compression saves no time here" if self.recommended == "none" else "the fastest, or nearly"
        lines.append(f"recommended: compression={self.recommended!r} ({why})")
        return "\n".join([*lines, advice(self.forecasts, self.links, self.num_ranks)])

    @classmethod
    def read(cls, path: Path) -> "WireReport":
        """Reads the report that `ReportWriter` wrote."""
        content = json.loads(path.read_text())
        return cls(
            num_ranks=content["num_ranks"],
            links={name: Link(*link) for name, link in content["links"].items()},
            forecasts=[Forecast(*values) for values in content["forecasts"]],
            recommended=content["recommended"],
        )


class ReportWriter(Callback):
    """Writes the result of `compression="auto"` to `path` on rank 0, since another process may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """To be called on all ranks."""
        hook = trainer.strategy.comm_hook  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            report = WireReport(
                num_ranks=trainer.world_size, links=hook.links, forecasts=hook.forecasts, recommended=hook.chosen
            )
            self.path.write_text(json.dumps(dataclasses.asdict(report)))
