"""Layers split over ranks, through torch alone and through real runs on the CPU."""

import copy
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from polyphase.callbacks import CommunicationMonitor
from polyphase.engine import Engine
from polyphase.engine.checkpoint import load_checkpoint
from polyphase.engine.strategies.operator_rules import install_operator_rules
from polyphase.engine.strategies.tensor.plan import make_plan
from polyphase.engine.strategies.tensor.styles import FusedColwise
from polyphase.models.transformer import Block
from tests.distributed import run_ranks
from tests.engine.parity import MLP, TOLERANCE, adamw, build, largest_difference, loader, sgd
from tests.engine.strategies.fsdp.test_strategy_integration import BuiltLate, NormWriter, OnMeta, SaveAtEnd
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

from .attentions import (
    BLOCKS,
    DIM,
    GATHERING,
    NormedHeads,
    NormedWidths,
    OwnRMSNorm,
    Residual,
    Unfolded,
)

FLAGS: dict[str, Any] = {"accelerator": "cpu", **QUIET}


class Collectives(TorchDispatchMode):
    """Counts those that DTensor makes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(type_, DTensor) for type_ in types):
            return NotImplemented  # the collectives come below it
        name = str(operator).split(".")[1]
        if operator.namespace == "_c10d_functional" and "wait" not in name and "wrap" not in name:
            self.counts[name] += 1
        return operator(*args, **(kwargs or {}))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _compare_with_whole_blocks(rank: int) -> None:
    install_operator_rules()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for make in [*BLOCKS, Unfolded, lambda: Block(DIM, 4, 0.02, 0.0)]:
        torch.manual_seed(0)
        whole = make()
        name = type(whole).__name__
        net = nn.ModuleDict({"block": copy.deepcopy(whole)})
        for path, style in reversed(make_plan(net, 2).styles.items()):
            parallelize_module(net.get_submodule(path), mesh, style, src_data_rank=None)
        x = torch.randn(3, 6, DIM)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        if name == "Unfolded":
            with pytest.raises(RuntimeError, match=r"(?s)forward of Unfolded does not go with .* tensor_parallel_plan"):
                net["block"](inputs[0])
            continue
        with implicit_replication(), Collectives() as forward:
            y = net["block"](inputs[0])
        with implicit_replication(), Collectives() as backward:
            y.square().sum().backward()
        expected = whole(inputs[1])
        expected.square().sum().backward()
        assert not isinstance(y, DTensor)
        torch.testing.assert_close(y, expected, msg=name)
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, msg=name)
        for (key, p), q in zip(net["block"].named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(_whole(p.grad), q.grad, msg=f"{name}.{key}", rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(_whole(p), q, msg=f"{name}.{key}", rtol=0, atol=0)
        if make not in GATHERING:
            num_regions = 2 if name == "Block" else 1
            assert forward.counts == backward.counts == {"all_reduce": num_regions}, name


def _view_three_blocks(rank: int) -> None:
    install_operator_rules()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    qkv = nn.Linear(6, 48)
    sizes = [(4, 12), (4, 3, 4), (4, 4, 3), (12, 4), (2, 24), (2, 3, 8), (6, 8), (3, 16), (3, 4, 4), (3, 2, 8)]
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    qkv.reset_parameters()
    whole = qkv(x).detach()
    cut = parallelize_module(qkv, mesh, FusedColwise(3), src_data_rank=None)(x).detach()
    assert any(isinstance(placement, _StridedShard) for placement in cut.placements)
    for size in [*((2, 5, *size) for size in sizes), (10, 48), (-1, 48), (10, 4, 12), (2, 240), (5, 8, 12), (-1,)]:
        torch.testing.assert_close(cut.view(size).full_tensor(), whole.view(size), msg=str(size))
        torch.testing.assert_close(cut.reshape(size).full_tensor(), whole.reshape(size), msg=str(size))
    assert cut.view(10, -1).placements[0] == _StridedShard(1, split_factor=3)
    assert cut.view(2, 5, 3, 4, -1).placements[0] == Shard(3)  # with nothing sent


def test_three_blocks_side_by_side_are_viewed_as_the_whole_is():
    run_ranks(_view_three_blocks, 2, start_method="fork")


def test_a_split_block_computes_what_a_whole_one_does_with_one_all_reduce_each_way():
    run_ranks(_compare_with_whole_blocks, 2, timeout_s=120, start_method="fork")


class Net(LightningModule):
    """Parameters inside an attention that no plan names, dropout, a metric, and an embedding that is not tied."""

    length = 6

    def __init__(self, dropout: float = 0.0, optimizer: Any = adamw) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(
            [nn.Sequential(NormedHeads(), nn.Dropout(dropout), Residual(dropout)) for _ in range(2)]
        )
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 256)
        self.accuracy = torchmetrics.MeanMetric()
        self.count = torchmetrics.SumMetric()
        self.make_optimizer = optimizer

    def loss(self, batch: Tensor) -> Tensor:
        x = self.table(batch[:, : self.length])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1 : self.length + 1].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.accuracy.update(loss, weight=len(batch))
        self.count.update(len(batch))
        self.log("accuracy", self.accuracy)
        self.log("count", self.count)
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch))
        self.log("samples", float(len(batch)), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self)


def fit(flag: str, devices: int, data_size: int, module: LightningModule | None = None, **flags: Any) -> Any:
    """The weights after three steps, and the metrics of a validation of 21 samples."""
    module = Net() if module is None else module
    engine = Engine(
        **{**FLAGS, "strategy": flag, "devices": devices, "max_epochs": 1, "limit_train_batches": 3, **flags}
    )
    validation = DataLoader(loader("gpt, tied", 1).dataset, sampler=range(21), batch_size=8 // data_size)
    engine.fit(module, loader("gpt, tied", 1, data_size), validation)
    return module.state_dict(), {name: float(value) for name, value in engine.callback_metrics.items()}


@pytest.fixture(scope="module")
def expected() -> Any:
    """With each of the two optimizers."""
    return {make: fit("single", 1, 1, Net(optimizer=make), gradient_clip_val=0.05) for make in (adamw, sgd)}


def with_adamw(**arguments: Any) -> Any:
    return lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4, **arguments)


@pytest.mark.parametrize(
    ("flag", "devices", "data_size", "optimizer"),
    [
        # What these have, one of those below has.
        *nightly(("tp_fork", 2, 1, adamw)),
        pytest.param("tp_fork:loss_parallel=true", 2, 1, with_adamw(foreach=True), marks=pytest.mark.nightly),
        pytest.param(
            "tp_fork:tp=2,activation_checkpointing=true", 2, 1, with_adamw(fused=True), marks=pytest.mark.nightly
        ),
        pytest.param(
            "fsdp+tp_fork:tp=2,activation_checkpointing=true,reshard_after_forward=false",
            4,
            2,
            with_adamw(foreach=True),
            marks=pytest.mark.nightly,
        ),
        *nightly(("fsdp+tp_fork:tp=2,loss_parallel=true,no_sync=false", 4, 2, with_adamw(fused=True))),
        ("tp_fork:sequence_parallel=true", 2, 1, with_adamw(foreach=True)),
        ("fsdp+tp_fork:tp=2,sequence_parallel=true,loss_parallel=true", 4, 2, sgd),
        *nightly(("fsdp+tp_fork:tp=2,sequence_parallel=true,loss_parallel=true", 4, 2, adamw)),
    ],
)
def test_weights_and_metrics_are_those_of_one_process(flag, devices, data_size, optimizer, expected):
    weights, metrics = fit(flag, devices, data_size, Net(optimizer=optimizer), gradient_clip_val=0.05)
    expected_weights, expected_metrics = expected[sgd if optimizer is sgd else adamw]
    assert largest_difference(weights, expected_weights) <= TOLERANCE
    assert metrics["count"] == metrics["samples"] == 21  # each sample once, though two ranks have it
    assert {k: v for k, v in metrics.items() if k != "loss"} == pytest.approx(
        {k: v for k, v in expected_metrics.items() if k != "loss"}, rel=1e-5
    )
    if data_size == 1:  # else a rank's own
        assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)


def _normed(norm: type[nn.Module]) -> Net:
    module = Net()
    module.blocks = nn.ModuleList(nn.Sequential(NormedWidths(norm), Residual()) for _ in range(2))
    return module


@pytest.mark.parametrize("norm", [OwnRMSNorm, *nightly(nn.LayerNorm)])
@pytest.mark.parametrize(("flag", "devices", "data_size"), [("tp_fork", 2, 1), ("fsdp+tp_fork:tp=2", 4, 2)])
def test_a_norm_over_all_heads_is_that_of_a_plain_loop(flag, devices, data_size, norm):
    torch.manual_seed(4)
    weights, _ = fit(flag, devices, data_size, _normed(norm))
    torch.manual_seed(4)
    module = _normed(norm)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = adamw(module)
    for batch in islice(loader("gpt, tied", 1), 3):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    assert largest_difference(weights, module.state_dict()) <= TOLERANCE
    assert largest_difference(weights, before) > 100 * TOLERANCE


def test_a_norm_over_all_heads_that_torch_can_not_split_is_refused():
    text = r"(?s)does not go with the derived tensor-parallel plan.*tensor_parallel_plan\(\) that leaves it out"
    with pytest.raises(ProcessRaisedException, match=text):
        fit("fsdp+tp_fork:tp=2", 4, 2, _normed(nn.RMSNorm))


def test_what_it_sends_is_not_counted():
    with pytest.raises(ProcessRaisedException, match=r"CommunicationMonitor can't count what strategy 'tp_fork' sends"):
        fit("tp_fork", 2, 1, callbacks=[CommunicationMonitor()])


class SameOnAllRanks(Callback):
    """Compares, at the end, what is whole on all ranks that share their samples."""

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        group = trainer.strategy.device_mesh["tp"].get_group()
        for name, parameter in pl_module.named_parameters():
            if isinstance(parameter, DTensor) and not all(p.is_replicate() for p in parameter.placements):
                continue
            mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            first = mine.detach().clone()
            dist.broadcast(first, group=group, group_src=0)
            assert torch.equal(first, mine), name


@pytest.mark.parametrize("flag", ["tp_fork:sequence_parallel=true", *nightly("tp_fork")])
def test_dropout_is_the_same_on_ranks_that_share_their_samples(flag, expected):
    flags = {"callbacks": [SameOnAllRanks()], "gradient_clip_val": 0.05, "limit_val_batches": 0}
    weights, _ = fit(flag, 2, 1, Net(dropout=0.2), **flags)
    assert largest_difference(weights, expected[adamw][0]) > TOLERANCE


def test_ranks_that_share_their_samples_draw_the_same_after_a_checkpoint_of_ranks_that_did_not(tmp_path):
    saves = SaveAtEnd(tmp_path / "ddp")
    fit("ddp_fork:find_unused_parameters=true", 2, 2, Net(dropout=0.2), callbacks=[saves])
    module = Net(dropout=0.2)
    flags = {**FLAGS, "max_epochs": 2, "limit_train_batches": 3, "callbacks": [SameOnAllRanks()]}
    engine = Engine(strategy="tp_fork", devices=2, **flags)
    engine.fit(module, loader("gpt, tied", 1), ckpt_path=tmp_path / "ddp")
    assert largest_difference(module.state_dict(), load_checkpoint(tmp_path / "ddp")["state_dict"]) > 0


class Noisy(Dataset[Tensor]):
    """Augments, in a worker."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


