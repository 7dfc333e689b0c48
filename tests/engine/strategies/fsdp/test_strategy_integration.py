"""FSDP and HSDP through real runs on the CPU: scaling, clipping, saving, meta-device init, communication."""

import json
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.checkpoint import load_checkpoint
from tests.engine.parity import MLP, TiedGPT, build, largest_difference, loader, sgd
from tests.engine.strategies.test_ddp_integration import QUIET, counted
from tests.pairs import nightly


class OneRankOverflows(MLP):
    """At the third batch the loss of rank 1 alone is too large for a scaled float16 gradient."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 1e38 if batch_idx == 2 and self.global_rank == 1 else loss


class ScaleWriter(Callback):
    """Writes each rank's loss scale and the norm of its weights after every batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[list[float]] = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        state = [getattr(p, "full_tensor", lambda p=p: p)() for p in pl_module.parameters()]
        norm = torch.stack([p.detach().norm() for p in state]).norm().item()
        self.rows.append([trainer.precision_plugin.scaler.get_scale(), norm])

    def on_train_end(self, trainer, pl_module):
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(self.rows))


@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy, tmp_path):
    engine = Engine(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        precision="16-mixed",
        max_steps=5,
        nonfinite="ignore",
        callbacks=[ScaleWriter(tmp_path)],
        **QUIET,
    )
    engine.fit(OneRankOverflows(), loader("mlp", 1, 2))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    scales, norms = zip(*first, strict=True)
    assert scales[2] == scales[1] / 2
    assert norms[2] == pytest.approx(norms[1], rel=1e-7)
    assert norms[3] != norms[2]


