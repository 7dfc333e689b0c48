"""Ranks that train alone and become one: the laws by hand, bytes, what is evaluated, what goes wrong."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from polyphase.callbacks import CommunicationMonitor
from polyphase.engine import Engine
from tests.engine.loop.costs import Costs
from tests.engine.loop.test_out_of_memory_integration import Hungry
from tests.engine.loop.test_out_of_memory_integration import fit as fit_hungry
from tests.engine.parity import MLP, TOLERANCE, adamw, build, largest_difference, loader
from tests.engine.tiny import QUIET, Regression, rows
from tests.pairs import nightly

Outer = Callable[[list[Tensor], list[Tensor]], None]
Send = Callable[[int, list[Tensor]], list[Tensor]]


class Mean:
    """Of the weights."""

    def __call__(self, anchor: list[Tensor], change: list[Tensor]) -> None:
        for a, d in zip(anchor, change, strict=True):
            a -= d


class Nesterov:
    """Sutskever et al. 2013, as torch has it, by hand."""

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self.velocity: list[Tensor] = []

    def __call__(self, anchor: list[Tensor], change: list[Tensor]) -> None:
        if not self.velocity:
            self.velocity = [torch.zeros_like(d) for d in change]
        for a, d, v in zip(anchor, change, self.velocity, strict=True):
            v.mul_(self.momentum).add_(d)
            a -= self.lr * (d + self.momentum * v)


class Momentum(Nesterov):
    def __call__(self, anchor: list[Tensor], change: list[Tensor]) -> None:
        super().__call__(anchor, change)
        for a, d, v in zip(anchor, change, self.velocity, strict=True):
            a += self.lr * (d + self.momentum * v) - self.lr * v


class Largest:
    """SparseLoCo, value by value: what is sent of each rank's change. Two levels of magnitude a chunk."""

    def __init__(self, density: float, chunk: int, decay: float) -> None:
        self.density, self.chunk, self.decay = density, chunk, decay
        self.rests: dict[int, list[Tensor]] = {}

    def __call__(self, rank: int, change: list[Tensor]) -> list[Tensor]:
        rests = self.rests.setdefault(rank, [torch.zeros_like(d) for d in change])
        sent = []
        for rest, d in zip(rests, change, strict=True):
            rest.mul_(self.decay).add_(d)
            sent.append(rest.clone() if rest.dim() < 2 else self.largest_of(rest))
            rest -= sent[-1]
        return sent

    def largest_of(self, rest: Tensor) -> Tensor:
        values, sent = rest.flatten().tolist(), torch.zeros_like(rest).flatten()
        for start in range(0, len(values), self.chunk):
            places = range(start, min(start + self.chunk, len(values)))
            num_sent = max(1, round(self.density * len(places)))
            places = sorted(places, key=lambda place: -abs(values[place]))[:num_sent]
            half = max(1, num_sent // 2)
            high, low = (
                rest.new_tensor([abs(values[place]) for place in each]).mean().bfloat16().item()
                for each in (places[:half], places[-half:])
            )
            for place in places:
                level = high if abs(values[place]) > (low + high) / 2 else low
                sent[place] = math.copysign(level, values[place])
        return sent.view_as(rest)


def mean_of(tensors: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*tensors, strict=True)]


