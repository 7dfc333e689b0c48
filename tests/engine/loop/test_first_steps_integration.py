"""`check_first_steps` in real runs of two ranks: it changes nothing, and says what it can't compare."""

import copy
import logging

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.utils.parametrizations import spectral_norm

from polyphase.engine import Engine
from polyphase.engine.distributed.digests import digests
from polyphase.engine.loop import first_steps
from polyphase.engine.loop.first_steps import between_ranks
from polyphase.engine.strategies.fsdp import strategy as fsdp
from polyphase.engine.strategies.tensor import context
from tests.defects.defects import DEFECTS, nothing
from tests.engine.parity import MLP
from tests.engine.parity import build as build_subject
from tests.engine.parity import loader as digits
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly
from tests.zoo import unusual
from tests.zoo.model import build, loader
from tests.zoo.plain import MODELS, Block

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


@pytest.mark.parametrize("name", ["warm-up by hand", "memory", *nightly("SAM", "counting blocks")])
def test_a_module_that_is_right_is_no_difference(name):
    fit(unusual.MODELS[name], "fsdp_fork", True)


class Gated(Block):
    """Is mixed in by its gate, which hooks and callbacks open."""

    gate = 0.25

    def forward(self, x):
        return x + self.gate * (super().forward(x) - x)


class Opens(unusual.Blocks):
    """Opens the gates before each batch, by a number that it counts, and shrinks its head."""

    block, num_batches = Gated, 0

    def on_train_batch_start(self, batch, batch_idx):
        self.num_batches += 1
        for block in self.blocks:
            block.gate = 0.25 * self.num_batches
        with torch.no_grad():
            self.head.weight.mul_(0.9)


class CountsWithin(unusual.Blocks):
    """Hooks between the passes of a step, and before its update, count, and do more of what they do each time."""

    block, num_zeroed, num_passes = Gated, 0, 1

    def on_before_zero_grad(self, optimizer):
        self.blocks[1].requires_grad_(self.num_zeroed != 1)
        self.num_zeroed += 1

    def on_after_backward(self):
        self.head.weight.grad.mul_(self.num_passes)
        self.num_passes += 1

    def on_before_optimizer_step(self, optimizer):
        self.blocks[0].gate += 0.25


class StaysShut(unusual.Blocks):
    block = Gated


class Opener(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for block in pl_module.blocks:
            block.gate += 0.25


@pytest.mark.parametrize(("make", "callbacks"), [(Opens, []), (CountsWithin, []), (StaysShut, [Opener()])])
def test_what_hooks_change_is_no_difference(make, callbacks):
    fit(NORMS._replace(make=make), "fsdp_fork", True, callbacks)


class CountsBackwards(Callback):
    """Counts by a hook that the copy of the module, which is older, does not have."""

    num_calls = 0

    def on_fit_start(self, trainer, pl_module):
        def count(*_):
            self.num_calls += 1

        pl_module.blocks[0].register_full_backward_hook(count)

    def on_train_end(self, trainer, pl_module):
        assert self.num_calls == trainer.global_step > 2


@pytest.mark.parametrize("strategy", ["ddp_fork", *nightly("fsdp_fork", "zero1_fork", "tp_fork")])
def test_what_hooks_of_the_run_alone_count_stays(strategy):
    fit(unusual.MODELS["memory"]._replace(make=unusual.Blocks), strategy, "auto", [CountsBackwards()])


class NoiseInHooks(unusual.Blocks):
    """Adds noise to gradients and weights, and writes into weights between forward and backward."""

    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.1)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)

    def on_before_zero_grad(self, optimizer):
        for p in self.parameters():
            p.data.mul_(0.9)


class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.1)
        return loss


class NoiseInItsOptimizer(unusual.Blocks):
    def configure_optimizers(self):
        return Langevin(self.parameters(), lr=0.05)


@pytest.mark.parametrize("make", [NoiseInHooks, NoiseInItsOptimizer])
def test_noise_of_a_module_is_drawn_as_in_the_run(make):
    model = MODELS["batch norm"]._replace(make=make, data=unusual.MODELS["memory"].data)
    fit(model, "fsdp_fork", True)


class NoiseInGradients(Callback):
    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=0.1)


class ShrinksWeights(Callback):
    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        for p in pl_module.parameters():
            p.data.mul_(0.9)


