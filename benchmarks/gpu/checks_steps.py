"""Checks of what training computes on one device, under each strategy of one rank."""

import random
import statistics
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from polyphase.engine.strategies.float8 import Float8Precision

from . import device
from .meter import Meter
from .subjects import (
    FSDP_OF_ONE,
    GPT,
    MLP,
    PP_OF_ONE,
    QUIET,
    STEPS,
    TP_OF_ONE,
    by_hand,
    close,
    compiler,
    engine,
    rows,
    seeded,
    trained,
    weights,
)


def strategies() -> str:
    expected = by_hand(GPT)
    flags = ("single", "ddp", FSDP_OF_ONE, TP_OF_ONE, PP_OF_ONE)
    return ", ".join(close(flag, trained(GPT, flag), expected) for flag in flags)


# --- small steps


class Small(MLP):
    """A step that costs the device next to nothing, so that what is left is the host's."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.net, self.meter = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)), meter

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.meter.tick()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def overhead() -> str:
    steps, rounds = (20, 1) if device.smoke() else (400, 5)
    times: dict[str, list[float]] = {"by hand": [], "Engine": [], "Trainer": []}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(times), len(times)):
            times[name].append(_small_step_us(name, steps))
    hand, ours, stock = (statistics.median(times[name]) for name in times)
    seen = f"by hand {hand:.0f} us, Engine {ours - hand:+.0f}, Trainer {stock - hand:+.0f}"
    # A quarter on an idle machine; half of it is certainly no noise.
    assert device.smoke() or ours - hand < 0.5 * (stock - hand), f"{seen}: more than half of Trainer's own time"
    return seen


def _small_step_us(name: str, steps: int) -> float:
    meter = Meter(warm_up=20, timed=steps)
    data = TensorDataset(torch.randn(8 * meter.steps, 32), torch.randint(10, (8 * meter.steps,)))
    batches = DataLoader(data, 8, pin_memory=True)
    module = seeded(Small, meter)
    if name == "by hand":
        module.to(device.root())
        optimizer = module.configure_optimizers()
        for batch in batches:
            loss = module.training_step([x.to(device.root(), non_blocking=True) for x in batch], 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    else:
        make = Engine if name == "Engine" else Trainer
        make(accelerator=device.kind(), devices=1, max_epochs=1, **QUIET).fit(module, batches)
    return 1e6 * meter.step_s


# --- host memory, 16 bit, graphs


class Weighed(MLP):
    """Says what its loss counts for."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "weight": len(batch[0])}


def offload() -> str:
    flags = {"strategy": FSDP_OF_ONE, "offload": "parameters"}
    seen = [close("clipped", trained(MLP, **flags, gradient_clip_val=0.05), by_hand(MLP, clip=0.05))]
    seen += [close("weighed", trained(Weighed, **flags), by_hand(MLP))]
    half = {"precision": "16-mixed"}
    # Half precision rounds at other places in a sharded module: a few steps of 1e-3 apart at most.
    seen += [close("16-mixed", trained(MLP, **flags, **half), trained(MLP, **half), 5e-3)]
    return ", ".join(seen)


def cuda_graphs() -> str:
    seen = []
    for accumulate in (1, 2):
        expected = by_hand(MLP, accumulate=accumulate)
        device.needs_cuda("CUDA graphs")
        batches = rows(STEPS * accumulate)
        found = trained(
            MLP, "single", batches, compile="reduce-overhead", accumulate_grad_batches=accumulate
        )  # fmt: skip
        seen.append(close(f"accumulation of {accumulate}", found, expected, 1e-4))
    return ", ".join(seen)


