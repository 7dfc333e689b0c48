"""Comm hooks in real runs: with accumulation, clipping, loss scales, other buckets; saved, resumed, dealt out anew."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.checkpoint import load_checkpoint
from tests.distributed import run_ranks
from tests.engine.parity import TOLERANCE, build, largest_difference, loader, plain_loop, sgd
from tests.engine.tiny import QUIET, as_rank
from tests.pairs import alternating, nightly

SAVED, STEPS = 3, 6
LOSSY = ["int8:16,feedback=true", "powersgd:1,start=2", "topk:0.1", "sign"]


class Two(LightningModule):
    """Matrices that are worth two factors, and vectors that are not."""

    def __init__(self, bad_rank: int | None = None, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))
        self.bad_rank, self.factor = bad_rank, factor

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - batch.flip(1)).square().mean()
        if batch_idx == 3 and self.global_rank == self.bad_rank:
            loss = loss + self.factor * self.net[2].bias.sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def rows(devices: int) -> DataLoader:
    data = torch.randn(8 * STEPS, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, batch_size=8 // devices)  # type: ignore[arg-type]


def train(module: LightningModule, devices: int, ckpt_path: Path | None = None, **flags: Any) -> dict[str, Tensor]:
    engine = Engine(**{**QUIET, "strategy": "ddp_fork", "devices": devices, "max_steps": STEPS, **flags})
    engine.fit(module, rows(devices), ckpt_path=ckpt_path)
    return module.state_dict()


class Saves(Callback):
    """Saves at a step, and writes what the hook has as training begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        torch.save(trainer.strategy.comm_hook.state_dict(), f"{self.path}-{trainer.global_rank}")

    def on_train_step_end(self, trainer: Any, pl_module: LightningModule, save_now: bool) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


# --- saved and resumed


@pytest.mark.parametrize(
    ("strategy", "devices", "compression"),
    [
        # Several buckets, which DDP forms anew after the first step of either run.
        *(("ddp_fork:bucket_cap_mb=0.002", 2, compression) for compression in LOSSY),
        ("fsdp_fork", 2, "int8:16"),
        # Below, residuals of this one are saved and dealt out again.
        *nightly(*(("hsdp_fork:replicate=2", 4, compression) for compression in ("sign", "powersgd:1,start=2"))),
    ],
)
def test_goes_on_as_if_nothing_had_been(strategy, devices, compression, tmp_path):
    flags: dict[str, Any] = {"strategy": strategy, "compression": compression}
    expected = train(Two(), devices, callbacks=[Saves(tmp_path / "saved")], **flags)
    found = train(Two(), devices, tmp_path / "saved", **flags)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


SAVED_UNDER = {"ddp": ("ddp_fork", 2), "hsdp": ("hsdp_fork:replicate=2", 4)}


