"""A rank that alone freezes parameters is named before gradients are mixed up, or shards stay behind."""

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from polyphase.engine import Engine
from tests.engine.parity import largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly
from tests.zoo.model import build, loader, plain_loop
from tests.zoo.unusual import MODELS, Blocks

STRATEGIES = ["ddp_fork", "tp_fork", "pp_fork", *nightly("zero1_fork", "fsdp_fork", "cp_fork")]
MODEL = MODELS["memory"]


class Freezes(Blocks):
    """In the second batch a block is frozen: by all, or by one rank."""

    by = None

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.by in (None, self.global_rank):
            self.blocks[1].requires_grad_(False)


class FreezesAlone(Freezes):
    by = 1


def fit(make, strategy):
    model = MODEL._replace(make=make)
    module = build(model)
    engine = Engine(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, hang_timeout_s=60, **QUIET)
    engine.fit(module, loader(model, engine.data_size))
    return largest_difference(plain_loop(model), module.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_that_freezes_alone_is_named(strategy):
    with pytest.raises(
        ProcessRaisedException, match=r"rank 1 freezes or unfreezes blocks\.1\.|same blocks in the same"
    ):
        fit(FreezesAlone, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_may_freeze_in_an_epoch(strategy):
    assert fit(Freezes, strategy) < 1e-6