def compiled() -> str:
    selective: dict[str, Any] = {"activation_checkpointing": "selective"}
    mixed = {"precision": "bf16-mixed"}
    cells: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("single", selective, {}),
        (FSDP_OF_ONE, selective, mixed),
        ("single", {}, {}),
        ("ddp", {}, {}),
        (FSDP_OF_ONE, {}, {}),
        (TP_OF_ONE, {}, {}),
    ]
    compiler()
    if device.kind() != "cuda":
        cells = cells[:2]
    seen = []
    for flag, flags, precision in cells:
        found, expected = trained(GPT, flag, compile=True, **flags, **precision), trained(GPT, flag, **precision)
        # Fused, sums are in another order; Adam makes steps of a few of the smallest gradients' noise. A graph rounds
        # to 16 bits in fewer places: a few steps of 1e-3 apart at most.
        name, tolerance = " ".join([flag, *flags.values(), *precision.values()]), 5e-3 if precision else 1e-3
        seen += [close(name, found, expected, tolerance)]
    return ", ".join(seen)


def float8() -> str:
    """Products beside those in bfloat16, and compiled steps beside eager ones."""
    if find_spec("torchao") is None:
        raise device.NotRunError("needs torchao")
    compiler()
    n = 64 if device.smoke() else 4096
    seen = []
    for name, largest in (("float8", 0.07), ("float8-rowwise", 0.045)):  # as tests/engine/strategies/test_float8.py
        layers = nn.Sequential(nn.Linear(n, n), nn.Linear(n, n)).to(device.root())
        plugin = Float8Precision(name, device.kind())
        x = torch.randn(n - 9, n, device=device.root())  # no multiple of 16
        products = []
        for convert in (lambda layers: layers, plugin.convert_module):
            layers.zero_grad()
            with plugin.forward_context():
                output = convert(layers)[0](x)
            output.backward(torch.ones_like(output).cumsum(1) / n)
            products.append((output.detach().float(), layers[0].weight.grad.clone()))
        apart = [float((ours - theirs).norm() / theirs.norm()) for theirs, ours in zip(*products, strict=True)]
        assert 0 < max(apart) < largest, f"{name}: product and gradient are {apart} from those in bfloat16"
        both = [trained(GPT, precision=name, compile=compiles) for compiles in (True, False)]
        seen += [f"{name} {apart[0]:.1%}, {apart[1]:.1%}", close("compiled", *both, 5e-3)]
    return ", ".join(seen)


class Overflows(MLP):
    """One loss is infinite."""

    fused = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 5 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.fused or None)


class Fused(Overflows):
    """With torch's fused AdamW, which is handed the loss scale."""

    fused = True


class Around(Callback):
    """The weights before and after the batch of the infinity, and after the next one."""

    def __init__(self) -> None:
        self.norms: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        total = torch.stack([p.detach().double().abs().sum().cpu() for p in local_parameters(pl_module)])
        self.norms[batch_idx] = float(total.sum())


def local_parameters(module: nn.Module) -> list[Tensor]:
    """This rank's part of each parameter."""
    return [getattr(p, "_local_tensor", p) for p in module.parameters()]  # torch: DTensor's own part


def overflow() -> str:
    seen = []
    for make, flag, hook in (
        (Overflows, "single", "none"),
        (Overflows, FSDP_OF_ONE, "none"),
        (Fused, "single", "none"),
        (Overflows, "ddp", "topk:0.1,start=0"),
    ):
        around, module = Around(), seeded(make)
        flags = {"precision": "16-mixed", "compression": hook, "callbacks": [around], "nonfinite": "ignore"}
        engine(flag, max_steps=-1, max_epochs=1, **flags).fit(module, rows(12))
        norms, name = around.norms, f"{flag} {hook} {make.__name__}"
        assert norms[5] == norms[4], f"{name}: the step with an infinity has changed the weights"
        assert norms[11] != norms[5], f"{name}: no step after it has changed the weights"
        assert all(torch.isfinite(tensor).all() for tensor in weights(module).values()), f"{name}: weights not finite"
        seen.append(name)
    return "; ".join(seen)


# --- warnings


def no_warnings() -> str:
    warnings.simplefilter("error")
    for line in ("The '.*_dataloader' does not have many workers", r".*isinstance\(treespec, LeafSpec\)"):
        warnings.filterwarnings("ignore", line)  # advice about workers; Lightning 2.6 on torch 2.13
    warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")
    return close("ddp", trained(MLP, "ddp"), by_hand(MLP))
