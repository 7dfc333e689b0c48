"""A checkpoint from a stranger executes nothing, whichever way it is opened, and is never called whole."""

import builtins
import io
import json
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, commands, load_checkpoint
from polyphase.engine.checkpoint.checked_io import Files

from ...pairs import nightly
from ..tiny import Regression, engine, rows
from .sample_checkpoints import is_whole, save, seal

MARKER = "polyphase_executed"
META = "torch.distributed.checkpoint.metadata"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


# What sets MARKER in `builtins`, if it is executed.
RUNS = named("builtins", "exec") + b"(" + text(f"import builtins; builtins.{MARKER} = 1") + b"tR"
# A state of (None, {...}) is set attribute by attribute, on classes too: so isinstance(anything, that class) is true.
PATCHES = named(META, "TensorStorageMetadata") + b"(N}" + text("__marker__") + text("x") + b"stb"
INSTALLS = named(META, "Metadata") + b"(N}" + text("__setstate__") + named("builtins", "exec") + b"stb"
EVIL = [
    RUNS,
    PATCHES,
    INSTALLS,
    named("os", "system") + b"(" + text("true") + b"tR",
    b"(" + text("x") + b"ios\nsystem\n",
]


def has_run() -> bool:
    return hasattr(builtins, MARKER) or hasattr(TensorStorageMetadata, "__marker__")


@pytest.fixture(autouse=True)
def nothing_runs():
    yield
    assert not has_run()


def mutated(pickled: bytes, draw: random.Random) -> bytes:
    """A pickle with something put in, taken out or exchanged."""
    content = bytearray(pickled)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = draw.randrange(len(content))
        kind = draw.random()
        if kind < 0.5:
            content[place:place] = draw.choice(EVIL) + draw.choice([b"", b"0", b"\x94"])
        elif kind < 0.7:
            content[place] = draw.randrange(256)
        elif kind < 0.85:
            del content[place : place + draw.randrange(1, 9)]
        else:
            content[place:place] = bytes(
                draw.choices(b"cRbo\x81\x93\x92iPQ\x82(t}]us0123.h\x94", k=draw.randrange(1, 6))
            )
    return bytes(content)


@pytest.mark.parametrize("num_mutations", [400, *nightly(2000)])
def test_mutated_pickles_run_nothing(tmp_path, num_mutations):
    draw, refused = random.Random(0), 0
    path = Path(save(tmp_path / "x", 1))
    originals = {name: (path / name).read_bytes() for name in ("rest.pt", "ranks.pt")}
    for _ in range(num_mutations):
        name = draw.choice([*originals])
        (path / name).write_bytes(repacked(originals[name], draw))
        seal(path)
        try:
            AsyncCheckpointer().load(str(path))
        except CheckpointError:
            refused += 1
        (path / name).write_bytes(originals[name])
    assert refused > num_mutations // 2
    seal(path)
    assert is_whole(str(path), 1)


def repacked(archive: bytes, draw: random.Random) -> bytes:
    """A file of torch.save with another pickle in it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(stream, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, mutated(content, draw) if info.filename.endswith("data.pkl") else content)
    return stream.getvalue()


def assert_commands_refuse(path: Path, folder: Path, capsys: Any) -> None:
    for words in (["verify", path], ["inspect", path], ["export", path, "--to", folder / "out.ckpt"]):
        assert commands.main([str(word) for word in words]) == 1 or words[0] == "inspect"
    assert not (folder / "out.ckpt").exists()
    assert "whole" not in capsys.readouterr().out


class Evil:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return exec, (f"import builtins; builtins.{MARKER} = 1",)


@pytest.mark.parametrize("name", ["rest.pt", "ranks.pt"])
def test_evil_states_open_nowhere(tmp_path, capsys, name):
    path = Path(save(tmp_path / "x", 1))
    torch.save({"a": Evil()} if name == "rest.pt" else [{"a": Evil()}], path / name)
    seal(path)
    for opens in (AsyncCheckpointer().load, load_checkpoint, lambda p: engine().fit(Regression(), rows(), ckpt_path=p)):
        with pytest.raises(CheckpointError, match="holds objects that are no plain values"):
            opens(str(path))
    assert_commands_refuse(path, tmp_path, capsys)


@pytest.mark.parametrize("escape", ["../../etc/passwd", "/dev/zero", "/etc/passwd"])
def test_an_index_names_no_other_files(tmp_path, escape):
    path = Path(save(tmp_path / "x", 1))
    index = json.loads((path / "tensors.json").read_bytes())
    index["files"] = [escape for _ in index["files"]]
    (path / "tensors.json").write_text(json.dumps(index))
    seal(path)
    with pytest.raises(CheckpointError, match="which the manifest does not list"):
        AsyncCheckpointer().load(path)


def test_no_pickle_is_left_but_what_torch_reads_as_plain_values(tmp_path):
    path = Path(save(tmp_path / "x"))
    assert sorted(file.name for file in path.iterdir()) == [
        *("MANIFEST.json", "ranks.pt", "rest.pt"),
        *("shard-0-0.safetensors", "shard-0-1.safetensors", "tensors.json"),
    ]
    for name in ("rest.pt", "ranks.pt"):
        torch.load(path / name, weights_only=True)
    assert Files(path).read("tensors.json").startswith(b"{")
