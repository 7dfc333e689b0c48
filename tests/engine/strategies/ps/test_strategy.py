"""What `ps` refuses, before any process starts."""

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from polyphase.engine import Engine
from tests.engine.parity import MLP, loader
from tests.engine.strategies.test_ddp_integration import QUIET


def made(strategy: str, devices: int = 2, **flags: object) -> Engine:
    return Engine(strategy=strategy, accelerator="cpu", devices=devices, **QUIET, **flags)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("ps:staleness=-1", "ps:staleness must be a whole number of at least 0, but got -1"),
        ("ps:staleness=few", "ps':staleness must be a whole number, but got 'few'"),
        ("ps:patience=-1", "ps:patience must be at least 0, but got -1"),
        ("ps:servers=0", "ps:servers must be a whole number of at least 1, but got 0"),
        ("ps:servers=3", r"ps:servers=3 is more than the 2 process\(es\)"),
        ("ps:timeout_s=0", "ps:timeout_s must be greater than 0"),
        ("ps:address=203.0.113.7", "ps:address must be an IP address of this machine"),
        ("ps:stale=1", "Did you mean 'staleness'"),
    ],
)
def test_options_out_of_range(strategy, message):
    with pytest.raises(ValueError, match=message):
        made(strategy)


def test_what_it_can_not_do():
    with pytest.raises(ValueError, match="strategy 'ps' can't do compression 'bf16': its servers take gradients as"):
        made("ps", compression="bf16")
    with pytest.raises(ValueError, match="micro_batch_size='auto' can't repeat a step under PS"):
        made("ps", global_batch_size=16, micro_batch_size="auto")
    with pytest.raises(ValueError, match="sync_batchnorm=True has each forward wait for all ranks"):
        made("ps:staleness=1", sync_batchnorm=True)
    assert made("ps", sync_batchnorm=True).world_size == 2


def test_several_nodes_need_an_address():
    with pytest.raises(ValueError, match="listens on the loopback interface only, which 2 nodes can't meet on"):
        made("ps", num_nodes=2)
    assert made("ps:address=127.0.0.1", num_nodes=2).world_size == 4


def test_lbfgs_is_refused():
    class Module(MLP):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ProcessRaisedException, match="under 'ps' each server has some of the parameters"):
        made("ps_fork", devices=1, max_steps=1).fit(Module(), loader("mlp", 1))


def test_which_ranks_can_be_lost():
    assert [made("ps:servers=1", devices=3).strategy.can_lose(rank) for rank in range(3)] == [False, True, True]
    assert not any(made("ps", devices=3).strategy.can_lose(rank) for rank in range(3))