class SeesTheSame(LightningModule):
    """Checks that ranks that share their samples have the same ones, and that others don't."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"mlp": Residual()})

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        everyones = [torch.empty_like(batch) for _ in range(self.trainer.world_size)]
        dist.all_gather(everyones, batch)
        for rank, other in enumerate(everyones):
            shares = rank // 2 == self.trainer.global_rank // 2
            assert torch.equal(other, batch) == shares, f"{other} of rank {rank}, {batch} here"

    on_validation_batch_start = on_train_batch_start

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net["mlp"](torch.ones(1, DIM)).sum()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


@pytest.mark.parametrize(("flag", "devices"), [("fsdp+tp_fork:tp=2", 4), *nightly(("tp_fork", 2))])
def test_workers_of_ranks_that_share_their_samples_draw_the_same(flag, devices, monkeypatch):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # which seed_everything would leave there
    seed_everything(5, workers=True, verbose=False)
    loaders = [DataLoader(Noisy(), batch_size=2, num_workers=1) for _ in range(2)]
    Engine(strategy=flag, devices=devices, max_epochs=1, **FLAGS).fit(SeesTheSame(), *loaders)


class Odd(Net):
    """Sequences of five."""

    length = 5


def test_a_sequence_that_has_no_equal_parts_is_refused():
    with pytest.raises(
        ProcessRaisedException, match=r"needs sequences of equal parts for 2 ranks, but .* a length of 5"
    ):
        fit("tp_fork:sequence_parallel=true", 2, 1, Odd())


class OneRankOverflows(MLP):
    """At the third batch, one part of the gradient on one rank is too large for float16."""

    def __init__(self) -> None:
        super().__init__()
        self.overflows = False
        self.net[0].weight.register_hook(self.overflow)

    def overflow(self, gradient: Tensor) -> Tensor:
        return gradient * float("inf") if self.overflows else gradient

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.overflows = batch_idx == 2 and self.global_rank == 1
        return super().training_step(batch, batch_idx)


class Skips(Callback):
    """Every rank skips the same step: the third."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())

    def on_train_end(self, *args: Any) -> None:
        assert [after / before for before, after in zip(self.scales[:-1], self.scales[1:], strict=True)] == [1, 0.5, 1]


