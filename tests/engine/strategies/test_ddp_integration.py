"""DDP through real runs: comm hooks on the CPU, unused parameters, accumulation without communication."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.distributed import run_ranks
from tests.engine.parity import MLP, build, largest_difference, loader, sgd
from tests.engine.tiny import Regression, as_rank, engine, rows

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Unused(MLP):
    def __init__(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3, bias=False)


class Conditional(MLP):
    """Uses one layer at the first step only."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(64, 1, bias=False)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.sometimes(batch[0].flatten(1)).mean() if batch_idx == 0 else loss


def fit(module: LightningModule, strategy: str, **flags: object) -> Engine:
    engine = Engine(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **QUIET, **flags)
    engine.fit(module, loader("mlp", 1, 2))
    return engine


class UnusedAtLast(Conditional):
    """Uses one layer in all steps but the last, of which nothing else would be known."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, 1 if batch_idx + 1 == self.trainer.num_training_batches else 0)


@pytest.mark.parametrize("module", [Unused, Conditional, UnusedAtLast])
def test_unused_parameters_are_named_with_the_flag_to_set(module):
    name = "never.weight" if module is Unused else "sometimes.weight"
    with pytest.raises(ProcessRaisedException, match=f"{name}.*find_unused_parameters=true"):
        fit(module(), "ddp_fork")


@pytest.mark.parametrize("module", [Unused, Conditional])
def test_unused_parameters_are_fine_with_the_flag(module):
    fit(module(), "ddp_fork:find_unused_parameters=true")
    fit(module(), "ddp_fork_find_unused_parameters_true")


class WritesHowItIsWrapped(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer, pl_module):
        wrapped = trainer.model
        self.path.write_text(f"{wrapped.gradient_as_bucket_view} {wrapped.find_unused_parameters}")


@pytest.mark.parametrize(
    ("options", "wrapped"), [("", "True False"), (":gradient_as_bucket_view=false", "False False")]
)
def test_gradients_live_in_the_buckets_unless_the_flag_says_otherwise(options, wrapped, tmp_path):
    fit(MLP(), f"ddp_fork{options}", callbacks=[WritesHowItIsWrapped(tmp_path / "wrapped")], limit_train_batches=1)
    assert (tmp_path / "wrapped").read_text() == wrapped


REDUCE_SCATTER = '"c10d::_reduce_scatter_base_"'


class Counts(Callback):
    """Writes what rank 0's comm hook counted; where there is none, what the profiler did."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer, pl_module):
        if trainer.is_global_zero and not trainer._parts.comm_hook:
            self.profile = profile(activities=[ProfilerActivity.CPU])
            self.profile.__enter__()

    def on_train_end(self, trainer, pl_module):
        if not trainer.is_global_zero:
            return
        counted = {"parameters": sum(p.numel() for p in pl_module.parameters())}
        if hook := trainer._parts.comm_hook:
            counted |= {"bytes": hook.num_bytes, "calls": hook.num_calls}
        else:
            self.profile.__exit__(None, None, None)
            trace = self.path.with_suffix(".trace")
            self.profile.export_chrome_trace(str(trace))  # a twentieth of the seconds that `events` takes
            text = trace.read_text()
            counted |= {"all_reduce": text.count("gloo:all_reduce"), "reduce_scatter": text.count(REDUCE_SCATTER)}
        self.path.write_text(json.dumps(counted))


def counted(strategy: str, tmp_path: Path, accumulate: int = 1, **flags: object) -> dict:
    path = tmp_path / "counts.json"
    engine = Engine(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[Counts(path)],
        **QUIET,
        **flags,
    )
    engine.fit(build("gpt, tied", sgd), loader("gpt, tied", accumulate, 2))
    return json.loads(path.read_text())


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_casts_run_on_the_cpu_and_send_half(compression, tmp_path):
    counts = counted("ddp_fork", tmp_path, compression=compression, max_steps=3)
    assert counts["calls"] >= 3
    assert counts["bytes"] == 3 * 2 * counts["parameters"]


def test_powersgd_runs_on_the_cpu_and_sends_less(tmp_path):
    counts = counted("ddp_fork", tmp_path, compression="powersgd:1,start=2", max_steps=8)
    plain_bytes = 8 * 4 * counts["parameters"]
    assert 2 * 4 * counts["parameters"] < counts["bytes"] < 0.7 * plain_bytes


def test_inner_micro_batches_send_nothing(tmp_path):
    once, thrice = (counted("ddp_fork", tmp_path, each, max_steps=2) for each in (1, 3))
    assert thrice["all_reduce"] == once["all_reduce"] >= 2


def test_compressed_runs_stay_near_the_plain_one():
    modules = {name: build("mlp") for name in ("none", "fp16", "bf16", "powersgd:8,start=2")}
    for compression, module in modules.items():
        fit(module, "ddp_fork", compression=compression)
    plain = modules.pop("none").state_dict()
    for module in modules.values():
        # 20 steps of at most 1e-3 each; far from the plain weights would be a sign of a wrong scale or sign.
        assert 0 < largest_difference(module.state_dict(), plain) < 1e-2


def two_fits(rank: int) -> None:
    as_rank(rank)
    run = engine(strategy="ddp:static_graph=true", devices=2, accumulate_grad_batches=2)
    for max_epochs in (1, 2):
        run.fit_loop.max_epochs = max_epochs
        run.fit(Regression(), rows(32))
    assert run.global_step == 2 * 2


def test_a_static_graph_is_learnt_anew_in_each_fit():
    run_ranks(two_fits, 2)


def test_two_optimizers_by_hand():
    module = ByHand()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    engine = Engine(strategy="ddp_fork", accelerator="cpu", devices=2, max_epochs=1, **QUIET)
    engine.fit(module, DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))
    assert all(not torch.equal(before[key], value) for key, value in module.state_dict().items())


class ByHand(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.b(self.a(batch[0])).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.a.parameters(), lr=0.1), torch.optim.SGD(self.b.parameters(), lr=0.1)]


class Hooked(LightningModule):
    """Hooks on the module itself, for its `forward`: they double its result, and count."""

    def __init__(self, *, is_automatic: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = is_automatic
        self.net = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(2))
        self.register_forward_pre_hook(self._count)
        self.register_forward_hook(lambda module, arguments, output: output * 2)

    @staticmethod
    def _count(module: nn.Module, arguments: tuple[object, ...]) -> None:
        module.calls[int(module.training)] += 1

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return self(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        return None

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["ddp_fork", "zero1_fork"])
@pytest.mark.parametrize("is_automatic", [True, False])
def test_hooks_on_the_module_itself_are_those_of_its_forward(strategy, is_automatic):
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    plain = Hooked(is_automatic=True)
    optimizer = plain.configure_optimizers()
    for x in data.split(8):
        optimizer.zero_grad()
        plain.loss([x]).backward()
        optimizer.step()
    module, batches = Hooked(is_automatic=is_automatic), DataLoader(TensorDataset(data), batch_size=4)
    # The check of the first steps calls the module for each rank, and would find `calls` different.
    flags = {"max_epochs": 1, "num_sanity_val_steps": 0, "check_first_steps": False, **QUIET}
    Engine(strategy=strategy, accelerator="cpu", devices=2, **flags).fit(module, batches, batches)
    assert module.calls.tolist() == [2, 2]
    plain.calls[0] = 2
    assert largest_difference(module.state_dict(), plain.state_dict()) < 1e-6
