"""Tensors through `Files`: every dtype and shape, bit for bit, and no code out of a checkpoint."""

import os
from pathlib import Path

import pytest
import torch

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, dcp_storage, read_manifest
from polyphase.engine.checkpoint.checked_io import Files
from polyphase.engine.checkpoint.dcp_storage import tensors_in

from .sample_checkpoints import about, save, seal

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int8, torch.uint8, torch.bool),
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("where", ["local", "memory"])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, where):
    noise = torch.randint(0, 2, (1024,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    state = {str(dtype): noise.view(torch.bool).to(dtype) for dtype in DTYPES}
    state |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "no elements": torch.zeros(())[None][:0]}
    rows = torch.arange(12.0).view(3, 4)
    state |= {"transposed": rows.T, "strided": rows[::2, 1::2], "row": rows[1], "expanded": rows[0].expand(2, 4)}
    state |= {"not a number": torch.tensor([float("nan"), -0.0, float("inf")])}
    path = save(tmp_path / "x" if where == "local" else f"memory://{tmp_path.name}/x", state_dict=state)
    found = AsyncCheckpointer().load(path)["state_dict"]
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def test_an_index_that_no_reader_opens_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("polyphase.engine.checkpoint.dcp_storage._INDEX_MOST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"its tensors\.json would have \d+ bytes, and no reader opens more"):
        save(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_index_is_opened_up_to_256_mib(tmp_path, monkeypatch):
    """As docs/security.md says."""
    assert dcp_storage._INDEX_MOST_BYTES == 256 << 20
    path = save(tmp_path / "x")
    monkeypatch.setattr(dcp_storage, "_INDEX_MOST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"tensors\.json has more than 100 bytes"):
        AsyncCheckpointer().load(path)


def test_a_tensor_is_read_into_its_place(tmp_path):
    path = save(tmp_path / "x", state_dict={"large": torch.ones(2**24)})
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before = peak_bytes()
    found = AsyncCheckpointer().load(path)["state_dict"]["large"]
    assert peak_bytes() - before < 1.5 * found.nbytes
    assert found.sum() == found.numel()


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def test_shapes_and_dtypes_are_known_without_reading(tmp_path):
    path = save(tmp_path / "x")
    stored = tensors_in(Files(path), read_manifest(path))
    about_bias = stored["state_dict.net.bias"]
    assert (about_bias.size, about_bias.properties.dtype) == (torch.Size([4]), torch.float32)
    assert "callbacks.Average.large" in stored


def test_no_path_of_the_machine_is_recorded(tmp_path):
    path = Path(save(tmp_path / "x"))
    for file in path.iterdir():
        assert os.fsencode(tmp_path) not in file.read_bytes(), file.name


class Evil:
    """What an attacker's pickle does when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def forge(path: str, name: str, content: bytes) -> None:
    """Replaces a file and makes the manifest fit, as an attacker would."""
    Path(path, name).write_bytes(content)
    seal(path)


@pytest.mark.parametrize("name", ["rest.pt", "ranks.pt"])
def test_the_rest_executes_nothing_either(tmp_path, name):
    path = save(tmp_path / "x")
    torch.save({"a": Evil(tmp_path / "executed")}, tmp_path / "evil.pt")
    forge(path, name, (tmp_path / "evil.pt").read_bytes())
    with pytest.raises(CheckpointError, match=r"that are no plain values: .* unsupported GLOBAL \w+\.system whose"):
        AsyncCheckpointer().load(path)
    assert not (tmp_path / "executed").exists()


def test_the_manifest_is_as_it_was_asked_for(tmp_path):
    manifest = read_manifest(save(tmp_path / "x", 12))
    assert {name: getattr(manifest, name) for name in about(12)} == about(12)
