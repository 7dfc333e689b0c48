"""Checks of what the host waits for between two loggings."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from . import device
from .meter import Meter
from .subjects import FSDP_OF_ONE, MLP, engine, rows, seeded


class Metered(MLP):
    """Weighs its loss by a number, by a tensor, or not at all."""

    def __init__(self, meter: Meter, weight: str) -> None:
        super().__init__()
        self.meter, self.weight = meter, weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.meter.tick()
        loss = super().training_step(batch, batch_idx)
        if self.weight == "none":
            return loss
        number = len(batch[0])
        return {"loss": loss, "weight": number if self.weight == "number" else torch.full_like(loss, number)}


def waits() -> str:
    seen = []
    for pinned, weight, flags, most in (
        (True, "none", {}, 0),
        (True, "number", {}, 0),
        (True, "tensor", {}, 0),
        (False, "none", {}, 0),
        (True, "none", {"precision": "bf16-mixed"}, 0),
        (True, "none", {"strategy": "ddp", "compression": "powersgd:2,start=0"}, 0),
        (True, "none", {"strategy": FSDP_OF_ONE}, 0),
        # torch's own loss scale reads whether there was an infinity, once per step.
        (True, "none", {"precision": "16-mixed"}, 1),
    ):
        meter = Meter(warm_up=10, counted=10 if device.smoke() else 50)
        batches = rows(meter.steps, pin_memory=pinned)
        run: dict[str, Any] = {"max_steps": -1, "max_epochs": 1, "log_every_n_steps": 10**6, **flags}
        engine(**run).fit(seeded(Metered, meter, weight), batches)
        name = f"{'pinned' if pinned else 'pageable'}, weight {weight}, {' '.join(flags.values()) or 'single'}"
        # From pageable memory a copy waits, whoever asks for it: once for the rows, once for the classes.
        allowed = {"waits": most + (0 if pinned else 2), "pageable": 0 if pinned else 2}
        found = {what: round(number, 2) for what, number in meter.waits.items()}
        assert all(found[what] <= number for what, number in allowed.items()), f"{name}: {found} per step"
        assert pinned or found["pageable"] == 2, f"the counter does not see pageable copies: {found}"
        seen.append(f"{name}: {found['waits']:g}")
    return "; ".join(seen)


# --- images


class Images(MLP):
    """One small layer: the copy of the batch is most of a step."""

    def __init__(self, meter: Meter, pixels: int) -> None:
        super().__init__()
        self.net, self.meter = nn.Sequential(nn.Flatten(2), nn.Linear(pixels, 8)), meter

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.meter.tick()
        return self.net(batch[0]).square().mean()


def images() -> str:
    size, side, timed = (4, 32, 5) if device.smoke() else (256, 224, 20)
    times = {}
    for pinned in (True, False):
        meter = Meter(warm_up=5, timed=timed, counted=5)
        data = TensorDataset(torch.randn(size, 3, side, side).expand(meter.steps, -1, -1, -1, -1))
        # A batch is an item, in memory that is there already, so that no loader is the limit.
        batches: DataLoader = DataLoader(data, batch_size=None, pin_memory=pinned)
        engine(max_steps=-1, max_epochs=1, log_every_n_steps=10**6).fit(seeded(Images, meter, side * side), batches)
        times[pinned] = 1e3 * meter.step_s
        assert (meter.waits["pageable"] == 0) == pinned, f"pinned {pinned}: {meter.waits} per step"
        assert not pinned or meter.waits["waits"] == 0, f"pinned images are waited for: {meter.waits} per step"
    return f"a step of {size}x3x{side}x{side}: pinned {times[True]:.1f} ms, pageable {times[False]:.1f} ms"
