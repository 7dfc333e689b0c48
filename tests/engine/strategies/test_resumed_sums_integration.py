"""A run of four ranks that is stopped and goes on has the weights of one that is not, to the bit.

Of two ranks any order of a sum is the same; of four it is not.
"""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.engine.tiny import as_rank, engine, rows
from tests.pairs import nightly

WAYS = [("ddp", "none"), ("ddp:bucket_cap_mb=1", "bf16"), ("zero1", "none"), ("fsdp", "none")]


class Backwards(LightningModule):
    """Runs its layers in another order than that in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(32, 1)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.first = nn.Linear(4, 32)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        values = self.first(batch)
        for layer in (*self.layers[2:], *self.layers[:2]):
            values = torch.tanh(layer(values))
        return (self.last(values) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def weights_of(trainer):
    state = trainer.strategy.lightning_module_state_dict()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone() for name, value in state.items()
    }


def go_on_in_a_run(rank, folder, ways):
    as_rank(rank)
    for number, (strategy, compression) in enumerate(ways):
        flags = {"strategy": strategy, "devices": 4, "compression": compression}
        whole = engine(**flags, max_steps=4, max_epochs=-1)
        whole.fit(Backwards(), rows(64, batch_size=2, shuffle=True))
        expected = weights_of(whole)
        path = folder / f"stopped{number}"
        for max_steps, resume in ((1, None), (3, path), (4, path)):
            part = engine(**flags, max_steps=max_steps, max_epochs=-1)
            part.fit(Backwards(), rows(64, batch_size=2, shuffle=True), ckpt_path=resume)
            part.save_checkpoint(path)
        found = weights_of(part)
        differences = {name: (found[name] - expected[name]).abs().max().item() for name in expected}
        assert not any(differences.values()), (strategy, compression, differences)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ways", [WAYS[:3], *nightly(WAYS[3:])])
def test_the_same_weights(tmp_path, ways):
    run_ranks(go_on_in_a_run, 4, tmp_path, ways, timeout_s=180, start_method="fork")
