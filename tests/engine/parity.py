"""The parity matrix's subjects, and the plain loop that they are compared with.

`plain_loop` is the reference: one process, torch alone. It shares no code with the engine or with Lightning's trainer.
"""

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from polyphase.engine import Engine
from polyphase.models import ByteGPT, Digits, DigitsClassifier, PythonSource

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}

STEPS = 20
FEW_STEPS = 6
"""Where what differs shows in the first steps."""
MICRO_BATCH = 8
"""Samples per micro-batch over all ranks: divisible by 1, 2 and 4 of them."""

TOLERANCE = 1e-5

STRATEGIES = {
    "single": 1,
    "ddp": 2,
    "zero1": 2,
    "fsdp": 2,
    "hsdp:replicate=2,shard=2": 4,
    "tp": 2,
    "fsdp+tp:tp=2": 4,
    "hsdp+tp:replicate=2,tp=2": 4,
    "pp:microbatches=4": 2,
    "pp+ddp:pipeline_size=2,microbatches=2": 4,
    "pp+fsdp:pipeline_size=2,microbatches=2": 4,
    "ps": 2,
}
"""World size by flag."""


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # Under Adam a parameter whose true gradient is zero (an attention key's bias) moves by rounding noise times the
    # learning rate; with this eps the noise stays noise.
    return adamw_of(module.parameters())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def muon_and_adamw(module: nn.Module) -> Any:
    """Muon for the matrices of hidden layers, AdamW for the rest, each with a schedule of its own."""
    hidden = {name: p for name, p in module.named_parameters() if p.ndim == 2 and ("blocks" in name or "net.2" in name)}
    assert hidden
    # A gradient that differs by 1e-8 may be rounded to another bfloat16, of which Muon makes up to 2**-8 of its step:
    # at this rate the noise of all steps stays below the tolerance.
    muon = torch.optim.Muon(hidden.values(), lr=2e-4)
    return _scheduled(muon, adamw_of(p for name, p in module.named_parameters() if name not in hidden))


def sgd_and_adamw(module: nn.Module) -> Any:
    """The same, where the size of a step is that of its gradient: with another norm to clip by, it would differ."""
    hidden = [p for p in module.parameters() if p.ndim == 2]
    return _scheduled(torch.optim.SGD(hidden, lr=0.5), adamw_of(p for p in module.parameters() if p.ndim != 2))


def two_of_sgd(module: nn.Module) -> Any:
    """Linear in their gradients."""
    first, *others = module.parameters()
    return _scheduled(torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.05))


