"""Steps that optimize by hand weigh each rank's loss by its samples: the weights are those of a plain loop."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.distributed import run_ranks
from tests.engine.parity import MLP, QUIET, TOLERANCE, largest_difference, suffixed
from tests.engine.tiny import as_rank
from tests.pairs import alternating, nightly

BATCH = 16


class ByHand(MLP):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.backward_by(super().training_step(batch, batch_idx))
        optimizer.step()

    def backward_by(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class PassesOver(ByHand):
    """Calls torch's backward, which no strategy sees."""

    def backward_by(self, loss: Tensor) -> None:
        loss.backward()


def loader(size: int, num_ranks: int) -> DataLoader:
    data = TensorDataset(torch.randn(size, 64, generator=torch.Generator().manual_seed(3)), torch.arange(size) % 10)
    return DataLoader(data, BATCH // num_ranks)


def build(kind: type[MLP]) -> MLP:
    torch.manual_seed(1)
    return kind()


def plain_loop(size: int) -> dict[str, Tensor]:
    module = build(MLP)
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for images, classes in loader(size, 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module.net(images), classes).backward()
            optimizer.step()
    return module.state_dict()


def train(flag: str, num_ranks: int, size: int, kind: type[MLP]) -> dict[str, Tensor]:
    module = build(kind)
    engine = Engine(strategy=suffixed(flag, "fork"), accelerator="cpu", devices=num_ranks, max_epochs=2, **QUIET)
    engine.fit(module, loader(size, num_ranks))
    return module.state_dict()


@pytest.mark.parametrize(("flag", "num_ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_step_is_one_of_a_global_batch(flag, num_ranks):
    """The loader's batches are its micro-batches, after each of which such a module would step."""

    def fit(**flags: Any) -> dict[str, Tensor]:
        module = build(ByHand)
        engine = Engine(
            **{"strategy": suffixed(flag, "fork"), "accelerator": "cpu", "devices": num_ranks, "max_epochs": 2},
            **QUIET,
            global_batch_size=BATCH,
            **flags,
        )
        engine.fit(module, loader(61, 4))  # batches of 4
        return module.state_dict()

    with pytest.raises(Exception, match=f"a part of global_batch_size=16.* set micro_batch_size={16 // num_ranks}, "):
        fit()
    assert largest_difference(fit(micro_batch_size=BATCH), plain_loop(61)) <= TOLERANCE


# The last batch has 13 samples, or one: then a rank has none of its own.
@pytest.mark.parametrize(
    ("flag", "num_ranks", "size"),
    [
        *(("single", 1, size) for size in (61, 49)),
        *(("ddp", 2, size) for size in (61, 49)),
        *alternating([("zero1", 2), ("fsdp", 2)], [61, 49]),
        ("hsdp:replicate=2,shard=1", 2, 61),
        *nightly(*(("hsdp:replicate=2,shard=2", 4, size) for size in (61, 49))),
    ],
)
def test_an_uneven_batch_counts_by_its_samples(flag, num_ranks, size):
    assert largest_difference(train(flag, num_ranks, size, ByHand), plain_loop(size)) <= TOLERANCE


@pytest.mark.parametrize("flag", ["ddp", "zero1"])
def test_gradients_of_a_rank_alone_are_refused(flag):
    """Each rank would train by itself, with exit code 0."""
    with pytest.raises(
        Exception, match=rf"under '{flag}_fork' the gradients of net.0.weight and 5 more were not averaged"
    ):
        train(flag, 2, 64, PassesOver)


def test_gradients_of_a_rank_alone_are_refused_while_a_warm_up_averages_them():
    with pytest.raises(Exception, match=r"under 'local_sgd_fork' the gradients of net.0.weight and 5 more were not"):
        train("local_sgd:warmup=2,sync_every=2", 2, 64, PassesOver)


class PassesOverLater(ByHand):
    def backward_by(self, loss: Tensor) -> None:
        self.manual_backward(loss) if self.trainer.global_step < 2 else loss.backward()


def test_after_a_warm_up_either_backward_gives_a_rank_its_own_gradients():
    flag = "local_sgd:warmup=2,sync_every=2"
    weights = train(flag, 2, 64, PassesOverLater)
    assert largest_difference(weights, train(flag, 2, 64, ByHand)) == 0
    assert largest_difference(weights, build(MLP).state_dict()) > 1e-3


def test_gradients_of_a_rank_alone_are_refused_under_lightnings_own_strategy():
    module, strategy = build(PassesOver), DDPStrategy(start_method="fork")
    engine = Engine(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **QUIET)
    with pytest.raises(Exception, match=r"under 'DDPStrategy' the gradients of net.0.weight and 5 more were not"):
        engine.fit(module, loader(64, 2))


class Accumulates(ByHand):
    """Accumulates by torch's backward, and averages all of it with the last one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        images, classes = batch
        halves = zip(images.chunk(2), classes.chunk(2), strict=True)
        losses = [nn.functional.cross_entropy(self.net(part), targets) / 2 for part, targets in halves]
        losses[0].backward()
        self.manual_backward(losses[1])
        optimizer.step()


def test_gradients_that_are_averaged_with_later_ones_are_not_refused():
    assert largest_difference(train("ddp", 2, 64, Accumulates), plain_loop(64)) <= TOLERANCE


def test_the_hooks_of_a_run_are_removed():
    run_ranks(check_hooks, 2, start_method="fork")


def check_hooks(rank: int) -> None:
    as_rank(rank)
    module = build(ByHand)
    Engine(strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, **QUIET).fit(module, loader(64, 2))
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    assert "backward" not in vars(module.trainer.strategy)
    assert not _global_optimizer_pre_hooks


def test_a_backward_past_the_strategy_is_told_where_batches_are_uneven():
    with pytest.raises(Exception, match=r"unequal numbers of samples of batch 3.*call self\.manual_backward\(loss\)"):
        train("fsdp", 2, 61, PassesOver)  # warnings are errors in tests
    assert largest_difference(train("fsdp", 2, 64, PassesOver), plain_loop(64)) <= TOLERANCE


class StepsInHook(ByHand):
    """Its batches are trained on in the hook at their end."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")  # it is about the order of saves
@pytest.mark.parametrize("flag", ["ddp", "zero1", "fsdp"])
def test_steps_of_a_hook_are_counted_and_weigh_their_samples(flag, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    module, flags = build(StepsInHook), {**QUIET, "enable_checkpointing": True}
    engine = Engine(
        strategy=suffixed(flag, "fork"), accelerator="cpu", devices=2, max_epochs=2, callbacks=saves, **flags
    )
    engine.fit(module, loader(61, 2))
    assert largest_difference(module.state_dict(), plain_loop(61)) <= TOLERANCE
    assert {path.name for path in tmp_path.iterdir()} >= {"step=2.ckpt", "step=4.ckpt"}


def test_steps_of_a_hook_are_counted_in_one_process():
    engine = Engine(accelerator="cpu", devices=1, max_epochs=2, **QUIET)
    engine.fit(build(StepsInHook), loader(61, 1))
    assert engine.global_step == 8