@pytest.fixture(scope="module", params=SAVED_UNDER)
def saved(request, tmp_path_factory):
    """A run with residuals, and their means over the replicas of each parameter: what is owed to the weights.

    Of biases they are what 16 bit round off.
    """
    strategy, devices = SAVED_UNDER[request.param]
    path = tmp_path_factory.mktemp("whole") / "saved"
    with pytest.MonkeyPatch.context() as patch:
        # As if they were large: then they are in files of their own, of which each rank reads what it needs.
        patch.setattr("polyphase.engine.checkpoint.state_tree._MANY_BYTES", 64)
        train(Two(), devices, strategy=strategy, compression="topk:0.1+bf16", callbacks=[Saves(path)])
    ranks = [rank["compression"]["residuals"] for rank in load_checkpoint(path)["polyphase"]["ranks"]]
    assert len(ranks) == devices
    return path, means(ranks, shards=devices // 2)


def means(ranks: list[dict[str, Tensor]], shards: int) -> dict[str, Tensor]:
    """By hand: all shards have even sizes here."""
    return {
        name: torch.cat([torch.stack([rank[name] for rank in ranks[shard::shards]]).mean(0) for shard in range(shards)])
        for name in ranks[0]
    }


@pytest.mark.parametrize(
    ("saved", "strategy", "devices", "shards"),
    alternating(SAVED_UNDER, [("ddp_fork", 1, 1), ("hsdp_fork:replicate=2", 4, 2), ("ddp_fork", 4, 1)]),
    indirect=["saved"],
    scope="module",
)
def test_other_ranks_owe_the_weights_the_same(saved, tmp_path, strategy, devices, shards):
    path, expected = saved
    again = tmp_path / "again"
    train(Two(), devices, path, strategy=strategy, compression="topk:0.1+bf16", callbacks=[Saves(again)])
    dealt = [torch.load(f"{again}-{rank}", weights_only=True)["residuals"] for rank in range(devices)]
    found = means(dealt, shards)
    assert found.keys() == expected.keys()
    for name in expected:
        assert expected[name].abs().max() > 0
        torch.testing.assert_close(found[name], expected[name])


def test_no_compression_after_one_is_told(saved):
    path, _ = saved
    with pytest.warns(UserWarning, match="saved under another `compression`"):
        train(Two(), 1, path, strategy="single")


def test_residuals_go_on_under_another_method(saved, tmp_path):
    path, expected = saved
    train(Two(), 1, path, compression="sign", callbacks=[Saves(tmp_path / "again")])
    state = torch.load(tmp_path / "again-0", weights_only=True)
    assert state["flag"] == "sign"
    for name in expected:
        torch.testing.assert_close(state["residuals"][name], expected[name])


def check_lost(rank: int, path: Path, again: Path, flags: dict[str, Any], message: str) -> None:
    as_rank(rank)
    with pytest.warns(UserWarning, match=message):
        train(Two(), 1, path, callbacks=[Saves(again)], **flags)
    state = torch.load(f"{again}-0", weights_only=True)
    assert not state.get("residuals")
    assert state["step"] == (0 if "local_sgd" in flags["strategy"] else SAVED)


@pytest.mark.parametrize(
    ("strategy", "compression", "message"),
    [
        ("ddp", "bf16", "saved with another `compression`: 'bf16' keeps no residuals"),
        ("ddp", "topk:feedback=false", "saved with another `compression`: 'topk:feedback=false' keeps no residuals"),
        ("local_sgd", "topk:0.1", "saved under a strategy that averages gradients, this one averages changes"),
    ],
)
def test_residuals_that_cant_go_on_are_told(saved, tmp_path, strategy, compression, message):
    flags = {"strategy": strategy, "compression": compression}
    run_ranks(check_lost, 1, saved[0], tmp_path / "again", flags, message, start_method="fork")


# --- what a step may meet


class Memories(Callback):
    """Notes what the hook remembers, and the loss scale, after each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        state = trainer.strategy.comm_hook.state_dict()
        memories = {
            kind: {k: v.clone() for k, v in state[kind].items()} for kind in ("residuals", "factors") if kind in state
        }
        self.rows.append((trainer.precision_plugin.scaler.get_scale(), state["step"], memories))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        torch.save(self.rows, self.folder / str(trainer.global_rank))


@pytest.mark.parametrize(("strategy", "compression"), alternating(["ddp_fork", "hsdp_fork:replicate=2"], LOSSY))
def test_a_step_that_overflows_leaves_what_is_remembered(strategy, compression, tmp_path):
    module = Two(bad_rank=1, factor=1e38)
    train(
        module, 2, strategy=strategy, compression=compression, precision="16-mixed", callbacks=[Memories(tmp_path)],
        nonfinite="ignore",
    )  # fmt: skip
    for rank in range(2):
        scales, steps, memories = zip(*torch.load(tmp_path / str(rank), weights_only=True), strict=True)
        assert scales[3] == scales[2] / 2
        assert steps[3] == steps[2] == steps[1] + 1
        assert memories[2]["residuals"]
        for kind in memories[2]:
            for name, value in memories[2][kind].items():
                assert torch.equal(memories[3][kind][name], value), (kind, name)
        changed = [
            name
            for name, value in memories[3]["residuals"].items()
            if not torch.equal(memories[4]["residuals"][name], value)
        ]
        assert changed
    assert all(value.isfinite().all() for value in module.state_dict().values())


def test_residuals_do_not_carry_the_loss_scale(tmp_path):
    """The scale is 65536 and falls to half of that; the residuals stay of the size of gradients."""
    train(Two(bad_rank=1, factor=1e38), 2, compression="topk:0.1", precision="16-mixed", callbacks=[Memories(tmp_path)])
    _, _, memories = torch.load(tmp_path / "0", weights_only=True)[-1]
    assert 0 < max(value.abs().max() for value in memories["residuals"].values()) < 10


@pytest.mark.parametrize(
    ("strategy", "compression"), alternating(["ddp_fork", "hsdp_fork:replicate=2"], ["bf16", "int8:16", *LOSSY])
)
def test_a_gradient_that_is_not_finite_stops_all_with_its_rank_and_name(strategy, compression):
    message = (
        r"the gradient of 'net.2.bias' on rank 1 was infinite or NaN at step 3\. Training stops, since compression"
    )
    with pytest.raises(ProcessRaisedException, match=message):
        train(Two(bad_rank=1, factor=float("nan")), 2, strategy=strategy, compression=compression, nonfinite="ignore")


@pytest.mark.parametrize("compression", ["bf16", "int8:16"])
def test_under_fsdp_a_logged_step_tells(compression):
    message = r"the gradient of 'net.2.bias' on rank 1 was infinite or NaN at step 3\."
    module = Two(bad_rank=1, factor=float("nan"))
    with pytest.raises(ProcessRaisedException, match=message):
        train(module, 2, strategy="fsdp_fork", compression=compression, nonfinite="ignore", log_every_n_steps=5)


def test_an_average_that_overflows_is_no_ranks_fault():
    with pytest.raises(ProcessRaisedException, match=r"an average of gradients overflowed at step 3.* choose bf16"):
        train(Two(bad_rank=1, factor=1e8), 2, compression="fp16", nonfinite="ignore")


def test_a_unit_without_all_its_gradients_under_hsdp():
    class Unused(Two):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(4, 4)

    with pytest.raises(ProcessRaisedException, match=r"needs a gradient for each parameter of a unit.*never\.weight"):
        train(Unused(), 2, strategy="hsdp_fork:replicate=2", compression="bf16")


# --- correct with everything else: where all is sent, the result is that of the plain loop


@pytest.mark.parametrize(
    ("flag", "devices", "compression"),
    [
        ("ddp_fork", 2, "topk:1"),
        pytest.param("ddp_fork:static_graph=true", 2, "topk:1", marks=pytest.mark.nightly),
        ("ddp_fork:find_unused_parameters=true,bucket_cap_mb=0.005", 2, "powersgd:64,start=0,min_ratio=0.001"),
        ("ddp_fork:gradient_as_bucket_view=false,bucket_cap_mb=0.01", 2, "topk:1"),
        ("hsdp_fork:replicate=2,shard=1", 2, "topk:1"),
        pytest.param("hsdp_fork:replicate=2", 4, "topk:1", marks=pytest.mark.nightly),
        pytest.param("hsdp_fork:replicate=2,no_sync=false", 4, "topk:1", marks=pytest.mark.nightly),
        pytest.param("hsdp_fork:replicate=4", 4, "powersgd:64,start=0,min_ratio=0.001", marks=pytest.mark.nightly),
    ],
)
def test_accumulation_clipping_and_options(flag, devices, compression):
    expected = plain_loop(build("gpt, tied"), loader("gpt, tied", 3, num_steps=3), 3, 0.05, make_optimizer=sgd)
    module = build("gpt, tied", sgd)
    engine = Engine(
        strategy=flag, devices=devices, max_epochs=1, accumulate_grad_batches=3, gradient_clip_val=0.05,
        compression=compression, **QUIET,
    )  # fmt: skip
    engine.fit(module, loader("gpt, tied", 3, devices, 3))
    # Factors of full rank are a matrix again up to the rounding of two products and of an orthogonalisation.
    assert largest_difference(module.state_dict(), expected) <= (TOLERANCE if compression == "topk:1" else 1e-4)


def test_frozen_parameters_and_an_uneven_last_batch():
    data = torch.randn(8 * 3 + 3, 16, generator=torch.Generator().manual_seed(1))
    results = []
    for compression in ("none", "topk:1"):
        module = Two()
        module.net[0].weight.requires_grad = False
        engine = Engine(strategy="ddp_fork", devices=2, max_epochs=2, compression=compression, **QUIET)
        engine.fit(module, DataLoader(data, batch_size=4))  # type: ignore[arg-type]
        results.append(module.state_dict())
    assert largest_difference(*results) <= TOLERANCE
    assert torch.equal(results[0]["net.0.weight"], Two().net[0].weight)


def test_only_the_micro_batch_that_ends_a_window_is_sent(tmp_path):
    class Counts(Callback):
        def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
            hook = trainer.strategy.comm_hook
            (tmp_path / str(trainer.global_rank)).write_text(json.dumps([hook.num_calls, hook.step]))

    train(Two(), 2, compression="topk:0.1", max_steps=3, accumulate_grad_batches=3, callbacks=[Counts()])
    assert json.loads((tmp_path / "0").read_text()) == json.loads((tmp_path / "1").read_text()) == [3, 3]


@pytest.mark.nightly
def test_compiled_steps():
    expected = train(Two(), 2, compression="topk:1")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # inside torch's compiler
        found = train(Two(), 2, compression="topk:1", compile=True)
    assert largest_difference(found, expected) <= TOLERANCE