class NormWriter(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        (self.folder / f"norm{trainer.global_rank}").write_text(str(float(trainer.grad_norm)))


@pytest.mark.parametrize(
    ("flag", "num_ranks"), [("fsdp_fork", 2), *nightly(("ddp_fork", 2), ("hsdp_fork:replicate=2", 4))]
)
def test_the_norm_is_that_of_all_shards_on_every_rank(flag, num_ranks, tmp_path):
    norms = []
    for strategy, devices in (("single", 1), (flag, num_ranks)):
        engine = Engine(
            strategy=strategy,
            accelerator="cpu",
            devices=devices,
            max_steps=2,
            gradient_clip_val=0.01,
            callbacks=[NormWriter(tmp_path)],
            **QUIET,
        )
        engine.fit(build("gpt, tied", sgd), loader("gpt, tied", 1, devices))
        norms += [float((tmp_path / f"norm{rank}").read_text()) for rank in range(devices)]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
    assert norms[0] > 0.01


class BuiltLate(TiedGPT):
    """Builds its net in `configure_model`, as models do that don't fit in memory."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, num_heads=2, dim=16, context_length=16)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(5)
            self.net = TiedGPT(num_layers=2, num_heads=2, dim=16, context_length=16).net


class OnMeta(Callback):
    """Seeds what creates the weights, be it `configure_model` or the sharding after it."""

    def setup(self, trainer, pl_module, stage):
        torch.manual_seed(5)


def test_meta_init_gives_the_weights_of_an_ordinary_one():
    ordinary = BuiltLate()
    flags = {"accelerator": "cpu", "max_steps": 3, **QUIET}
    Engine(strategy="single", callbacks=[OnMeta()], **flags).fit(ordinary, loader("gpt, tied", 1))
    path = Path("late.ckpt").absolute()
    module = BuiltLate()
    engine = Engine(strategy="fsdp_fork:meta_init=true", devices=2, callbacks=[OnMeta(), SaveAtEnd(path)], **flags)
    engine.fit(module, loader("gpt, tied", 1, 2))
    saved = load_checkpoint(path)["state_dict"]
    assert largest_difference(saved, ordinary.state_dict()) <= 1e-5


class Drawn(MLP):
    """Draws its weights as no `reset_parameters` would."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        del self.net
        self.folder = folder

    def configure_model(self) -> None:
        if hasattr(self, "net"):
            return
        self.net = MLP().net
        self.scale = nn.Parameter(torch.rand(64) * torch.randn(64))
        self.register_buffer("offset", torch.rand(64))
        (self.folder / f"{self.global_rank}").write_text(self.scale.device.type)

    def training_step(self, batch, batch_idx):
        images, classes = batch
        return super().training_step((images.flatten(1) * self.scale + self.offset, classes), batch_idx)


@pytest.mark.parametrize(
    ("flag", "devices"),
    [
        ("hsdp_fork:replicate=2,shard=1,rank0_init=true", 2),
        ("tp_fork:rank0_init=true", 2),
        ("fsdp_fork:rank0_init=true", 2),
        # The axes of these are those of the above.
        *nightly(("hsdp_fork:replicate=2,rank0_init=true", 4), ("fsdp+tp_fork:tp=2,rank0_init=true", 4)),
        *nightly(("hsdp+tp_fork:replicate=2,tp=2,rank0_init=true", 4)),
    ],
)
def test_rank_0_alone_draws_the_weights(flag, devices, tmp_path):
    states = []
    for strategy, number in (("single", 1), (flag, devices)):
        module = Drawn(tmp_path)
        path = tmp_path / f"{number}.ckpt"
        engine = Engine(
            strategy=strategy,
            accelerator="cpu",
            devices=number,
            max_steps=2,
            callbacks=[OnMeta(), SaveAtEnd(path)],
            **QUIET,
        )
        engine.fit(module, loader("mlp", 1, engine.data_size))
        states.append(load_checkpoint(path)["state_dict"])
    assert largest_difference(*states) <= 1e-5
    found = [(tmp_path / f"{rank}").read_text() for rank in range(devices)]
    assert found == ["cpu", *["meta"] * (devices - 1)]


def test_weights_are_drawn_in_one_way():
    with pytest.raises(ValueError, match=r"meta_init=true and rank0_init=true can't both be: .* Leave one of them out"):
        Engine(strategy="fsdp_spawn:meta_init=true,rank0_init=true", accelerator="cpu", devices=2, **QUIET)


class SaveAtEnd(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


# Test_portability has all strategies, with a step on either side; this has a whole epoch.
@pytest.mark.nightly
@pytest.mark.parametrize("saved_by", ["single", "ddp_fork", "fsdp_fork"])
def test_a_checkpoint_goes_on_under_every_strategy(saved_by, tmp_path):
    def run(strategy: str, epochs: int, **kwargs: object) -> dict:
        devices = 1 if strategy == "single" else 2
        module = build("gpt, tied")
        engine = Engine(
            strategy=strategy,
            accelerator="cpu",
            devices=devices,
            max_epochs=epochs,
            limit_train_batches=5,
            callbacks=[SaveAtEnd(tmp_path / f"{strategy}-{epochs}.ckpt")],
            **QUIET,
        )
        engine.fit(module, loader("gpt, tied", 1, devices), **kwargs)
        return module.state_dict()

    run(saved_by, 1)
    uninterrupted = run("single", 2)
    for strategy in ("single", "ddp_fork", "fsdp_fork"):
        resumed = run(strategy, 2, ckpt_path=tmp_path / f"{saved_by}-1.ckpt", weights_only=True)
        assert largest_difference(resumed, uninterrupted) <= 1e-5


class Renamed(nn.Linear):
    """Is saved under another name than that of its attribute."""

    def __init__(self) -> None:
        super().__init__(32, 32)
        self.register_state_dict_post_hook(lambda _, state, prefix, __: rename(state, prefix, "weight", "kernel"))
        self.register_load_state_dict_pre_hook(lambda _, state, prefix, *__: rename(state, prefix, "kernel", "weight"))


def rename(state: dict[str, Any], prefix: str, old: str, new: str) -> None:
    if prefix + old in state:
        state[prefix + new] = state.pop(prefix + old)


class RenamedMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.Sequential(Renamed(), Renamed()))


@pytest.mark.parametrize("saved_by", ["fsdp_fork", "single"])
def test_keys_that_the_module_renames_go_on_under_every_strategy(saved_by, tmp_path):
    def run(strategy: str, max_epochs: int, **fit_flags: Any) -> LightningModule:
        devices = 1 if strategy == "single" else 2
        callbacks = [SaveAtEnd(tmp_path / f"{strategy}-{max_epochs}.ckpt")]
        engine = Engine(
            strategy=strategy, accelerator="cpu", devices=devices, max_epochs=max_epochs, callbacks=callbacks, **QUIET
        )
        torch.manual_seed(1)
        module = RenamedMLP()
        engine.fit(module, loader("mlp", 1, devices), **fit_flags)
        return module

    run(saved_by, 1)
    uninterrupted = run("single", 2)
    assert "net.1.0.kernel" in uninterrupted.state_dict()
    for strategy in ("single", "ddp_fork", "fsdp_fork"):
        resumed = run(strategy, 2, ckpt_path=tmp_path / f"{saved_by}-1.ckpt", weights_only=True)
        assert largest_difference(resumed.state_dict(), uninterrupted.state_dict()) <= 1e-5


def test_inner_micro_batches_reduce_nothing(tmp_path):
    once, thrice = (counted("fsdp_fork", tmp_path, each, max_steps=2) for each in (1, 3))
    assert thrice["reduce_scatter"] == once["reduce_scatter"] == 2 * 3  # two blocks and the rest, in 2 steps
    sharded = counted("fsdp_fork:no_sync=false", tmp_path, 3, max_steps=1)
    assert sharded["reduce_scatter"] == 3 * 3


def test_batch_norm_statistics_are_shared_for_evaluation():
    engine = Engine(strategy="fsdp_fork", accelerator="cpu", devices=2, max_epochs=1, limit_train_batches=2, **QUIET)

    class Net(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.net.append(nn.BatchNorm1d(10))

        def validation_step(self, batch, batch_idx):
            mean = self.net[-1].running_mean
            spread = (mean - self.trainer.strategy.reduce(mean.clone(), reduce_op="mean")).abs().max()
            self.log("spread", spread, sync_dist=True, reduce_fx="max")

    engine.fit(Net(), loader("mlp", 1, 2), loader("mlp", 1, 2))
    assert engine.callback_metrics["spread"] == 0


def test_messages_say_which_of_the_two_it_is():
    for flag in ("fsdp_spawn", "hsdp_spawn"):
        assert repr(Engine(strategy=flag, accelerator="cpu", devices=2, **QUIET).strategy) == repr(flag)


def test_units_are_printed_by_the_layout():
    assert str(Engine(strategy="hsdp_spawn:replicate=2", accelerator="cpu", devices=4, **QUIET).layout) == (
        "replicate=2 x shard=2"
    )


class LooksAtBlocks(LightningModule):
    """Uses the weights of its blocks outside of their forwards: a penalty, a tied product, an attack on its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def loss(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
        return (y @ self.blocks[0][0].weight - x).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        attacked = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(attacked), attacked)
        penalty = sum(parameter.abs().sum() for parameter in self.parameters())
        return self.loss(batch) + self.loss(batch + 0.1 * gradient.sign()) + 1e-2 * penalty

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2, eps=1e-3)


ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


def _looked(strategy: str, **flags: Any) -> dict[str, Tensor]:
    module = LooksAtBlocks()
    run = Engine(strategy=strategy, devices=2, accelerator="cpu", max_epochs=2, **QUIET, **flags)
    run.fit(module, DataLoader(ROWS, 2))
    return module.state_dict()


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("fsdp_fork:units=module", {}),
        ("fsdp_fork:units=module", {"activation_checkpointing": "full"}),
        ("hsdp_fork:units=module,shard=2,replicate=1", {}),
    ],
)
def test_weights_used_outside_of_their_blocks_are_whole_with_one_unit(strategy, flags):
    module = LooksAtBlocks()
    optimizer = module.configure_optimizers()
    for batch in ROWS.split(4) * 2:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    assert largest_difference(_looked(strategy, **flags), module.state_dict()) < 1e-6


def test_weights_used_outside_of_their_blocks_name_the_option():
    with pytest.raises(ProcessRaisedException, match=r"option units=module \(strategy='fsdp:units=module'\)"):
        _looked("fsdp_fork")


class PatchesTheClass(Callback):
    """Replaces `training_step` in the class of the module, from the third batch on."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            of_class = MLP.training_step
            type(pl_module).training_step = lambda *arguments: 3 * of_class(*arguments)


@pytest.mark.parametrize("flag", ["fsdp_fork", "tp_fork"])
def test_a_step_that_a_callback_patches_in_the_class_is_the_one_that_runs(flag):
    def run(flag: str, devices: int) -> dict[str, Tensor]:
        torch.manual_seed(1)
        flags: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "max_steps": 6, **QUIET}
        module = type("OfThisRun", (MLP,), {})()
        module.configure_optimizers = MethodType(sgd, module)
        Engine(strategy=flag, callbacks=[PatchesTheClass()], **flags).fit(
            module, loader("mlp", 1, devices if flag == "fsdp_fork" else 1)
        )
        return module.state_dict()

    assert largest_difference(run(flag, 2), run("single", 1)) < 1e-5


class Broadcasts(Callback):
    """Counts the broadcasts of the set-up."""

    def setup(self, trainer, pl_module, stage):
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profile.start()

    def on_train_start(self, trainer, pl_module):
        self.profile.stop()
        number = sum(event.name == "c10d::broadcast_" for event in self.profile.events())
        trainer.callback_metrics["broadcasts"] = torch.tensor(float(number))


def test_small_units_are_made_equal_together():
    def number(layers: int) -> float:
        module = Deep(layers)
        engine = Engine(**QUIET, strategy="fsdp_fork", devices=2, max_steps=1, callbacks=[Broadcasts()])
        engine.fit(module, DataLoader(torch.ones(4, 4), batch_size=2))
        return float(engine.callback_metrics["broadcasts"])

    assert 0 < number(64) == number(8) < 8


class Deep(LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = batch + layer(batch).tanh() / len(self.layers)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
