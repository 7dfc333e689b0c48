"""Evaluation before training in the same processes, as a job under torchrun has it."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from polyphase.engine import Engine
from polyphase.engine.strategies.pipeline.plan import RemoteTensor
from tests.distributed import free_port, run_ranks
from tests.engine.parity import QUIET, KnowsItsDevice, loader
from tests.engine.tiny import as_rank
from tests.pairs import nightly

from . import install

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute


class Evaluates(KnowsItsDevice):
    """Is evaluated with a metric of its own, too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, classes = batch
        self.mean.update(torch.nn.functional.cross_entropy(self.net(images.flatten(1)), classes))
        self.log("loss", self.mean)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0].flatten(1))


def _trained(flag: str, num_ranks: int, *before: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Evaluates()
    engine = Engine(
        strategy=flag,
        accelerator="sim",
        devices=num_ranks,
        max_steps=4,
        val_check_interval=2,
        deterministic=True,
        **QUIET,
    )
    batches = loader("mlp", 1, engine.data_size, num_steps=4)
    for stage in before:
        getattr(engine, stage)(module, batches, **({} if stage == "predict" else {"verbose": False}))
    engine.fit(module, batches, batches)
    assert engine.global_step == 4
    return {
        name: getattr(p, "full_tensor", lambda p=p: p)().cpu()
        for name, p in module.named_parameters()
        if not isinstance(p, RemoteTensor)
    }


def _evaluated_first(rank: int, flag: str, num_ranks: int, port: int) -> None:
    install().set_num_devices(num_ranks)
    as_rank(rank)
    os.environ.update(MASTER_PORT=str(port), WORLD_SIZE=str(num_ranks), RANK=str(rank))
    expected = _trained(flag, num_ranks)
    assert dist.get_backend() != "gloo"  # under which Lightning never evaluates in inference mode
    found = _trained(flag, num_ranks, "validate", "test", "predict")
    for name, value in expected.items():
        assert value.equal(found[name]), name


@pytest.mark.parametrize(
    ("flag", "num_ranks"),
    [
        ("ddp", 2),
        ("fsdp", 2),
        ("tp", 2),
        ("pp:microbatches=2", 2),
        *nightly(("hsdp:replicate=2", 4), ("pp+fsdp:microbatches=2", 4)),
    ],
)
def test_what_was_evaluated_is_trained_as_if_it_were_not(flag, num_ranks):
    arguments = (flag, num_ranks, free_port())
    run_ranks(_evaluated_first, num_ranks, *arguments, start_method="fork", connects=False, timeout_s=150)
