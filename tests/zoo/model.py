"""What a model of the zoo is, and the loop in one process that it is compared with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 3
BATCH = 8
"""Samples of a step, over all ranks."""


class Model(NamedTuple):
    """A module as a user writes it, and its data."""

    make: Callable[[], LightningModule]
    data: Callable[[int], tuple[Tensor, ...]]
    """Tensors of so many samples."""
    note: str = ""
    """What is special about it."""
    is_random: bool = False
    """It draws random numbers as it runs, other ones on each rank: that it runs is all that can be compared."""
    is_mean: bool = True
    """Its loss is a mean over samples; else ranks, and micro-batches, each compute another one, as under any DDP."""
    sync_batchnorm: bool = False
    """The engine is told so: BatchNorm sees the batch of all ranks."""


class Zoo(LightningModule):
    """Trained by SGD, in which a wrong gradient shows at its size."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Wrapped(Zoo):
    """A model of somebody else's in a LightningModule, with the loss that it computes itself."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**dict(zip(self.names, batch, strict=True))).loss


def build(model: Model) -> LightningModule:
    torch.manual_seed(1)
    return model.make().train()


def loader(model: Model, ranks: int = 1) -> DataLoader:
    torch.manual_seed(2)
    return DataLoader(TensorDataset(*model.data(STEPS * BATCH)), batch_size=BATCH // ranks)


def by_rank(tensor: Tensor) -> list[Tensor]:
    """The samples of each of two ranks."""
    return [tensor[rank::2] for rank in range(2)]


def by_micro_batch(tensor: Tensor) -> list[Tensor]:
    """The micro-batches of two pipeline stages: two for each."""
    return list(tensor.chunk(4))


def plain_loop(model: Model, clip: float | None = None, device: str = "cpu", cut: Any = None) -> dict[str, Tensor]:
    """The weights after `STEPS` batches, by torch alone: no trainer, no strategy.

    Args:
        model: of the zoo.
        clip: largest norm of all gradients; None for any.
        device: where it is trained.
        cut: cuts the tensors of a batch into parts, the mean of whose losses is trained; None for the batch's own loss.
    """
    module = build(model).to(device)
    module.configure_model()
    configured: Any = module.configure_optimizers()
    optimizers = list(configured) if isinstance(configured, (tuple, list)) else [configured]
    by_hand: Any = module  # what a trainer would give to a module that optimizes by hand, in terms of torch
    by_hand.optimizers = lambda: optimizers if len(optimizers) > 1 else optimizers[0]
    by_hand.manual_backward = lambda loss, **kwargs: loss.backward(**kwargs)
    by_hand.toggle_optimizer = lambda optimizer: _toggle(module, optimizer)
    by_hand.untoggle_optimizer = lambda optimizer: module.requires_grad_(True)
    by_hand.all_gather = lambda tensor, sync_grads=False: tensor.unsqueeze(0)
    by_hand.log = lambda *_, **__: None
    for index, of_host in enumerate(loader(model)):
        batch = [tensor.to(device) for tensor in of_host]
        module.on_train_batch_start(batch, index)
        if not module.automatic_optimization:
            module.on_train_batch_end(module.training_step(batch, index), batch, index)
            continue
        [optimizer] = optimizers
        found: list[Any] = []

        def closure() -> Tensor:
            parts = [batch] if cut is None else zip(*map(cut, batch), strict=True)  # noqa: B023
            outputs = [module.training_step(part, index) for part in parts]  # noqa: B023
            loss = torch.stack([each["loss"] if isinstance(each, dict) else each for each in outputs]).mean()
            found.append(outputs[0])  # noqa: B023
            module.on_before_zero_grad(optimizer)  # noqa: B023
            module.optimizer_zero_grad(0, index, optimizer)  # noqa: B023
            module.on_before_backward(loss)
            loss.backward()
            module.on_after_backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            module.on_before_optimizer_step(optimizer)  # noqa: B023
            return loss

        if "optimizer_step" in vars(type(module)):
            module.optimizer_step(0, index, optimizer, closure)
        else:
            optimizer.step(closure)
        module.on_train_batch_end(found[0], batch, index)  # where an average over the steps is usually updated
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _toggle(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in module.parameters():
        parameter.requires_grad_(id(parameter) in own)
