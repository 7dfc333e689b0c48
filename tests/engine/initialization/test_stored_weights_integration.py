"""Weights that each rank reads into its part: equal to a loop that has read all of them, in less memory."""

import ctypes
import json
import math
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine, read_weights
from tests.engine.parity import TOLERANCE, TiedGPT, largest_difference, loader, plain_loop, sgd
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

MIB = 2**20
NUM_STEPS = 2


class Subject(TiedGPT):
    """With SGD: a step has few operators, each of which takes time under DTensor."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def gpt() -> TiedGPT:
    return Subject(num_layers=2, num_heads=4, dim=16, context_length=16)


def batches(data_size: int = 1) -> DataLoader:
    return loader("gpt, tied", 1, data_size, NUM_STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of weights in bfloat16, none of which a module would begin with."""
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("weights")
    save_file({name: value.bfloat16().clone() for name, value in gpt().state_dict().items()}, path / "gpt.safetensors")
    return path


@pytest.fixture(scope="module")
def expected(folder):
    module = gpt()
    module.load_state_dict(load_file(folder / "gpt.safetensors"))
    return plain_loop(module, batches(), 1, None, make_optimizer=sgd)


FLAGS = [
    ("single", 1),
    ("ddp_fork", 2),
    ("fsdp_fork", 2),
    ("tp_fork", 2),
    ("pp_fork", 2),
    *nightly(("fsdp+tp_fork", 4), ("pp+fsdp_fork", 4)),
]


@pytest.mark.parametrize(("flag", "devices"), FLAGS)
def test_equal_to_a_loop_that_has_read_everything(flag, devices, folder, expected):
    torch.manual_seed(1)
    module = read_weights(folder, gpt).train()
    check = flag == "fsdp_fork"  # with a copy of the module, which has to read all
    engine = Engine(strategy=flag, devices=devices, accelerator="cpu", max_epochs=1, check_first_steps=check, **QUIET)
    engine.fit(module, batches(engine.data_size))
    assert largest_difference(module.state_dict(), expected) <= TOLERANCE


NIGHTLY = (pytest.param(flag, marks=pytest.mark.nightly) for flag in ("ddp_fork", "tp_fork", "pp_fork"))


@pytest.mark.parametrize("flag", ["single", "fsdp_fork", *NIGHTLY])
def test_verify_reads_them_and_leaves_the_module_as_it_is(flag, folder, expected):
    torch.manual_seed(1)
    module = read_weights(folder, gpt).train()
    flags = {"strategy": flag, "devices": 1 if flag == "single" else 2, "accelerator": "cpu", "max_epochs": 1, **QUIET}
    engine = Engine(check_first_steps=False, **flags)
    certificate = engine.verify(module, batches(engine.data_size), steps=2)
    assert certificate.equal, certificate
    assert all(parameter.is_meta for parameter in module.parameters())
    engine.fit(module, batches(engine.data_size))
    assert largest_difference(module.state_dict(), expected) <= TOLERANCE


def test_a_checkpoint_is_opened_in_their_place(folder, expected, tmp_path):
    flags = {**QUIET, "accelerator": "cpu", "devices": 1, "strategy": "single"}
    engine = Engine(max_steps=NUM_STEPS // 2, **flags)
    engine.fit(read_weights(folder, gpt).train(), batches())
    engine.save_checkpoint(tmp_path / "half.ckpt")
    rest = read_weights(folder, gpt).train()
    Engine(max_epochs=1, **flags).fit(rest, batches(), ckpt_path=tmp_path / "half.ckpt")
    assert largest_difference(rest.state_dict(), expected) <= TOLERANCE


class Large(LightningModule):
    """128 MiB in eight layers."""

    def __init__(self) -> None:
        super().__init__()
        pairs = (
            nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 2048, bias=False))
            for _ in range(4)
        )
        self.blocks = nn.ModuleList(pairs)

    def test_step(self, batch, batch_idx):
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        self.log("mean", x.mean(), sync_dist=True)


class PeakOfSetup(Callback):
    """Writes by how much a rank's memory has grown at most while the strategy set the module up."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer, pl_module, stage):
        ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have left could be taken again, unseen
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
        self.before = _peak_bytes()

    def on_test_start(self, trainer, pl_module):
        (self.path / str(trainer.global_rank)).write_text(str(_peak_bytes() - self.before))


def _peak_bytes() -> int:
    (found,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024


def _write_zeros(path: Path) -> None:
    """A file for `Large`, without the memory that its values would take in this process."""
    with torch.device("meta"):
        shapes = {name: list(value.shape) for name, value in Large().state_dict().items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("flag", ["fsdp_fork", "tp_fork", "pp_fork"])
def test_a_rank_has_no_more_in_memory_than_its_part_and_one_tensor(flag, tmp_path):
    _write_zeros(tmp_path / "large.safetensors")
    engine = Engine(
        strategy=flag, devices=2, accelerator="cpu", callbacks=[PeakOfSetup(tmp_path)],
        check_first_steps=False, **QUIET,
    )  # fmt: skip
    engine.test(read_weights(tmp_path, Large), DataLoader(TensorDataset(torch.ones(4, 2048)), batch_size=2))
    peaks = [int((tmp_path / str(rank)).read_text()) / MIB for rank in range(2)]
    assert all(60 < peak < 64 + 16 + 16 for peak in peaks), peaks
