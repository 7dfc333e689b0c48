"""Parameters that hooks freeze and unfreeze at any place of a step: as in a plain loop with code at the same place.

What is frozen between forward and backward gets no gradient, so that AdamW leaves it where it is; what is unfrozen
there is trained from the next step on.
"""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from ..parity import largest_difference
from ..tiny import engine

NUM_BATCHES, SIZE, DIM = 8, 4, 6
STRATEGIES = ("ddp", "zero1", "fsdp", "tp", "pp")


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(4))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(DIM, 1)

    def training_step(self, batch, batch_idx):
        return (self.head(self.blocks(batch[0])) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1, eps=1e-4)  # a near-zero gradient


def toggle(module, index):
    """Freezes a block, or all but it, in turns of two batches."""
    module.blocks[1].requires_grad_(index // 2 % 2 == 1)
    module.blocks[2].requires_grad_(index // 2 % 2 == 0)


class Toggles(Callback):
    def __init__(self, hook):
        self.num = 0
        setattr(self, hook, self.toggle)

    def toggle(self, trainer, module, *unused):
        toggle(module, self.num)
        self.num += 1


HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end",
)  # fmt: skip


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(NUM_BATCHES * SIZE, size, generator=generator) for size in (DIM, 1)))


def plain_loop(hook):
    module = Net()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(DataLoader(data(), SIZE)):
        places = {name: (lambda: None) for name in HOOKS} | {hook: lambda index=index: toggle(module, index)}
        places["on_train_batch_start"]()
        loss = module.training_step(batch, index)
        places["on_before_zero_grad"]()
        optimizer.zero_grad()
        places["on_before_backward"]()
        loss.backward()
        places["on_after_backward"]()
        places["on_before_optimizer_step"]()
        optimizer.step()
        places["on_train_batch_end"]()
    return module.state_dict()


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_hooks_freeze_and_unfreeze(strategy, hook):
    module = Net()
    trainer = engine(strategy=f"{strategy}_fork", devices=2, callbacks=[Toggles(hook)])
    size = SIZE if strategy in ("tp", "pp") else SIZE // 2
    if strategy == "pp" and hook in ("on_before_zero_grad", "on_before_backward"):
        with pytest.raises(ProcessRaisedException, match=r"the parameter 'blocks.1.*', or freezes or unfreezes it"):
            trainer.fit(module, DataLoader(data(), size))
        return
    trainer.fit(module, DataLoader(data(), size))
    assert largest_difference(module.state_dict(), plain_loop(hook)) <= 1e-5