@pytest.mark.parametrize("callback", [NoiseInGradients(), ShrinksWeights()])
def test_who_writes_without_taking_part_is_named_in_place_of_a_difference(callback):
    text = f"not compared with those of one process: {type(callback).__name__} changes weights or gradients"
    with pytest.raises(ProcessRaisedException, match=text):
        fit(unusual.MODELS["memory"], "fsdp_fork", True, [callback])


class Apart(type(NORMS.make()).__mro__[1]):
    """In the third step, each rank scales its gradients by another number."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 2:
            for parameter in self.parameters():
                parameter.grad.mul_(1 + self.global_rank)


def test_replicas_that_differ_at_the_end_are_a_warning():
    with pytest.raises(ProcessRaisedException, match=r"have ended the run with different weights of Apart: 'into"):
        fit(NORMS._replace(make=Apart), "ddp_fork", "auto")


def test_what_ranks_must_have_alike_is_compared():
    step = [digests([("weight", torch.ones(3) * (1 + rank)), ("bias", torch.ones(3))]) for rank in range(2)]
    assert between_ranks([step], step) == [
        "the gradient of 'weight' in optimizer step 1 is not the same on all ranks (norm 1.732051 on rank 0,"
        " 3.464102 on rank 1)",
        "'weight' is not the same on all ranks (norm 1.732051 on rank 0, 3.464102 on rank 1)",
    ]


class SmallLoss(type(NORMS.make()).__mro__[1]):
    """Its gradients, scaled by the first factor of a loss scaler, are numbers of fp16."""

    def training_step(self, batch, batch_idx):
        return 1e-2 * super().training_step(batch, batch_idx)


def test_a_loss_scaler_is_no_difference():
    fit(NORMS._replace(make=SmallLoss), "fsdp_fork", True, precision="16-mixed", gradient_clip_val=1e-3)


@pytest.fixture
def is_too_large(monkeypatch):
    monkeypatch.setattr(first_steps, "_MAX_BYTES", 0)


@pytest.mark.parametrize("make", [WithDropout, unusual.Counts])
def test_of_a_module_that_is_too_large_one_block_is_compared(make, is_too_large, capfd):
    logger = logging.getLogger("polyphase.engine")
    handler = logging.StreamHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        fit(NORMS._replace(make=make), "fsdp_fork", "auto")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    lines = capfd.readouterr().err
    assert "MiB, more than 0: of the first step, one block is compared" in lines
    assert "not compared" not in lines


class LocalGradient(type(NORMS.make()).__mro__[1]):
    """A block whose gradient has another direction on the way to the optimizer than in one process."""

    def on_before_optimizer_step(self, optimizer):
        self.blocks[2].up.bias.grad.mul_(0)


def test_a_block_that_differs_is_named(is_too_large):
    with pytest.raises(ProcessRaisedException, match=r"the gradient of 'blocks.2.up.bias' in step 1 is off by"):
        fit(NORMS._replace(make=LocalGradient), "fsdp_fork", "auto")


def test_modules_of_many_parts_are_too_large(monkeypatch):
    monkeypatch.setattr(first_steps, "_MAX_PARTS", 3)
    with pytest.raises(ProcessRaisedException, match=r"the gradient of 'blocks.2.up.bias' in step 1 is off by"):
        fit(NORMS._replace(make=LocalGradient), "fsdp_fork", "auto")


def fit_split_sequences(check):
    flags = {"strategy": "cp_fork", "accelerator": "cpu", "devices": 2, "max_epochs": 1, "check_first_steps": check}
    Engine(**flags, **QUIET).fit(build_subject("gpt, tied"), digits("gpt, tied", 1, num_steps=2))


def test_a_gradient_of_a_part_of_a_sequence_is_named(monkeypatch):
    def without_the_gradients_of_others(tensor, mesh):
        if isinstance(tensor, DTensor) and tensor.placements == (Shard(1),):
            return tensor
        whole = context.as_dtensor(tensor, mesh).to_local()
        return DTensor.from_local(whole.chunk(mesh.size(), 1)[mesh.get_local_rank()], mesh, [Shard(1)])

    monkeypatch.setattr(context, "cut", without_the_gradients_of_others)
    with pytest.raises(ProcessRaisedException, match=r"FirstStepsError: .*'net\.\w*embedding.weight'"):
        fit_split_sequences(check=True)


def test_who_leaves_it_out_where_sequences_are_split_is_warned():
    with pytest.raises(ProcessRaisedException, match=r"check_first_steps=False: under 'cp_fork' code of TiedGPT that"):
        fit_split_sequences(check=False)
