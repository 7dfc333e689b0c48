"""What a step does beside computing, counted: on a GPU each copy and each read makes the host, or the device, wait."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.reliability.nonfinite import NonFiniteError
from polyphase.engine.strategies.dp import _merged_logs, _merged_outputs
from tests.engine.loop.costs import calls_of_a_step
from tests.engine.parity import MICRO_BATCH, QUIET, WideVocabulary, build, largest_difference, loader
from tests.pairs import nightly

from . import in_a_child, install

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute

NUM_STEPS = 11
STEPS = range(5, 10)
"""Far from the first step, and from those that are logged; of each five, one at least is an exchange."""


class Counts(Callback):
    """Fails where steps in the middle of a run have read a number of the device, or copied more than expected."""

    def __init__(self, num_copies: int, num_pageable: int, num_reads: int = 0, **others: int) -> None:
        self.at_step: list[dict[str, int]] = []
        self.expected = {"to_device": num_copies, "to_device_pageable": num_pageable, "reads": num_reads, **others}

    def on_train_batch_end(self, *_: Any) -> None:
        self.at_step.append(install().counts())

    def on_train_end(self, *_: Any) -> None:
        first, last = self.at_step[STEPS.start], self.at_step[STEPS.stop]
        per_step = {name: (last[name] - first[name]) / len(STEPS) for name in first if name != "operators"}
        assert per_step == {**dict.fromkeys(first.keys() - {"operators"}, 0), **self.expected}


def _train(flag: str, devices: int, is_pinned: bool, **flags: Any) -> int:
    subject = "knows its device"  # which says what its loss counts for, as a number
    counts = Counts(2, 0 if is_pinned else 2)  # images and classes
    engine = Engine(
        strategy=flag,
        accelerator="sim",
        devices=devices,
        max_epochs=1,
        callbacks=[counts],
        log_every_n_steps=50,
        **QUIET,
        **flags,
    )
    batches = loader(subject, 1, engine.data_size, NUM_STEPS)
    batches.pin_memory = is_pinned
    engine.fit(build(subject), batches)
    return engine.global_step


@pytest.mark.parametrize(
    ("flag", "devices", "is_pinned"),
    [
        ("single", 1, False),
        # Of those that consist of others, one each.
        *nightly(
            ("fsdp_fork", 2, False),
            ("single", 1, True),
            ("fsdp+tp_fork:tp=2", 4, True),
            ("pp+ddp_fork:pipeline_size=2,microbatches=2", 4, True),
            ("hsdp_fork:replicate=2", 4, True),
        ),
        ("ddp_fork", 2, True),
        ("zero1_fork", 2, True),
        ("fsdp_fork", 2, True),
        ("tp_fork", 2, True),
        ("hsdp+tp_fork:replicate=2,tp=2", 4, True),
        ("pp_fork:microbatches=4", 2, True),
        ("pp+fsdp_fork:pipeline_size=2,microbatches=2", 4, True),
        ("local_sgd_fork:sync_every=4", 2, True),
        ("diloco_fork:sync_every=4", 2, True),
    ],
)
def test_a_step_copies_its_batch_beside_computing_and_waits_for_nothing(flag, devices, is_pinned):
    assert in_a_child(_train, flag, devices, is_pinned) == NUM_STEPS


@pytest.mark.parametrize(
    ("flag", "devices", "compression"),
    [
        ("ddp_fork", 2, "powersgd:2,start=2"),
        *nightly(("ddp_fork", 2, "topk:0.1")),
        ("ddp_fork", 2, "sign:start=2"),
        ("zero1_fork", 2, "int8:feedback=true"),
        ("fsdp_fork", 2, "int8"),
        ("hsdp_fork:replicate=2", 4, "topk:0.1"),
    ],
)
def test_a_comm_hook_reads_and_waits_for_nothing(flag, devices, compression):
    assert in_a_child(_train, flag, devices, True, compression=compression) == NUM_STEPS


def _scale_and_average() -> int:
    module = build("mlp")
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-3)
    engine = Engine(
        strategy="ddp_fork",
        accelerator="sim",
        devices=2,
        precision="16-mixed",
        compression="bf16",
        max_epochs=1,
        callbacks=[Counts(2, 2, num_reads=1)],
        log_every_n_steps=50,
        **QUIET,
    )
    engine.fit(module, loader("mlp", 1, engine.data_size))
    return engine.global_step


def test_a_comm_hook_does_not_wait_for_the_loss_scale():
    # Whether a step overflowed is read once: by torch, before it calls the optimizer.
    assert in_a_child(_scale_and_average) >= 15


def _fused(module: LightningModule) -> LightningModule:
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), fused=True)
    return module


class KeepsCounts(torch.optim.Optimizer):
    """Not torch's: an SGD with momentum that keeps a mean of its own, made anew in each step, and counts in Python."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "num_steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num_steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                state["num"] = state.get("num", 0) + 1
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                p.sub_(state["mean"] * group["lr"] / state["num"] / group["num_steps"])


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    "one by one": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=False),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
    "not torch's": KeepsCounts,
}


