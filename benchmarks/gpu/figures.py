"""Figures of training ByteGPT in bf16-mixed: the engine beside a loop by hand and stock Lightning, on all devices.

The loop by hand and stock Lightning have what torch and Lightning bring: one device, DistributedDataParallel, and
`fully_shard` on each block, which under Lightning is its `ModelParallelStrategy` with a `configure_model`. Compiled,
they compile each block, as torchtitan does; the loop by hand shards as that does, too: parameters are gathered in bf16,
and with "selective" a block keeps the outputs of its products and of attention, and computes the rest again.
All have torch's fused AdamW.
"""

import functools
import os
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from polyphase.doctor.flops import peak_of
from polyphase.engine import Engine
from polyphase.engine.precision import OF_BLOCKS
from polyphase.models import ByteGPT, PythonSource

from . import device
from .meter import Meter
from .subjects import QUIET, compiler

SHAPES = {
    "124M": {"num_layers": 12, "num_heads": 12, "dim": 768},
    "350M": {"num_layers": 24, "num_heads": 16, "dim": 1024},
    "1.3B": {"num_layers": 24, "num_heads": 32, "dim": 2048},
}
LEAST_GB = {"1.3B": 70}


class Metered(ByteGPT):
    """With a meter in place of its own logging, and a constant learning rate."""

    def __init__(
        self,
        size: str,
        meter: Meter,
        *,
        shards_itself: bool = False,
        compiles_blocks: bool = False,
        recomputes_blocks: bool = False,
    ) -> None:
        shape = {"context_length": 1024, **SHAPES[size]}
        if device.smoke():
            shape = {"context_length": 16, "num_layers": 4, "num_heads": 2, "dim": 16}
        super().__init__(**shape)
        self.shape, self.meter, self.shards_itself = shape, meter, shards_itself
        for block in self.net.blocks:
            if recomputes_blocks:
                block.forward = functools.partial(  # type: ignore[method-assign]
                    checkpoint, block.forward, use_reentrant=False, context_fn=_selective
                )
            if compiles_blocks:
                block.compile(backend=compiler())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.meter.tick()
        return self._loss(batch)

    def forward(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return self.net(tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, weight_decay=0.1, fused=device.kind() == "cuda")

    def configure_model(self) -> None:  # what stock Lightning has users write for FSDP2
        if self.shards_itself and self._trainer is not None:
            self.to(self.trainer.strategy.root_device)  # parameters that are meant to move; FSDP2 changes their data
            shard(self, self.device_mesh["data_parallel"])  # type: ignore[index]


def _kept(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    aten = torch.ops.aten
    attention = (
        aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    )  # fmt: skip
    is_kept = operator in {packet.default for packet in (aten.mm, aten.addmm, *attention)}
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


_selective = functools.partial(create_selective_checkpoint_contexts, _kept)


class LossOf(nn.Module):
    """DistributedDataParallel calls `forward`."""

    def __init__(self, module: Metered) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Tensor) -> Tensor:
        return self.module.training_step(batch, 0)


def shard(module: Metered, mesh: Any, **options: Any) -> None:
    """As torch's tutorial has it."""
    for block in module.net.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(module.net, mesh=mesh, **options)


def training(contestant: str, size: str, strategy: str, *settings: str) -> dict[str, str]:
    """A row of the table.

    Args:
        contestant: ``"Engine"``, or ``"by hand"`` or ``"Trainer"`` for a strategy that they have.
        size: of `SHAPES`.
        strategy: the engine's flag.
        settings: ``"compile"``, ``"selective"``, a precision other than bf16-mixed, and ``"65k"`` for a step of so many
            tokens in place of 16k.
    """
    memory_gb = device.total_gb()
    if memory_gb < LEAST_GB.get(size, 0) and not device.smoke():
        raise device.NotRunError(f"needs {LEAST_GB[size]} GB, and the device has {memory_gb:.0f}")
    if "compile" in settings:
        compiler()
    if contestant == "Trainer" and strategy == "ddp":
        device.needs_cuda("Lightning's DDPStrategy makes a stream of torch.cuda on any accelerator")
    if "float8" in settings and find_spec("torchao") is None:
        raise device.NotRunError("needs torchao")
    timed = 3 if device.smoke() else 20
    meter = Meter(warm_up=5, timed=timed, counted=3)
    compiles, recomputes = "compile" in settings, "selective" in settings
    precision = next((name for name in settings if name in OF_BLOCKS), "bf16-mixed")
    flags = {"compile": compiles, "activation_checkpointing": "selective" if recomputes else "none"}
    batch_size = 2 if device.smoke() else 64 if "65k" in settings else 16
    # "pp" cuts a batch, which all of its ranks share; so do the ranks of "tp".
    num_devices = 1 if strategy == "single" else device.count()
    torch.manual_seed(1)
    is_stock_fsdp = contestant == "Trainer" and strategy == "fsdp"
    with device.root():  # a host draws a billion numbers for half a minute
        module = Metered(
            size, meter, shards_itself=is_stock_fsdp, compiles_blocks=compiles and contestant != "Engine",
            recomputes_blocks=recomputes and contestant != "Engine",
        )  # fmt: skip
    replicas = num_devices if strategy in ("ddp", "fsdp") else 1
    batches = _text(module.shape["context_length"], meter.steps * batch_size * replicas, batch_size)
    device.empty()
    if contestant == "by hand":
        _by_hand(module, strategy, batches, num_devices)
    else:
        make, flag = (Engine, strategy) if contestant == "Engine" else (Trainer, _stock(strategy, num_devices))
        trainer = make(
            strategy=flag, accelerator=device.kind(), devices=num_devices, max_epochs=1,
            precision=precision, log_every_n_steps=10**6, **QUIET, **(flags if contestant == "Engine" else {}),
        )  # fmt: skip
        trainer.fit(module, batches)
    context, layers, dim = (module.shape[name] for name in ("context_length", "num_layers", "dim"))
    tokens_per_s = batch_size * replicas * context / meter.step_s
    # Palm's count (Chowdhery et al. 2022): six for each weight, and attention's two products, forward and backward.
    numel = 12 * layers * dim**2 + 256 * dim
    flops = tokens_per_s * (6 * numel + 12 * layers * dim * context)
    peak_flops = peak_of(device.about()["name"], "bf16") or _flops()
    return {
        "size": size,
        "strategy": strategy,
        "compile": "yes" if compiles else "no",
        "devices": str(num_devices),
        "tokens per step": str(batch_size * replicas * context),
        "loop": " ".join([contestant, *(name for name in settings if name in (*OF_BLOCKS, "selective"))]),
        "tokens/s": f"{tokens_per_s:.0f}",
        "ms per step": f"{1e3 * meter.step_s:.2f}",
        "slowest": f"{1e3 * meter.slowest_s:.2f}",
        "MFU": f"{flops / num_devices / peak_flops:.1%}",
        "peak GB": f"{meter.peak / 1e9:.3f}",
        "host waits per step": f"{meter.waits['waits']:g}",
    }


def _flops() -> float:
    """Of a large product in bf16, for a device that the table of data sheets does not have."""
    n = 128 if device.smoke() else 8192
    a = torch.randn(n, n, device=device.root(), dtype=torch.bfloat16)
    return 2 * n**3 / device.time_s(lambda: a @ a)


def _stock(strategy: str, num_devices: int) -> Any:
    if strategy == "fsdp":
        return ModelParallelStrategy(data_parallel_size=num_devices, tensor_parallel_size=1)
    return "auto" if strategy == "single" else strategy


def _text(length: int, num_windows: int, batch_size: int) -> DataLoader:
    data = PythonSource(context_length=length, max_bytes=length * num_windows + 1)
    data.setup("fit")
    assert data.train is not None
    repeated = torch.utils.data.ConcatDataset([data.train] * -(-num_windows // len(data.train)))
    return DataLoader(torch.utils.data.Subset(repeated, range(num_windows)), batch_size, pin_memory=True)


def _by_hand(module: Metered, strategy: str, batches: DataLoader, num_devices: int) -> None:
    if num_devices > 1:
        raise device.NotRunError("the loop by hand is one process")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    there = torch.device(device.kind(), rank)
    if strategy != "single" and not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, device_id=there)
    module.to(there)
    step: nn.Module = LossOf(module)
    if strategy == "ddp":
        step = DistributedDataParallel(step, device_ids=[rank], gradient_as_bucket_view=True)
    elif strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(module, init_device_mesh(device.kind(), (num_devices,)), mp_policy=policy)
    optimizer = module.configure_optimizers()
    for batch in batches:
        with torch.autocast(device.kind(), torch.bfloat16):
            loss = step(batch.to(there, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if module.meter.is_done:
            return
