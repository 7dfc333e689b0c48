"""Parameters that are unfrozen in mid-training are averaged, whatever holds the wrapper around the module by then."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine.errors import RefusedError

from ..parity import largest_difference
from ..tiny import engine

NUM_BATCHES, SIZE = 12, 4
UNFREEZE = {4: "middle", 7: "bottom"}
"""The block that is unfrozen before a batch: before the first of a window of two batches, and within one."""


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bottom, self.middle, self.top = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)
        for block in (self.bottom, self.middle):
            block.requires_grad_(False)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.top(self.middle(self.bottom(batch[0]).tanh()).tanh()), batch[1])

    def unfreeze(self, batch_idx):
        if batch_idx in UNFREEZE:
            getattr(self, UNFREEZE[batch_idx]).requires_grad_(True)

    def on_train_batch_start(self, batch, batch_idx):
        self.unfreeze(batch_idx)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class HoldsTheWrapper(Net):
    """Leaves synchronisation out by itself: a context that is entered before blocks are unfrozen, and left later."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.without_sync = self.trainer.model.no_sync()
            self.without_sync.__enter__()
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if batch_idx % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2 == 1:
            optimizer.step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.without_sync.__exit__(None, None, None)


def double(_, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda sent: sent.value()[0])


class BringsItsHook(Net):
    """Registers a comm hook, by which two ranks' gradients are their sum: twice the mean."""

    def on_train_start(self):
        self.trainer.model.register_comm_hook(None, double)


def data():
    torch.manual_seed(1)
    return torch.randn(NUM_BATCHES * SIZE, 3), torch.randint(2, (NUM_BATCHES * SIZE,))


def plain_loop(factor, window=2):
    module, (inputs, targets) = Net(), data()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
    for i, batch in enumerate(zip(inputs.split(SIZE), targets.split(SIZE), strict=True)):
        module.unfreeze(i)
        if i % window == 0:
            optimizer.zero_grad()
        (module.loss(batch) * factor / window).backward()
        if i % window == window - 1:
            optimizer.step()
    return module.state_dict()


class Replicas(Callback):
    """Checks that the ranks have the same weights at the end."""

    def on_train_end(self, trainer, pl_module):
        weights = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
        of_ranks = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, weights)
        assert torch.equal(*of_ranks)


@pytest.mark.parametrize(
    ("strategy", "kind", "factor"),
    [("ddp", Net, 1), ("zero1", Net, 1), ("ddp", HoldsTheWrapper, 1), ("ddp", BringsItsHook, 2)],
)
def test_what_is_unfrozen_within_a_window_is_averaged(strategy, kind, factor):
    module = kind()
    window = {} if kind is HoldsTheWrapper else {"accumulate_grad_batches": 2}
    trainer = engine(strategy=f"{strategy}_fork", devices=2, callbacks=[Replicas()], **window)
    trainer.fit(module, DataLoader(TensorDataset(*data()), batch_size=SIZE // 2))
    expected = plain_loop(factor)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(
            value, expected[name], atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


class Pretrained(LightningModule):
    """A backbone of repeated blocks, which tensor parallelism splits, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(2))
        self.backbone, self.head = nn.Sequential(*blocks), nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def finetuned(strategy: str) -> dict[str, torch.Tensor]:
    module, devices = Pretrained(), 1 if strategy == "single" else 2
    unfreezes = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1, verbose=False)
    trainer = engine(strategy=strategy, devices=devices, max_epochs=3, callbacks=[unfreezes])
    trainer.fit(module, DataLoader(TensorDataset(*data()), batch_size=SIZE // trainer.data_size))
    return module.state_dict()


@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork", "tp_fork", "zero1_fork"])
def test_a_backbone_is_added_to_the_optimizer_as_in_one_process(strategy):
    """Lightning compares parameters by value, also those that are split with those that are not."""
    assert largest_difference(finetuned(strategy), finetuned("single")) <= 1e-6


def test_a_pipeline_refuses_it_before_a_process_starts():
    with pytest.raises(RefusedError, match="BackboneFinetuning compares the parameters that it unfreezes"):
        finetuned("pp_fork:microbatches=2")
