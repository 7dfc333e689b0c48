"""A save takes the values of its moment, while training continues, and waits for nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checkpoint import load_checkpoint
from polyphase.engine.checkpoint.staging import Staging
from tests.engine.parity import QUIET, build, largest_difference, loader
from tests.pairs import nightly

from . import in_a_child, install

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute

NUM_BYTES = 3 * 4 * 1000
"""Of `_state`, on the device."""


def _state(value: float) -> dict[str, Tensor]:
    tensors = {f"p{i}": torch.full((1000,), value + i, device="sim", dtype=torch.float32) for i in range(3)}
    return {**tensors, "step": torch.tensor(value)}


def _values(staged: dict[str, Tensor]) -> list[float]:
    assert all(tensor.device.type == "cpu" for tensor in staged.values())
    assert all(bool((tensor == tensor.flatten()[0]).all()) for tensor in staged.values())
    return [float(tensor.flatten()[0]) for tensor in staged.values()]


def _spoil(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor.data.fill_(-1)


def _later_writes() -> tuple[list[list[float]], list[int], list[int], bool]:
    compiled, staging = install(), Staging()
    tensors, read, copied, addresses = _state(0.0), [], [], []
    held = compiled.memory()[0]
    for turn in range(3):
        for tensor in tensors.values():
            tensor.fill_(turn) if tensor.dim() == 0 else tensor.copy_(_state(turn)["p0"])
        before = compiled.counts()["to_host"]
        complete = staging.begin(tensors)
        copied.append(compiled.counts()["to_host"] - before)
        _spoil(tensors)
        staged = complete()
        addresses.append([tensor.data_ptr() for tensor in staged.values()])
        read.append(_values(staged))
    return read, copied, [compiled.memory()[0] - held], addresses[0] == addresses[1] == addresses[2]


def test_what_is_written_later_is_not_saved_and_nothing_is_waited_for():
    read, copied, left, is_same_memory = in_a_child(_later_writes)
    assert read == [[turn] * 4 for turn in range(3)]
    assert copied == [0, 0, 0]  # before `begin` returns
    assert left == [0]  # bytes on the device
    assert is_same_memory  # of the host, which takes long to pin


def _with_room_for(num_tensors: float, peak_bytes: int = 0) -> tuple[list[float], int]:
    """What is saved, and how many copies to the host the trainer waits for, on a device of so much spare memory."""
    compiled, staging = install(), Staging()
    tensors = _state(5.0)
    torch.empty(peak_bytes // 4, device="sim")
    free = compiled.memory()[1] + int(num_tensors * 4000)
    compiled.set_limit(free * 10 // 9 + 16)  # a tenth stays free
    before = compiled.counts()["to_host"]
    complete = staging.begin(tensors)
    num_waited = compiled.counts()["to_host"] - before
    _spoil(tensors)
    return _values(complete()), num_waited


@pytest.mark.parametrize(("room", "num_waited"), [(3.1, 0), (2.1, 1), (1.1, 2), (0.5, 3), (-0.5, 3)])
def test_what_the_device_has_no_room_for_is_waited_for(room, num_waited):
    assert in_a_child(_with_room_for, room) == ([5.0, 6.0, 7.0, 5.0], num_waited)


def test_memory_that_a_step_has_needed_is_no_room():
    # Free now, but not beside the next step.
    assert in_a_child(_with_room_for, 0.5, peak_bytes=10 * NUM_BYTES) == ([5.0, 6.0, 7.0, 5.0], 3)


def _taken_again() -> list[int]:
    """Copies that three saves in a row wait for, beside steps that need memory: the last copies are no step's."""
    compiled, staging = install(), Staging()
    tensors = _state(5.0)
    torch.empty(10 * NUM_BYTES // 4, device="sim")
    compiled.set_limit((compiled.memory()[1] + int(1.5 * NUM_BYTES)) * 10 // 9)
    waited = []
    for _ in range(3):
        before = compiled.counts()["to_host"]
        complete = staging.begin(tensors)
        waited.append(compiled.counts()["to_host"] - before)
        torch.empty(10 * NUM_BYTES // 4, device="sim")  # the next step
        complete()
    return waited


def test_copies_do_not_count_as_what_a_step_has_needed():
    assert in_a_child(_taken_again) == [0, 0, 0]


class Spoils(Callback):
    """Notes the weights as they are saved, and writes others before the next step, by the way that leaves no trace."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
        if trainer.is_global_zero:
            noted = {name: value.detach().cpu().clone() for name, value in whole.items()}
            torch.save(noted, self.folder / f"{trainer.global_step}.pt")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters():
            (parameter._local_tensor if isinstance(parameter, DTensor) else parameter).data.mul_(0.9)


def _spoiled(flag: str, devices: int, folder: Path) -> int:
    saves = Snapshot(folder / "saved", every_n_steps=3, every_minutes=None, keep_last=100)
    engine = Engine(
        strategy=flag,
        accelerator="sim",
        devices=devices,
        max_steps=9,
        callbacks=[Spoils(folder), saves],
        check_first_steps=False,  # which finds that weights are written between two steps
        **QUIET,
    )
    engine.fit(build("mlp"), loader("mlp", 1, engine.data_size))
    return engine.global_step


@pytest.mark.parametrize(("flag", "devices"), [("single", 1), *nightly(("ddp_fork", 2)), ("fsdp_fork", 2)])
def test_a_hook_that_writes_weights_after_a_save_does_not_spoil_it(flag, devices, tmp_path):
    assert in_a_child(_spoiled, flag, devices, tmp_path) == 9
    paths = [path for path in (tmp_path / "saved").iterdir() if path.is_dir() and not path.is_symlink()]
    saved = {state["global_step"]: state["state_dict"] for state in map(load_checkpoint, paths)}
    assert sorted(saved) == [3, 6, 9]
    for step, weights in saved.items():
        assert largest_difference(weights, torch.load(tmp_path / f"{step}.pt")) == 0
