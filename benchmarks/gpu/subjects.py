"""What the checks train, the loop by hand that they are compared with, and the engine's runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from polyphase.engine import Engine, register_strategy
from polyphase.engine.loop import compile
from polyphase.engine.strategies.fsdp.strategy import FSDP
from polyphase.engine.strategies.options import FSDPOptions, PPOptions, TPOptions
from polyphase.engine.strategies.pipeline.strategy import Pipeline
from polyphase.engine.strategies.tensor import TensorParallel
from polyphase.models import ByteGPT, PythonSource

from . import device

__all__ = [
    "FSDP_OF_ONE",
    "GPT",
    "MLP",
    "PP_OF_ONE",
    "QUIET",
    "STEPS",
    "TP_OF_ONE",
    "by_hand",
    "close",
    "compiler",
    "engine",
    "largest_difference",
    "rows",
    "text",
    "weights",
]

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
STEPS = 20
# On one device the flags "fsdp", "tp" and "pp" mean "single"; these shard, split and schedule there, too.
FSDP_OF_ONE, TP_OF_ONE, PP_OF_ONE = "fsdp_of_one", "tp_of_one", "pp_of_one"
register_strategy(FSDP_OF_ONE, FSDP, options=FSDPOptions, description="shards, also on one device")
register_strategy(TP_OF_ONE, TensorParallel, options=TPOptions, description="splits layers, also on one device")
register_strategy(PP_OF_ONE, Pipeline, options=PPOptions, description="a pipeline, also on one device")
TOLERANCE = 1e-5
BATCH_SIZE = 8


def compiler() -> str:
    """The backend for `torch.compile`: inductor, or one that runs graphs as they are where inductor has no code.

    The engine's own has what is here run so, too.
    """
    if device.kind() == "cuda":
        return "inductor"
    compile._Backend._compile_graph = lambda _, graph, inputs: aot_eager(graph, inputs)  # type: ignore[method-assign]
    return "aot_eager"


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # Under Adam a parameter whose true gradient is zero moves by rounding noise; with this eps the noise stays noise.
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4)


class GPT(ByteGPT):
    """Four blocks, which keep a metric and make a tensor on the device they are on."""

    def __init__(self, dropout: float = 0.0) -> None:
        dim, heads, context = (16, 2, 16) if device.smoke() else (256, 4, 128)
        super().__init__(num_layers=4, num_heads=heads, dim=dim, context_length=context, dropout=dropout)
        if device.simulated() is not None:
            # Other than CUDA's its tensors can't take the place of the CPU's: a module that moves loses its ties.
            self.net.head.weight = nn.Parameter(self.net.head.weight.detach().clone())
        self.mean = MeanMetric(nan_strategy="disable")  # to look for them is a read of the device

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch) + torch.zeros(1, device=self.device).sum()
        self.mean.update(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return adamw(self)


class MLP(LightningModule):
    """Layers whose kernels add up in the same order each time."""

    def __init__(self) -> None:
        super().__init__()
        dim = 32 if device.smoke() else 1024
        self.net = nn.Sequential(nn.Linear(64, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, classes = batch
        return nn.functional.cross_entropy(self.net(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def text(steps: int = STEPS, batch_size: int = BATCH_SIZE, **options: Any) -> DataLoader:
    """Windows of the standard library's sources."""
    length = 16 if device.smoke() else 128
    data = PythonSource(context_length=length, max_bytes=length * steps * batch_size + 1)
    data.setup("fit")
    assert data.train is not None
    return DataLoader(data.train, batch_size, **options)


def rows(steps: int = STEPS, batch_size: int = BATCH_SIZE, **options: Any) -> DataLoader:
    """Random numbers and classes."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(steps * batch_size, 64, generator=generator)
    classes: Dataset = TensorDataset(numbers, torch.randint(10, (len(numbers),), generator=generator))
    return DataLoader(classes, batch_size, **options)


def data_of(make: Any, steps: int) -> DataLoader:
    """Returns the batches that a class of modules is trained on."""
    return rows(steps) if issubclass(make, MLP) else text(steps)


def seeded(make: Any, *arguments: Any) -> Any:
    torch.manual_seed(1)
    return make(*arguments).train()


def engine(strategy: str = "single", **flags: Any) -> Engine:
    """One process on the first device, unless `flags` have more."""
    accelerator = {"accelerator": device.kind(), "devices": 1, "max_steps": STEPS}
    return Engine(strategy=strategy, **{**QUIET, **accelerator, **flags})


def weights(module: nn.Module) -> dict[str, Tensor]:
    """In host memory, whatever becomes of the module."""
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in module.state_dict().items()}
    return {name: tensor.detach().cpu().clone() for name, tensor in whole.items()}


class AtEnd(Callback):
    """Keeps the weights as they are when training ends, where they were trained."""

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.weights = weights(pl_module)


def trained(
    make: Any,
    strategy: str = "single",
    batches: DataLoader | None = None,
    ckpt_path: Path | None = None,
    **flags: Any,
) -> dict[str, Tensor]:
    """The weights of a module that the engine has trained."""
    module = seeded(make)
    end = AtEnd()
    trainer = engine(strategy, **{**flags, "callbacks": [*flags.get("callbacks", []), end]})
    trainer.fit(module, data_of(make, STEPS) if batches is None else batches, ckpt_path=ckpt_path)
    assert trainer.global_step == trainer.max_steps, f"{trainer.global_step} of {trainer.max_steps} steps"
    return end.weights


def by_hand(make: Any, clip: float | None = None, accumulate: int = 1) -> dict[str, Tensor]:
    """The weights after as many steps of a loop that has nothing of Lightning, nor of the engine, on the device."""
    module = seeded(make).to(device.root())
    optimizer = adamw(module)
    batches: Iterator[Any] = iter(data_of(make, STEPS * accumulate))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulate):
            batch = next(batches)
            there = batch.to(device.root()) if isinstance(batch, Tensor) else [x.to(device.root()) for x in batch]
            (module.training_step(there, 0) / accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return weights(module)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of any number in either."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    differences = [(a[name].double() - b[name].double()).abs().max() for name in a]
    return float(torch.stack(differences).max())  # NaN where one of them is


def close(what: str, a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = TOLERANCE) -> str:
    """Says how far weights are apart.

    Raises:
        AssertionError: by more than `tolerance`.
    """
    difference = largest_difference(a, b)
    assert difference <= tolerance, f"{what}: weights differ by {difference:.2e}, more than {tolerance:g}"
    return f"{what} {difference:.1e}"