def by_hand(
    num_steps: int,
    every: int,
    outer: Outer,
    *,
    warmup: int = 0,
    accumulate: int = 1,
    clip: float | None = None,
    send: Send = lambda rank, change: change,
    dtype: torch.dtype = torch.float32,
    parts: tuple[range, ...] = (range(6),),
    overlap: int = 0,
) -> dict[str, Tensor]:
    """The mean of the weights of two ranks, each of which is a plain loop over its own samples."""
    ranks = [build("mlp").to(dtype) for _ in range(2)]
    optimizers = [adamw(module) for module in ranks]
    weights = [list(module.parameters()) for module in ranks]
    anchor = [p.detach().clone() for p in weights[0]]
    batches = iter(loader("mlp", accumulate))
    outers, under_way = [copy.deepcopy(outer) for _ in parts], []

    def end_exchange(number: int, begun: list[list[Tensor]], mean: list[Tensor]) -> None:
        of_part = [anchor[index] for index in parts[number]]
        outers[number](of_part, mean)
        for own, before in zip(weights, begun, strict=True):
            for a, index, x in zip(of_part, parts[number], before, strict=True):
                own[index].copy_(a + (own[index] - x))

    for step in range(1, num_steps + 1):
        window = [[images.to(dtype), classes] for images, classes in (next(batches) for _ in range(accumulate))]
        for rank, module in enumerate(ranks):
            module.zero_grad()
            for batch in window:
                (module.training_step([part[rank::2] for part in batch], 0) / accumulate).backward()
        if step <= warmup:
            for parameters in zip(*weights, strict=True):
                mean = torch.stack([p.grad for p in parameters]).mean(0)
                for p in parameters:
                    p.grad = mean.clone()
        for module, optimizer in zip(ranks, optimizers, strict=True):
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
        with torch.no_grad():
            if step == warmup:
                anchor = [p.clone() for p in weights[0]]
            for number, part in enumerate(parts):
                if step > warmup and (step - warmup - every * (number + 1) // len(parts)) % every == 0:
                    begun = [[own[index].clone() for index in part] for own in weights]
                    changes = [[anchor[i] - x for i, x in zip(part, own, strict=True)] for own in begun]
                    mean = mean_of([send(rank + 2 * number, change) for rank, change in enumerate(changes)])
                    under_way.append((step + overlap, number, begun, mean))
            while under_way and (under_way[0][0] == step or step == num_steps):
                end_exchange(*under_way.pop(0)[1:])
    return dict(zip(ranks[0].state_dict(), mean_of([[p.detach() for p in own] for own in weights]), strict=True))


def fit(module: LightningModule, strategy: str, num_steps: int = 8, accumulate: int = 1, **flags: Any) -> Engine:
    ckpt_path = flags.pop("ckpt_path", None)
    flags = {**QUIET, "max_steps": num_steps, "accumulate_grad_batches": accumulate, **flags}
    engine = Engine(strategy=strategy, devices=2, **flags)
    validates = type(module).validation_step is not LightningModule.validation_step
    engine.fit(module, loader("mlp", accumulate, 2), loader("mlp", 1, 2) if validates else None, ckpt_path=ckpt_path)
    return engine


@pytest.mark.parametrize(
    ("flag", "outer", "arguments"),
    [
        ("local_sgd_fork:sync_every=3", Mean, {}),
        ("local_sgd_fork:sync_every=3,bucket_cap_mb=0.001", Mean, {"accumulate": 2, "clip": 0.05}),
        ("local_sgd_fork:sync_every=3,warmup=4", Mean, {"warmup": 4}),
        ("diloco_fork:sync_every=2", Nesterov, {}),
        ("diloco_fork:sync_every=2,warmup=1,nesterov=false,bucket_cap_mb=0.001", Momentum, {"warmup": 1, "clip": 0.05}),
        ("diloco_fork:sync_every=3,outer_lr=1,outer_momentum=0,nesterov=false", Mean, {}),
        ("local_sgd_fork:sync_every=3,fragments=2", Mean, {"parts": (range(1), range(1, 6))}),
        ("local_sgd_fork:sync_every=3,overlap_steps=2", Mean, {"overlap": 2}),
        ("diloco_fork:sync_every=4,warmup=1,overlap_steps=3", Nesterov, {"overlap": 3, "warmup": 1, "clip": 0.05}),
        (
            "diloco_fork:sync_every=3,fragments=3,overlap_steps=2,bucket_cap_mb=0.001",  # two are under way at a time
            Nesterov,
            {"parts": (range(1), range(1, 2), range(2, 6)), "overlap": 2, "accumulate": 2},
        ),
    ],
)
def test_each_rank_is_a_plain_loop_between_exchanges_by_hand(flag, outer, arguments):
    module = build("mlp")
    every = int(flag.split("sync_every=")[1][0])
    fit(module, flag, accumulate=arguments.get("accumulate", 1), gradient_clip_val=arguments.get("clip"))
    expected = by_hand(8, every, outer(), **arguments)
    assert largest_difference(module.state_dict(), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("flag", "compression", "outer", "send", "arguments"),
    [
        (
            "local_sgd_fork:sync_every=2", "topk:0.125,chunk=512,bits=2,decay=0.95", Mean,
            Largest(0.125, 512, 0.95), {},
        ),
        # No parameter is a multiple of a chunk, some are shorter than one; each is in a bucket of its own.
        (
            "local_sgd_fork:sync_every=2,bucket_cap_mb=0.001", "topk:0.1,chunk=700,bits=2,decay=0.5", Mean,
            Largest(0.1, 700, 0.5), {"accumulate": 2, "clip": 0.05, "warmup": 2},
        ),
        ("diloco_fork:sync_every=2", "topk:0.2,chunk=100,bits=2", Nesterov, Largest(0.2, 100, 1), {}),
        (
            "local_sgd_fork:sync_every=2,fragments=2,overlap_steps=1", "topk:0.125,chunk=512,bits=2,decay=0.95", Mean,
            Largest(0.125, 512, 0.95), {"parts": (range(1), range(1, 6)), "overlap": 1},
        ),
    ],
)  # fmt: skip
def test_what_is_sent_of_a_change_by_hand(flag, compression, outer, send, arguments):
    module = build("mlp")
    accumulate, clip = arguments.get("accumulate", 1), arguments.get("clip")
    warmup = f",warmup={arguments.get('warmup', 0)}"
    # After Adam's first steps many changes are of nearly one size: in float32 rounding decides which are the largest.
    flags = {"gradient_clip_val": clip, "precision": "64-true", "compression": compression}
    fit(module, flag + warmup, accumulate=accumulate, **flags)
    expected = by_hand(8, 2, outer(), send=send, dtype=torch.float64, **arguments)
    assert largest_difference(module.state_dict(), expected) <= TOLERANCE
    assert max(rest.abs().max() for rests in send.rests.values() for rest in rests) > 100 * TOLERANCE


def test_all_of_a_run_as_a_warm_up_is_ddp():
    warm, plain = build("mlp"), build("mlp")
    fit(warm, "local_sgd_fork:warmup=8")
    fit(plain, "ddp_fork")
    assert largest_difference(warm.state_dict(), plain.state_dict()) == 0


class Uneven(Regression):
    """Weighs samples by hand where it is asked to."""

    weighs = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "weight": len(batch)} if self.weighs else loss