@pytest.mark.parametrize(("flag", "devices"), [("tp_fork", 2), *nightly(("fsdp+tp_fork:tp=2", 4))])
def test_an_overflow_in_one_part_skips_the_step_on_all_ranks(flag, devices):
    flags = {**FLAGS, "precision": "16-mixed", "nonfinite": "ignore", "callbacks": [Skips()], "max_steps": 4}
    Engine(strategy=flag, devices=devices, **flags).fit(OneRankOverflows(), loader("mlp", 1, devices // 2))


@pytest.mark.parametrize(("strategy", "num_ranks"), [("tp_fork", 2), *nightly(("fsdp+tp_fork:tp=2", 4))])
def test_the_norm_is_that_of_all_parts_on_every_rank(strategy, num_ranks, tmp_path):
    norms = []
    for flag, devices in (("single", 1), (strategy, num_ranks)):
        flags = {**FLAGS, "max_steps": 2, "gradient_clip_val": 0.01, "callbacks": [NormWriter(tmp_path)]}
        engine = Engine(strategy=flag, devices=devices, **flags)
        engine.fit(build("gpt, tied", sgd), loader("gpt, tied", 1, engine.data_size))
        norms += [float((tmp_path / f"norm{rank}").read_text()) for rank in range(devices)]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)


@pytest.mark.parametrize(
    ("flag", "devices"), [("tp_fork:meta_init=true", 2), *nightly(("fsdp+tp_fork:tp=2,meta_init=true", 4))]
)
def test_meta_init_gives_the_weights_of_an_ordinary_one(flag, devices):
    ordinary = BuiltLate()
    Engine(strategy="single", callbacks=[OnMeta()], max_steps=2, **FLAGS).fit(ordinary, loader("gpt, tied", 1))
    path = Path("late.ckpt").absolute()
    engine = Engine(strategy=flag, devices=devices, callbacks=[OnMeta(), SaveAtEnd(path)], max_steps=2, **FLAGS)
    engine.fit(BuiltLate(), loader("gpt, tied", 1, devices // 2))
    assert largest_difference(load_checkpoint(path)["state_dict"], ordinary.state_dict()) <= TOLERANCE


@pytest.mark.parametrize(
    ("flag", "devices"), [("tp_fork", 2), pytest.param("fsdp+tp_fork:tp=2", 4, marks=pytest.mark.nightly)]
)
def test_a_checkpoint_of_fused_projections_goes_on_elsewhere_and_back(flag, devices, tmp_path):
    def run(strategy: str, devices: int, data_size: int, epochs: int, **kwargs: Any) -> dict[str, Tensor]:
        module = build("gpt, tied")
        callbacks = [SaveAtEnd(tmp_path / f"{strategy}-{epochs}")]
        flags = {**FLAGS, "max_epochs": epochs, "limit_train_batches": 2, "callbacks": callbacks}
        Engine(strategy=strategy, devices=devices, **flags).fit(module, loader("gpt, tied", 1, data_size), **kwargs)
        return module.state_dict()

    uninterrupted = run("single", 1, 1, 2)
    returned = run(flag, devices, devices // 2, 1)
    saved = load_checkpoint(tmp_path / f"{flag}-1")["state_dict"]
    assert all(torch.equal(saved[name], returned[name]) for name in returned)
    elsewhere = run("single", 1, 1, 2, ckpt_path=tmp_path / f"{flag}-1")
    assert largest_difference(elsewhere, uninterrupted) <= TOLERANCE
    run("single", 1, 1, 1)
    back = run(flag, devices, devices // 2, 2, ckpt_path=tmp_path / "single-1")
    assert largest_difference(back, uninterrupted) <= TOLERANCE


class OwnError(Net):
    """Fails by its own hand, with parameters of layers that are split at hand."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def fail_in(self, place: str, weight: Tensor) -> None:
        if place == self.place == "operation":
            weight.unfold(0, 2, 2).softmax(-1)
        elif place == self.place:
            raise RuntimeError("the user's own words")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.fail_in("step", self.blocks[0][0].q_proj.weight)
        self.fail_in("operation", self.blocks[0][0].q_proj.weight)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fail_in("hook", self.blocks[0][0].q_proj.weight.grad)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("step", r"^(?s:.*)RuntimeError: the user's own words\s*$"),
        ("hook", r"^(?s:.*)RuntimeError: the user's own words\s*$"),
        ("operation", r"in fail_in: (?s:.*)this can't be done with what is split over the tensor-parallel ranks"),
    ],
)
def test_an_error_in_the_users_code_is_not_the_optimizers(place, message):
    engine = Engine(**FLAGS, strategy="tp_fork", devices=2, max_epochs=1, limit_train_batches=1)
    with pytest.raises(ProcessRaisedException, match=message) as caught:
        engine.fit(OwnError(place), loader("gpt, tied", 1))
    assert "the step of AdamW" not in str(caught.value)