def adamw_of(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with the eps of `adamw`."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4)


def _scheduled(first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> Any:
    schedules = [torch.optim.lr_scheduler.StepLR(first, 2, 0.5), torch.optim.lr_scheduler.ExponentialLR(second, 0.9)]
    return [first, second], [{"scheduler": schedule, "interval": "step"} for schedule in schedules]


class MLP(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        return nn.functional.cross_entropy(self.net(images.flatten(1)), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class SyncedDigits(DigitsClassifier):
    """BatchNorm over the batch of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        return nn.functional.cross_entropy(self(images), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class FrozenDigits(SyncedDigits):
    """BatchNorm that normalises by its running statistics and leaves them alone."""

    def train(self, mode: bool = True) -> "FrozenDigits":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self


class KnowsItsDevice(MLP):
    """Makes tensors on `self.device`, keeps a metric and a buffer, and says what its loss counts for."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric(nan_strategy="disable")  # to look for them is a read of the device
        self.register_buffer("offset", torch.full((1,), 0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, classes = batch
        scale = torch.full((1,), 2.0, device=self.device)
        logits = self.net(images.flatten(1) * scale + self.offset)
        loss = nn.functional.cross_entropy(logits, classes)
        self.mean.update(loss.detach())
        if self._trainer is None:  # the plain loop's
            return loss
        self.log("mean", self.mean)
        return {"loss": loss, "weight": len(classes)}


class TiedGPT(ByteGPT):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class WideVocabulary(LightningModule):
    """An embedding and an output layer that are larger than a block, and not tied."""

    def __init__(self, size: int = 256, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(size, dim)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(3))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, size, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def _digits(size: int) -> Dataset:
    data = Digits()
    data.setup("fit")
    return TensorDataset(*(tensor[:size] for tensor in data.parts["train"].tensors))


def _windows(size: int) -> Dataset:
    data = PythonSource(context_length=16, max_bytes=16 * size + 1)
    data.setup("fit")
    return data.train


def _digits64(size: int) -> Dataset:
    images, classes = _digits(size).tensors
    return TensorDataset(images.double(), classes)


class Subject(NamedTuple):
    module: Callable[[], LightningModule]
    data: Callable[[int], Dataset]
    sync_batchnorm: bool = False
    precision: str = "32-true"


SUBJECTS = {
    "mlp": Subject(MLP, _digits),
    "digits, BatchNorm frozen": Subject(lambda: FrozenDigits(width=8), _digits),
    # In float64: BatchNorm centres its output on the kinks of ReLU and MaxPool, where a rounding error of float32 sends
    # a gradient another way now and then (seen: equal to 2e-7 for eight steps, then 3e-5 apart).
    "digits, BatchNorm synced": Subject(lambda: SyncedDigits(width=8).double(), _digits64, True, "64-true"),
    "gpt, tied": Subject(lambda: TiedGPT(num_layers=2, num_heads=2, dim=16, context_length=16), _windows),
}

# Deep enough for two stages on each of two ranks.
ALL_SUBJECTS = SUBJECTS | {
    "gpt of four blocks, tied": Subject(
        lambda: TiedGPT(num_layers=4, num_heads=2, dim=16, context_length=16), SUBJECTS["gpt, tied"].data
    ),
    "knows its device": Subject(KnowsItsDevice, _digits),
    "wide vocabulary": Subject(WideVocabulary, _windows),
}


def build(name: str, make_optimizer: Callable[[nn.Module], Any] = adamw) -> LightningModule:
    """A subject. With `sgd` a step has few operators, each of which takes time under DTensor."""
    torch.manual_seed(1)
    module = ALL_SUBJECTS[name].module().train()  # Lightning leaves modules in the mode they come in
    if make_optimizer is not adamw:  # that of the subjects
        # Bound: a copy of the module, as the check of the first steps makes, is to optimize itself.
        module.configure_optimizers = MethodType(make_optimizer, module)
    return module


def loader(
    name: str, accumulate: int, world_size: int = 1, num_steps: int = STEPS, *, shuffle: bool = False
) -> DataLoader:
    data = ALL_SUBJECTS[name].data(num_steps * accumulate * MICRO_BATCH)
    return DataLoader(data, batch_size=MICRO_BATCH // world_size, shuffle=shuffle)


def plain_loop(
    module: LightningModule,
    batches: DataLoader,
    accumulate: int,
    clip: float | None,
    in_bf16: tuple[int, int] | None = None,
    make_optimizer: Callable[[nn.Module], Any] = adamw,
    num_epochs: int = 1,
) -> dict[str, Tensor]:
    """The weights after some epochs.

    With `in_bf16`, numbers of ranks and of replicas, the sum over the replicas' gradients is one of bfloat16.
    """
    module.train()
    made = make_optimizer(module)
    optimizers, schedules = made if isinstance(made, tuple) else ([made], [])
    micro_batches: Iterator[Any] = (batch for _ in range(num_epochs) for batch in batches)
    for _ in range(num_epochs * len(batches) // accumulate):
        for optimizer in optimizers:
            optimizer.zero_grad()
        window = [next(micro_batches) for _ in range(accumulate)]
        if in_bf16 is None:
            for batch in window:
                (module.training_step(batch, 0) / accumulate).backward()
        else:
            average_in_bf16(module, window, *in_bf16)
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule["scheduler"].step()
    return {key: value.clone() for key, value in module.state_dict().items()}


def average_in_bf16(module: LightningModule, window: list[Any], ranks: int, replicas: int) -> None:
    """Gradients of a window whose samples are dealt to `ranks`, neighbours of which form `replicas`."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p, dtype=torch.bfloat16) for p in parameters]
    for replica in range(replicas):
        mine = [i for i in range(MICRO_BATCH) if i % ranks // (ranks // replicas) == replica]
        module.zero_grad()
        for batch in window:
            part = batch[mine] if isinstance(batch, Tensor) else [tensor[mine] for tensor in batch]
            (module.training_step(part, 0) / len(window)).backward()
        for total, p in zip(sums, parameters, strict=True):
            total += (p.grad / replicas).bfloat16()
    for total, p in zip(sums, parameters, strict=True):
        p.grad = total.float()


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[key].double() - b[key].double()).abs().max().item() for key in a)


def differences(
    flag: str,
    devices: int,
    subject: str,
    accumulate: int,
    clip: float | None,
    in_bf16: tuple[int, int] | None = None,
    make_optimizer: Callable[[nn.Module], Any] = adamw,
    accelerator: str = "cpu",
    num_steps: int = STEPS,
    num_epochs: int = 1,
    **flags: object,
) -> float:
    """Trains a subject under a strategy; the largest difference of any weight from the plain loop's.

    Several epochs are shuffled, each in another order.
    """
    module = build(subject, make_optimizer)
    engine = Engine(
        strategy=flag,
        accelerator=accelerator,
        devices=devices,
        max_epochs=num_epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        sync_batchnorm=ALL_SUBJECTS[subject].sync_batchnorm and devices > 1,
        precision=ALL_SUBJECTS[subject].precision,
        **QUIET,
        **flags,
    )
    shuffle = num_epochs > 1
    torch.manual_seed(2)  # of the orders
    engine.fit(module, loader(subject, accumulate, engine.data_size, num_steps, shuffle=shuffle))
    # Last: a process that has run a backward where there is a device can't be forked.
    batches, reference = loader(subject, accumulate, num_steps=num_steps, shuffle=shuffle), build(subject)
    torch.manual_seed(2)
    expected = plain_loop(reference, batches, accumulate, clip, in_bf16, make_optimizer, num_epochs)
    return largest_difference(module.state_dict(), expected)


def suffixed(flag: str, suffix: str) -> str:
    """A strategy flag with the suffix of a launcher; one process needs none."""
    name, colon, options = flag.partition(":")
    return flag if name == "single" else f"{name}_{suffix}{colon}{options}"