@pytest.mark.parametrize(("weighs", "overlap"), [(False, 0), (True, 0), (True, 2)])
def test_a_rank_counts_by_its_samples_as_they_do_in_its_gradients(weighs, overlap):
    data = rows(14)
    expected = [Regression() for _ in range(2)]
    for rank, module in enumerate(expected):
        optimizer = module.configure_optimizers()
        for first in (0, 5, 10):
            module.zero_grad()
            module.training_step(data.dataset[first : min(first + 5, 14)][rank::2], 0).backward()
            optimizer.step()
    module = Uneven()
    module.weighs = weighs
    engine = Engine(
        strategy=f"local_sgd_fork:sync_every=3,overlap_steps={overlap}",
        devices=2, global_batch_size=5, micro_batch_size=2, **{**QUIET, "max_epochs": 1},
    )  # fmt: skip
    engine.fit(module, data)
    # In the exchange after three steps they have been trained on 3 + 3 + 2 and 2 + 2 + 2 samples.
    for p, *own in zip(module.parameters(), *(each.parameters() for each in expected), strict=True):
        torch.testing.assert_close(p, (8 * own[0] + 6 * own[1]) / 14, atol=1e-6, rtol=0)


# --- bytes


class Sent(Callback):
    """Writes what this rank has sent in all, and the last figures of a monitor."""

    def __init__(self, path: Path, monitor: CommunicationMonitor) -> None:
        self.path, self.monitor = path, monitor

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            sent = sum(sum(wire.sent.values()) for wire in trainer.strategy.wires)
            num_values = sum(p.numel() for p in pl_module.parameters())
            self.path.write_text(json.dumps([sent, num_values, self.monitor.last]))