def _leave_out(
    has_bad: bool, flag: str, devices: int, optimizer: str = "", bad: int = 2, **flags: Any
) -> dict[str, Tensor]:
    """Trains beside a bad batch, or without the samples of it; counts in steps after it."""
    images, classes = loader("mlp", 1, num_steps=NUM_STEPS + 1).dataset.tensors
    rows = torch.arange(len(images))
    if has_bad:
        images[bad * MICRO_BATCH + 1] = torch.nan
    else:
        rows = rows[(rows < bad * MICRO_BATCH) | (rows >= (bad + 1) * MICRO_BATCH)]
    # A copy to pinned memory, where the host looks a step later: it does not wait for it.
    counts = Counts(2, 0, to_host=int(optimizer not in ("", "momentum")))
    engine = Engine(
        strategy=flag, accelerator="sim", devices=devices, max_epochs=1, callbacks=[counts], log_every_n_steps=50,
        check_first_steps=False, **QUIET, **{"nonfinite": "skip", **flags},
    )  # fmt: skip
    data = TensorDataset(images[rows], classes[rows])
    module = _fused(build("mlp"))
    if optimizer:
        module.configure_optimizers = lambda: _scheduled(OPTIMIZERS[optimizer](module.parameters()))
    engine.fit(module, DataLoader(data, batch_size=MICRO_BATCH // engine.data_size, pin_memory=True))
    return {name: value.cpu() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("flag", "devices", "flags"),
    [
        ("single", 1, {}),
        ("ddp_fork", 2, {"gradient_clip_val": 0.1}),
        ("ddp_fork", 2, {"compression": "topk:0.1"}),
        ("fsdp_fork", 2, {}),
    ],
)
def test_a_step_is_left_out_on_the_device_without_a_wait(flag, devices, flags):
    with_it, without = (in_a_child(_leave_out, has_bad, flag, devices, **flags) for has_bad in (True, False))
    assert largest_difference(with_it, without) == 0


def _scheduled(optimizer: torch.optim.Optimizer) -> Any:
    if not isinstance(optimizer, torch.optim.AdamW):
        return optimizer
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)  # each rate follows from the one before
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize(
    ("flag", "devices", "optimizer", "bad", "flags"),
    [
        ("single", 1, "adamw", 2, {}),
        ("single", 1, "adamw", 0, {}),  # there is no state before the first step
        ("single", 1, "adamw", NUM_STEPS, {}),  # and no step after the last
        *nightly(("single", 1, "one by one", 2, {}), ("single", 1, "adagrad", 2, {})),
        ("single", 1, "momentum", 2, {"gradient_clip_val": 0.1}),
        ("single", 1, "not torch's", 2, {}),
        ("ddp_fork", 2, "adamw", 2, {"compression": "topk:0.1"}),
        ("ddp_fork", 2, "adamw", 2, {"accumulate_grad_batches": 1, "skip_spikes": 1e9}),
        ("fsdp_fork", 2, "adamw", 2, {}),
    ],
)
def test_nor_does_the_host_wait_for_optimizers_that_read_no_flag(flag, devices, optimizer, bad, flags):
    with_it, without = (
        in_a_child(_leave_out, has_bad, flag, devices, optimizer, bad, **flags) for has_bad in (True, False)
    )
    assert largest_difference(with_it, without) == 0


def _ends_with_error() -> bool:
    images, classes = loader("mlp", 1, num_steps=NUM_STEPS + 1).dataset.tensors
    images[2 * MICRO_BATCH + 1] = torch.nan
    after: list[Any] = []

    class Keeps(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            after.append([p.detach().clone() for p in module.parameters()])

    engine = Engine(
        accelerator="sim", devices=1, max_epochs=1, callbacks=[Keeps()], log_every_n_steps=5, nonfinite="error", **QUIET
    )
    with pytest.raises(NonFiniteError, match="the loss was not finite at step 2"):
        engine.fit(_fused(build("mlp")), DataLoader(TensorDataset(images, classes), batch_size=MICRO_BATCH))
    before, *later = after[1:]
    return len(later) > 1 and all(torch.equal(p, q) for weights in later for p, q in zip(before, weights, strict=True))


def _writes(folder: Path) -> list[str]:
    images, classes = loader("mlp", 1, num_steps=NUM_STEPS + 1).dataset.tensors
    images[2 * MICRO_BATCH + 1] = torch.nan
    snapshots = Snapshot(folder / "snapshots")
    flags = {"accelerator": "sim", "devices": 1, "max_epochs": 1, "log_every_n_steps": 50, "nonfinite": "error"}
    data = DataLoader(TensorDataset(images, classes), batch_size=MICRO_BATCH)
    with pytest.raises(NonFiniteError, match=r"the loss was not finite at step 2.* that of net.*has the batch"):
        Engine(callbacks=[snapshots], **flags, **QUIET).fit(_fused(build("mlp")), data)
    (path,) = (folder / "nonfinite").iterdir()
    ((batch, _),) = (one["arguments"] for one in torch.load(path, weights_only=True)["micro_batches"])
    assert batch[0][1].isnan().all()
    return [path.name]


@pytest.mark.filterwarnings("ignore:.* is not saved")
def test_what_repeats_an_error_is_written_a_step_later_when_the_flag_has_arrived(tmp_path):
    assert in_a_child(_writes, tmp_path) == ["step=2-rank=0.pt"]


def test_until_an_error_is_read_no_step_changes_a_weight():
    assert in_a_child(_ends_with_error)


def _calls() -> float:
    return calls_of_a_step(Engine(accelerator="sim", devices=1, max_epochs=1, log_every_n_steps=8, **QUIET))


def test_a_step_makes_few_calls_more_than_a_loop_by_hand():
    # Some 73 as on the CPU, which are torch's own in most, and 12 of the copy on a stream of its own.
    assert in_a_child(_calls) <= 90


class Blocks(LightningModule):
    """Are made within the run."""

    NUM_BYTES = 4 * 256 * 256
    """Of one block."""

    def configure_model(self) -> None:
        self.blocks = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        peak, held = torch.sim.max_memory_allocated(), torch.sim.memory_allocated()
        assert held < 8.5 * self.NUM_BYTES, f"{held / self.NUM_BYTES:.1f} blocks"
        assert peak < 11 * self.NUM_BYTES, f"{peak / self.NUM_BYTES:.1f} blocks"
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _lay_out(flag: str) -> int:
    engine = Engine(strategy=flag, accelerator="sim", devices=2, max_steps=1, check_first_steps=False, **QUIET)
    engine.fit(Blocks(), DataLoader(torch.randn(4, 256), 2))
    return engine.global_step


@pytest.mark.parametrize("flag", ["fsdp_fork", "fsdp_fork:rank0_init=true", *nightly("fsdp_fork:meta_init=true")])
def test_a_module_is_never_whole_on_a_device(flag):
    assert in_a_child(_lay_out, flag) == 1


class HeldAmidWindow(Callback):
    """Notes how many blocks' bytes a device holds after the first micro-batch of a window."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "held"

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and trainer.is_global_zero:
            self.path.write_text(str(torch.sim.memory_allocated() / Blocks.NUM_BYTES))


def _accumulate(flag: str, folder: Path) -> None:
    flags = {"accelerator": "sim", "devices": 2, "max_steps": 1, "accumulate_grad_batches": 2, **QUIET}
    engine = Engine(strategy=flag, callbacks=[HeldAmidWindow(folder)], check_first_steps=False, **flags)
    engine.fit(Blocks(), DataLoader(torch.randn(8, 256), 2))


@pytest.mark.parametrize(
    ("flag", "num_blocks"),
    [("fsdp_fork", 8 + 8), ("fsdp_fork:no_sync=true", 8 + 16), *nightly(("fsdp_fork:no_sync=false", 8 + 8))],
)
def test_within_a_node_gradients_are_kept_as_shards_amid_a_window(flag, num_blocks, tmp_path):
    in_a_child(_accumulate, flag, tmp_path)
    assert float((tmp_path / "held").read_text()) == pytest.approx(num_blocks, abs=0.6)


class Peak(Callback):
    def __init__(self, folder: Path) -> None:
        self.path = folder / "peak"

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(str(torch.sim.max_memory_allocated()))


def _peak(flag: str, folder: Path) -> None:
    module = WideVocabulary(1024, 1024)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1e-3)
    flags = {"accelerator": "sim", "devices": 2, "max_steps": 2, "check_first_steps": False, **QUIET}
    Engine(strategy=flag, callbacks=[Peak(folder)], **flags).fit(module, loader("wide vocabulary", 1, 2))


def test_a_large_embedding_and_output_layer_are_whole_one_after_the_other(tmp_path):
    peaks = []
    for flag in ("fsdp_fork", "fsdp_fork:units=blocks"):
        in_a_child(_peak, flag, tmp_path)
        peaks.append(int((tmp_path / "peak").read_text()))
    assert peaks[0] < peaks[1] - 4 * 1024 * 1024, peaks


def _serve() -> int:
    # To each of two servers a rank sends gradients as one, and gets parameters as one, beside the batch's two tensors.
    counts = Counts(2 + 2, 2 + 2, to_device_in_line=2, to_host=2)
    flags = {"accelerator": "sim", "devices": 2, "max_epochs": 1, "log_every_n_steps": 50, **QUIET}
    engine = Engine(strategy="ps_fork", callbacks=[counts], **flags)
    engine.fit(build("mlp"), loader("mlp", 1, engine.data_size, NUM_STEPS))
    return engine.global_step


def test_what_a_server_is_sent_and_sends_is_one_copy():
    assert in_a_child(_serve) == NUM_STEPS


def _merges() -> dict[str, int]:
    device = torch.device("sim", 0)
    losses = [torch.full((), float(number), device=device) for number in (1, 3)]
    before = install().counts()
    output = _merged_outputs([{"loss": loss, "weight": weight} for loss, weight in zip(losses, (1, 3), strict=True)],
                            [4, 4], device)  # fmt: skip
    mean = _merged_outputs(losses, [1, 3], device)
    (logged,) = _merged_logs([[{"name": "a", "value": 1.0}], [{"name": "a", "value": 3}]], [1, 3], device)
    found = {name: number - before[name] for name, number in install().counts().items() if name != "operators"}
    assert [float(value) for value in (output["loss"], output["weight"], mean, logged["value"])] == [2.5, 4, 2.5, 2.5]
    return {name: number for name, number in found.items() if number}


def test_what_copies_of_a_module_return_is_merged_without_a_copy():
    # `dp` needs CUDA; what becomes of its copies' outputs needs a device only.
    assert in_a_child(_merges) == {}
