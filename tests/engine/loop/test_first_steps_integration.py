"""`check_first_steps` in real runs of two ranks: it changes nothing, and says what it can't compare."""

import copy
import logging

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.utils.parametrizations import spectral_norm

from polyphase.engine import Engine
from polyphase.engine.strategies.fsdp import strategy as fsdp
from tests.defects.defects import DEFECTS, nothing
from tests.engine.parity import MLP
from tests.engine.parity import loader as digits
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly
from tests.zoo.model import build, loader
from tests.zoo.plain import MODELS

NORMS = DEFECTS["an optimizer that reads norms gets those of its shards"].model


class WithDropout(type(NORMS.make()).__mro__[1]):
    """Draws random numbers, on each rank its own."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class Watch(Callback):
    """Writes what a rank has in the end: its random state, and its collectives from the third step on."""

    def __init__(self, folder, name):
        self.path = folder / name

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            self.before = self.count(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after = self.count(trainer)

    def on_train_end(self, trainer, pl_module):
        state = torch.get_rng_state(), self.after - self.before
        torch.save(state, f"{self.path}-{trainer.global_rank}.pt")

    def count(self, trainer):
        return trainer.strategy.device_mesh.get_group(0)._get_sequence_number_for_group()


def fit(model, strategy, check, callbacks=(), **flags):
    seed_everything(0, verbose=False)
    module = build(model)
    engine = Engine(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        check_first_steps=check,
        callbacks=list(callbacks),
        **QUIET,
        **flags,
    )
    engine.fit(module, loader(model, engine.data_size))
    return copy.deepcopy(module.state_dict())


@pytest.mark.parametrize("strategy", ["fsdp_fork", "pp_fork"])
def test_the_run_is_the_same_bit_for_bit(tmp_path, strategy):
    model = NORMS._replace(make=WithDropout) if strategy == "fsdp_fork" else MODELS["DiT"]
    checked = fit(model, strategy, strategy == "fsdp_fork" or "auto", [Watch(tmp_path, "checked")])
    plain = fit(model, strategy, False, [Watch(tmp_path, "plain")])
    assert all(torch.equal(checked[name], tensor) for name, tensor in plain.items())
    for rank in range(2):
        ends = [torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("checked", "plain")]
        assert torch.equal(ends[0][0], ends[1][0])
        assert ends[0][1] == ends[1][1] > 0


def test_by_default_a_difference_is_a_warning(monkeypatch):
    monkeypatch.setattr(fsdp, "read_whole_numbers", nothing)
    with pytest.raises(ProcessRaisedException, match=r"UserWarning: the first 2 step.*'head.bias'.*Training continues"):
        fit(NORMS, "fsdp_fork", "auto")


class CantBeCopied(type(NORMS.make())):
    def __deepcopy__(self, memo):
        raise TypeError("not this one")


class Reaches(type(NORMS.make())):
    def training_step(self, batch, batch_idx):
        torch.distributed.all_reduce(torch.ones(()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("strategy", "make", "said"),
    [
        ("tp_fork", WithDropout, "draws random numbers"),
        ("fsdp_fork", Reaches, "reaches other ranks"),
        *nightly(("fsdp_fork", CantBeCopied, "CantBeCopied can't be copied (TypeError: not this one)")),
    ],
)
def test_what_it_cant_compare_is_said_and_goes_on(capfd, caplog, strategy, make, said):
    handler = logging.StreamHandler()
    logger = logging.getLogger("polyphase.engine")
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "polyphase.engine"):
            fit(NORMS._replace(make=make), strategy, "auto")
    finally:
        logger.removeHandler(handler)
    lines = [line for line in capfd.readouterr().err.splitlines() if "first steps are not compared" in line]
    assert len(lines) == 1
    assert said in lines[0]


def test_who_asks_for_it_is_warned_where_it_cant_compare():
    with pytest.raises(ProcessRaisedException, match=r"UserWarning: the first steps are not compared.*can't be copied"):
        fit(NORMS._replace(make=CantBeCopied), "fsdp_fork", True)


def test_windows_of_micro_batches_and_clipping_are_those_of_one_process():
    fit(MODELS["DiT"], "fsdp_fork", True, accumulate_grad_batches=2, gradient_clip_val=0.1)


class Spectral(MLP):
    """Each forward in training renews the vectors of its power iterations, which its weights depend on."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(spectral_norm(nn.Linear(64, 64)), nn.ReLU()) for _ in range(3)))


def test_each_rank_begins_a_batch_with_the_same_buffers():
    torch.manual_seed(1)
    engine = Engine(strategy="fsdp_fork", accelerator="cpu", devices=2, max_steps=3, check_first_steps=True, **QUIET)
    engine.fit(Spectral(), digits("mlp", 1, 2))  # a difference would be an error