def sent(path: Path, strategy: str, **flags: Any) -> tuple[int, int, dict[str, float]]:
    monitor = CommunicationMonitor(every_n_steps=8)
    fit(build("mlp"), strategy, callbacks=[monitor, Sent(path, monitor)], logger=True, **flags)
    return tuple(json.loads(path.read_text()))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def sent_by_ddp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    return sent(folder / "ddp", "ddp_fork", default_root_dir=folder)


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
@pytest.mark.parametrize("every", [1, 4, *nightly(2)])
def test_a_step_sends_one_hth_of_what_one_of_ddp_does(name, every, sent_by_ddp, tmp_path):
    ddp, num_values, _ = sent_by_ddp
    assert ddp == 8 * 4 * num_values  # an all-reduce of n bytes between two ranks sends n
    ours, _, figures = sent(tmp_path / "ours", f"{name}_fork:sync_every={every}", default_root_dir=tmp_path)
    assert ours == ddp // every
    assert figures["communication/sent_mb"] == pytest.approx(4 * num_values / every / 1e6)


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_a_step_of_the_warm_up_sends_as_much_as_one_of_ddp(name, sent_by_ddp, tmp_path):
    _, num_values, _ = sent_by_ddp
    warm, _, _ = sent(tmp_path / "warm", f"{name}_fork:sync_every=2,warmup=4", default_root_dir=tmp_path)
    assert warm == 4 * 4 * num_values + 2 * 4 * num_values


@pytest.mark.parametrize("flag", ["local_sgd_fork:sync_every=3", "diloco_fork:sync_every=3,warmup=2"])
def test_an_exchange_is_one_collective_and_other_steps_have_none(flag, tmp_path):
    fit(build("mlp"), flag, 12, callbacks=[Costs(tmp_path)])
    for rank in range(2):
        costs = json.loads((tmp_path / f"costs-{rank}.json").read_text())
        warm = "warmup" in flag
        expected = [step > 2 and (step - 2 * warm) % 3 == 0 for step in range(1, 13)]
        assert [int(each) for each in expected][2:-1] == costs["collectives"][2:-1]


@pytest.fixture(scope="module")
def plain():
    """The weights after exchanges that are not compressed."""
    module = build("mlp")
    fit(module, "diloco_fork:sync_every=2")
    return module.state_dict()


@pytest.mark.parametrize(("compression", "share"), [("bf16", 1 / 2), ("int8", 0.4), ("powersgd:2,start=0", 0.6)])
def test_what_is_exchanged_is_compressed(compression, share, plain, tmp_path):
    compressed = build("mlp")
    path = tmp_path / "sent"
    monitor = CommunicationMonitor(every_n_steps=8)
    fit(
        compressed, "diloco_fork:sync_every=2", compression=compression, callbacks=[monitor, Sent(path, monitor)],
        logger=True, default_root_dir=tmp_path,
    )  # fmt: skip
    num_bytes, num_values, figures = json.loads(path.read_text())
    assert num_bytes <= share * 4 * 4 * num_values
    assert figures["communication/compression_ratio"] >= 1 / share
    # Eight steps of 1e-3, which the outer momentum makes longer.
    assert 0 < largest_difference(plain, compressed.state_dict()) < 3e-2


def test_values_of_two_bits_and_short_indices_are_counted_as_they_are_sent(tmp_path):
    compression = "topk:0.125,chunk=512,bits=2,decay=0.95"
    num_bytes, _, figures = sent(
        tmp_path / "sent", "local_sgd_fork:sync_every=2", compression=compression, default_root_dir=tmp_path
    )
    # Of 64 x 32, 32 x 32 and 32 x 10 weights: 64 values of each whole chunk, and 40 of the last matrix, a shorter one.
    num_chunks, num_sent = 4 + 2 + 1, 6 * 64 + 40
    in_an_exchange = 4 * num_chunks + num_sent * 2 / 8 + num_sent * 9 / 8 + 4 * (32 + 32 + 10)
    assert num_bytes == 4 * in_an_exchange
    assert figures["communication/sent_mb"] == pytest.approx(in_an_exchange / 2 / 1e6)


