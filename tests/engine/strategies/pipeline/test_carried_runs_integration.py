"""Carried values and lent parameters in runs that accumulate, clip, validate, resume or compute in bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine

from .test_carried_integration import QUIET, Net

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:the step writes into the buffer 'head.largest':UserWarning"),
]
MICRO_BATCHES = 4


class Validated(Net):
    """Another order of calls in validation: nothing is carried there, and the output layer is lent too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (rows,) = batch
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x)
        self.log("loss", nn.functional.linear(x, self.head.linear.weight).square().mean(), sync_dist=True)


def rows(num_batches: int) -> DataLoader:
    data = torch.randn(8 * num_batches, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(data), batch_size=8)


def plain_loop(
    accumulate: int, clip: float | None, *, in_bf16: bool = False, num_steps: int = 4
) -> tuple[dict[str, Tensor], float]:
    """The weights, and the mean loss of two batches of validation, by torch alone."""
    module, batches = Validated(), iter(rows(accumulate * num_steps))
    optimizer = module.configure_optimizers()
    for _ in range(num_steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            (batch,) = next(batches)
            # In bf16 a gradient of a batch is not the sum of those of its micro-batches.
            for part in batch.chunk(MICRO_BATCHES if in_bf16 else 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
                    loss = module.training_step((part,), 0)
                (loss * len(part) / len(batch) / accumulate).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    logged: list[Tensor] = []
    module.log = lambda _, value, **__: logged.append(value.detach())
    for batch in rows(2):
        module.validation_step(batch, 0)
    return module.state_dict(), float(sum(logged) / 2)


def engine(**flags: Any) -> Engine:
    strategy = f"pp_fork:microbatches={MICRO_BATCHES}"
    return Engine(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **{**QUIET, **flags})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_accumulating_and_clipping(precision):
    module = Validated()
    engine(accumulate_grad_batches=2, gradient_clip_val=0.3, precision=precision, limit_val_batches=0).fit(
        module, rows(8)
    )
    expected, _ = plain_loop(2, 0.3, in_bf16=precision == "bf16-mixed")
    torch.testing.assert_close(module.state_dict(), expected)


def test_an_evaluation_loop_between_steps():
    module = Validated()
    run = engine(gradient_clip_val=0.3, val_check_interval=2)
    run.fit(module, rows(4), rows(2))
    expected, loss = plain_loop(1, 0.3)
    torch.testing.assert_close(module.state_dict(), expected)
    assert float(run.callback_metrics["loss"]) == pytest.approx(loss, rel=1e-5)


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
def test_resuming_in_mid_run(tmp_path: Path):
    saves = ModelCheckpoint(tmp_path, "half", every_n_train_steps=2)
    flags = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    engine(max_steps=2, callbacks=[saves], enable_checkpointing=True, **flags).fit(Validated(), rows(8))
    module = Validated()
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    again = ModelCheckpoint(tmp_path / "again", "half", every_n_train_steps=2)
    engine(callbacks=[again], enable_checkpointing=True, **flags).fit(module, rows(8), ckpt_path=tmp_path / "half.ckpt")
    torch.testing.assert_close(module.state_dict(), plain_loop(2, None)[0])