# --- what is seen of it from outside


class Watched(MLP):
    """Has a buffer that is another on each rank, and notes the weights that are validated."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net.append(nn.BatchNorm1d(10))
        self.folder = folder

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        step, rank = self.trainer.global_step, self.trainer.global_rank
        torch.save(copy.deepcopy(self.state_dict()), self.folder / f"validated-{step}-{rank}")

    def on_train_batch_start(self, *_: Any) -> None:
        self._save("begins")

    def on_train_batch_end(self, *_: Any) -> None:
        self._save("ends")

    def _save(self, name: str) -> None:
        step, rank = self.trainer.global_step, self.trainer.global_rank
        torch.save(copy.deepcopy(self.state_dict()), self.folder / f"{name}-{step}-{rank}")


def test_what_is_validated_is_the_mean_and_each_rank_goes_on_with_its_own(tmp_path):
    def state(name: str, step: int, rank: int) -> dict[str, Tensor]:
        return torch.load(tmp_path / f"{name}-{step}-{rank}", weights_only=True)

    torch.manual_seed(1)
    module = Watched(tmp_path).train()
    fit(module, "local_sgd_fork:sync_every=4", 6, limit_val_batches=1, val_check_interval=1)
    for step in range(1, 6):
        own = [state("ends", step, rank) for rank in range(2)]
        validated = [state("validated", step, rank) for rank in range(2)]
        after = [state("begins", step, rank) for rank in range(2)]
        assert largest_difference(*validated) == 0
        assert all(largest_difference(own[rank], after[rank]) == 0 for rank in range(2))
        assert (largest_difference(*own) == 0) == (step == 4)
        for name, value in validated[0].items():
            if value.is_floating_point():
                torch.testing.assert_close(value, (own[0][name] + own[1][name]) / 2)
    own = [state("ends", 6, rank) for rank in range(2)]
    for name, value in module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, (own[0][name] + own[1][name]) / 2)


class Various(MLP):
    """Parameters of two dtypes, a frozen one, and a matrix that is shorter than a chunk."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net[2].double()
        self.net[0].bias.requires_grad_(False)
        self.small = nn.Parameter(torch.ones(1, 3))
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        hidden = self.net[1](self.net[0](images.flatten(1)))
        logits = self.net[4](self.net[3](self.net[2](hidden.double())).float())
        return nn.functional.cross_entropy(logits * self.small.mean(), classes)

    def on_train_batch_end(self, *_: Any) -> None:
        state = copy.deepcopy(self.state_dict())
        torch.save(state, self.folder / f"{self.trainer.global_step}-{self.trainer.global_rank}")


@pytest.mark.parametrize("flag", ["local_sgd_fork:sync_every=2", "diloco_fork:sync_every=2"])
@pytest.mark.parametrize("compression", ["topk:0.1,chunk=500,bits=2,decay=0.9", "topk:0.1,chunk=500,decay=0.9+bf16"])
def test_after_an_exchange_all_ranks_have_the_same_weights(flag, compression, tmp_path):
    torch.manual_seed(1)
    module = Various(tmp_path)
    before = copy.deepcopy(module.state_dict())
    fit(module, flag, 6, compression=compression)
    for step in range(1, 7):
        own = [torch.load(tmp_path / f"{step}-{rank}", weights_only=True) for rank in range(2)]
        different = {name for name in own[0] if not torch.equal(own[0][name], own[1][name])}
        assert different == (set() if step % 2 == 0 else set(before) - {"net.0.bias"})
    after = module.state_dict()
    assert {name for name in after if torch.equal(after[name], before[name])} == {"net.0.bias"}


# --- what goes wrong


def test_out_of_memory_has_the_step_done_again_by_all(tmp_path):
    scarce, ample = Hungry(most=3, where="backward", from_step=3), Hungry()
    fit_hungry(scarce, "local_sgd:sync_every=2", 2)
    fit_hungry(ample, "local_sgd:sync_every=2", 2, micro_batch_size=3)
    names = dict(scarce.named_parameters())
    found, expected = ({name: each.state_dict()[name] for name in names} for each in (scarce, ample))
    assert largest_difference(found, expected) <= TOLERANCE


class Thaws(MLP):
    def on_train_batch_end(self, *_: Any) -> None:
        self.net[0].requires_grad_(True)


def test_a_parameter_that_begins_to_be_trained_is_named():
    module = Thaws()
    module.net[0].requires_grad_(False)
    with pytest.raises(ProcessRaisedException, match=r"began to be trained in mid-run: net\.0\.weight, net\.0\.bias"):
        fit(module, "local_sgd_fork:sync_every=2")


class Spoils(MLP):
    """On rank 1 a weight is infinite after the second step."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2 and self.global_rank == 1:
            with torch.no_grad():
                self.net[2].bias[0] = torch.inf


@pytest.mark.parametrize("more", ["", ",fragments=3,overlap_steps=2"])
def test_a_weight_that_is_not_finite_is_named_before_it_is_remembered(more):
    with pytest.raises(
        ProcessRaisedException, match=r"the change of 'net\.\d\.(weight|bias)' on rank 1 was infinite or NaN"
    ):
        fit(Spoils(), f"diloco_fork:sync_every=3{more}", compression="topk:0.5", nonfinite="ignore")


def test_a_rank_that_fails_ends_the_run():
    class Fails(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_rank == 1 and batch_idx == 5:
                raise KeyError("of rank 1")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ProcessRaisedException, match="of rank 1"):
        fit(Fails(), "local_sgd_fork:sync_every=4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"strategy": "local_sgd:sync_every=0"}, "sync_every must be a whole number of at least 1, but got 0"),
        ({"strategy": "local_sgd:sync_every=2.5"}, "sync_every must be a whole number, but got '2.5'"),
        ({"strategy": "local_sgd:sync_evry=2"}, "strategy 'local_sgd' 'sync_evry'. Did you mean 'sync_every'?"),
        ({"strategy": "local_sgd:outer_lr=1"}, "unknown option of strategy 'local_sgd' 'outer_lr'"),
        ({"strategy": "local_sgd:16"}, "write local_sgd:key=value"),
        ({"strategy": "local_sgd:warmup=-1"}, "warmup must be a whole number of at least 0, but got -1"),
        ({"strategy": "local_sgd:fragments=17"}, "fragments must be a whole number of at least 1 and at most 16"),
        ({"strategy": "diloco:overlap_steps=16"}, "overlap_steps must be a whole number of at least 0 and at most 15"),
        ({"strategy": "diloco:outer_lr=0"}, "outer_lr must be greater than 0, but got 0"),
        ({"strategy": "diloco:outer_momentum=1.5"}, "outer_momentum must be at least 0 and at most 1, but got 1.5"),
        ({"strategy": "diloco:outer_momentum=0"}, "nesterov=true needs an outer_momentum greater than 0"),
        ({"strategy": "diloco", "compression": "auto"}, "'diloco' can't do compression 'auto': auto compares"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_an_error_when_the_engine_is_built(flags, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        Engine(**QUIET, devices=2, **flags)


@pytest.mark.parametrize("name", ["local_sgd_spawn", "diloco_spawn"])
def test_a_strategy_is_shown_by_its_flag(name):
    assert repr(Engine(**QUIET, strategy=name, devices=2).strategy) == repr(name)


def test_one_rank_alone_is_a_plain_run():
    ours, plain = Regression(), Regression()
    for module, strategy in ((ours, "local_sgd_fork:sync_every=3"), (plain, "single")):
        Engine(**{**QUIET, "max_epochs": 1}, strategy=strategy, devices=1).fit(module, DataLoader(rows().dataset, 4))
    assert largest_difference(ours.state_dict(), plain.state_dict()) <= 1e-6
