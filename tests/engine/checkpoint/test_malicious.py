"""A checkpoint from a stranger executes nothing, whichever way it is opened, and is never called whole."""

import builtins
import io
import json
import os
import pickle
import random
import resource
import struct
import sys
import threading
import time
import zipfile
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentError
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, commands, load_checkpoint
from polyphase.engine.checkpoint.checked_io import Files
from polyphase.engine.foreign import NotAPlainFileError

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


HUGE = b"\x8a\x08" + (10**12).to_bytes(8, "little")
CALLS = {
    "bytearray": named("builtins", "bytearray") + HUGE + b"\x85R",
    "quadratic": named("_codecs", "encode") + text("a" * 60_000) + text("punycode") + b"\x86R",
    "doubling": named("_codecs", "encode") * 2 + text("a") + text("latin1") + b"\x86R" + text("hex") + b"\x86R",
    "memory": named("torch", "Tensor") + b"J" + (1 << 26).to_bytes(4, "little") + b"\x85R",  # pages nobody has written
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_of_plain_values_are_not_called_with_anything(tmp_path, name):
    path = Path(save(tmp_path / "x", 1))
    plain = pickle.dumps({}, protocol=2)
    content = (
        plain[:2] + b"}" + text("pytorch-lightning_version") + text("2.6.6") + b"s" + text("x") + CALLS[name] + b"s."
    )
    for file in (tmp_path / "x.ckpt", path / "rest.pt"):
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("archive/data.pkl", content)
            archive.writestr("archive/version", "3\n")
    seal(path)
    for checkpoint in (tmp_path / "x.ckpt", path):
        with pytest.raises(CheckpointError, match=r"damaged: .*(than pickle encodes|encoding|larger than the file)"):
            load_checkpoint(checkpoint)
    with pytest.raises(CheckpointError, match="damaged"):
        Regression.load_from_checkpoint(tmp_path / "x.ckpt")


def remembered(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


def again(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


def repeated(call: bytes, times: int) -> bytes:
    """A list of the results of one call of what is remembered as 2 with what is remembered as 1."""
    return b"](" + (again(2) + again(1) + call) * times + b"e"


EQUAL = [b"\x8a\x0a" + (number * (2**61 - 1)).to_bytes(10, "little") for number in range(30_000)]
"""Whole numbers of one hash."""
LIST = b"](" + b"K\x01" * 50_000 + b"e" + remembered(1)
CONSTRUCTORS = [("builtins", "set"), ("collections", "Counter"), ("torch", "Size"), ("torch", "FloatTensor")]
DEAR = {
    "dict of one hash": (b"}(" + b"N".join(EQUAL) + b"Nu", "made to be slow"),
    "dict of one hash, by items": (b"}" + b"Ns".join(EQUAL) + b"Ns", "made to be slow"),
    "set of one hash": (named("builtins", "set") + b"](" + b"".join(EQUAL) + b"e\x85R", "made to be slow"),
    "complex numbers of one hash": (
        b"}("
        + b"".join(
            named("builtins", "complex") + struct.pack(">cdcd", b"G", -1000003.0 * x, b"G", x) + b"\x86RN"
            for x in range(20_000)
        )
        + b"u",
        "made to be slow",
    ),
    **{
        f"copies by {name[1]}": (
            LIST + named(*name) + remembered(2) + repeated(b"\x85R", 3000) + b"\x87",
            "many times its size",
        )
        for name in CONSTRUCTORS
    },
    "copies of bytes": (
        named("builtins", "bytearray")
        + remembered(2)
        + named("_codecs", "encode")
        + text("a" * 100_000)
        + text("latin1")
        + b"\x86R"
        + remembered(1)
        + repeated(b"\x85R", 10_000)
        + b"\x87",
        "many times its size",
    ),
    "copies of attributes": (
        b"}("
        + b"".join(text(str(number)) + b"N" for number in range(20_000))
        + b"u"
        + remembered(1)
        + b"]("
        + (named("collections", "OrderedDict") + b")R" + again(1) + b"b") * 5000
        + b"e\x86",
        "many times its size",
    ),
    "copies of arguments": (
        b"("
        + b"N" * 50_000
        + b"t"
        + remembered(1)
        + named("collections", "OrderedDict")
        + remembered(2)
        + repeated(b"\x81", 20_000)
        + b"\x87",
        "many times its size",
    ),
    "hash of shared tuples": (
        b"})" + b"".join(remembered(1) + again(1) + b"\x86" for _ in range(60)) + b"Ns",
        "nested more than 20 deep",
    ),
    "hash of nested tuples": (b"})" + b"\x85" * 1_000_000 + b"Ns", "nested more than 20 deep"),
}
"""Pickles that took minutes, tens of gigabytes or the process; the last two while a key is hashed, which no signal
ends."""


@pytest.mark.parametrize("name", DEAR)
def test_a_pickle_costs_no_more_than_its_size(tmp_path, name):
    content, says = DEAR[name]
    begin = b"\x80\x02}" + text("pytorch-lightning_version") + text("2.6.6") + b"s"
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
        archive.writestr("archive/data.pkl", begin + text("x") + content + b"s.")
        archive.writestr("archive/version", "3\n")
    started_s, most_kb = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=f"damaged: .*{says}"):
        load_checkpoint(tmp_path / "x.ckpt")
    with open(tmp_path / "x.ckpt", "rb") as file, pytest.raises(CheckpointError, match=f"damaged: .*{says}"):
        Regression.load_from_checkpoint(file)
    assert time.thread_time() - started_s < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_kb < 200_000


def test_a_pickle_without_an_archive_costs_no_more_either(tmp_path):
    path = tmp_path / "x.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.6", "x": [torch.ones(2)]}, path, _use_new_zipfile_serialization=False)
    assert load_checkpoint(path)["x"][0].sum() == 2
    content = path.read_bytes()
    place = content.index(text("x"))
    path.write_bytes(content[:place] + text("y") + DEAR["dict of one hash"][0] + b"s" + content[place:])
    with pytest.raises(CheckpointError, match="made to be slow"):
        load_checkpoint(path)


def test_keys_of_all_kinds_are_opened(tmp_path):
    keys = [*range(50_000), *map(float, range(100, 90_000, 3)), (1, ("a", (2.0, None))), True, 2j, torch.Size([2, 3])]
    values = {"pytorch-lightning_version": "2.6.6", "x": [dict.fromkeys(keys), {*range(20_000)}, torch.float16]}
    values["x"] *= 3
    torch.save(values, tmp_path / "x.ckpt")
    assert load_checkpoint(tmp_path / "x.ckpt")["x"] == values["x"]


def test_torchs_own_unpickler_is_left_as_it_is(tmp_path):
    """Of other programs' files in this process, it opens what it opens without the engine."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        content = b"\x80\x02" + named("_codecs", "encode") + text("a") + text("utf-16") + b"\x86R."
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
    with pytest.raises(CheckpointError, match="otherwise than pickle encodes bytes"):
        load_checkpoint(tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True) == "a".encode("utf-16")


def test_bytes_of_a_callback_are_plain_values(tmp_path):
    values = {"pytorch-lightning_version": "2.6.6", "x": [b"\xff\x00", bytearray(b"\xff"), bytearray(), {1}]}
    torch.save(values, tmp_path / "x.ckpt")
    assert load_checkpoint(tmp_path / "x.ckpt")["x"] == values["x"]


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


class Web(BaseHTTPRequestHandler):
    """A web server of the current folder, from which parts of files can be asked for."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = Path(self.path.lstrip("/"))
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        begin, end = 0, len(content)
        if (asked := self.headers.get("Range")) is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else end, end)
        self.send_response(200 if asked is None else 206)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[begin:end])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path, monkeypatch):
    """The address of a web server of `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "downloads"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("is_stock", [False, True])
def test_evil_files_open_nowhere(tmp_path, web, is_stock):
    trainer = engine(max_steps=1, default_root_dir=tmp_path)
    trainer.fit(Regression(), rows())
    trainer.save_checkpoint("evil.ckpt")
    content = torch.load("evil.ckpt", weights_only=True) | {"a": Evil()}
    torch.save({key: value for key, value in content.items() if key != "polyphase" or not is_stock}, "evil.ckpt")
    for path in ("evil.ckpt", f"{web}/evil.ckpt"):
        fit = partial(engine().fit, Regression(), rows(), ckpt_path=path)
        for opens in (fit, partial(Regression.load_from_checkpoint, path)):
            with pytest.raises(pickle.UnpicklingError, match="weights_only=False"):
                opens()
    with pytest.raises(pickle.UnpicklingError, match="weights_only=False"):
        load_checkpoint("evil.ckpt")


class Activated(Regression):
    """With a part that the command line makes."""

    def __init__(self, activation: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.activation = activation


def save_with(values: dict[str, Any], path: Path) -> None:
    version = {"pytorch-lightning_version": "2.6.6"}
    torch.save({**version, "state_dict": Activated().state_dict(), "hyper_parameters": values}, path)


BY_CLI = "lightning.pytorch.cli.instantiate_module"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's of jsonargparse
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"_instantiator": "builtins.exec"}, "asks for 'builtins.exec', which is not called"),
        ({"_instantiator": BY_CLI, "_class_path": "planted.Evil"}, "name planted.Evil, which is not imported"),
        ({"_instantiator": BY_CLI, "_class_path": "subprocess.Popen"}, "does not resolve to .* subclass of Activated"),
        (
            {"_instantiator": BY_CLI, "activation": {"class_path": "planted.Evil"}},
            "planted.Evil, which is not imported",
        ),
        ({"_instantiator": BY_CLI, "activation": {"class_path": "io.StringIO"}}, r"(?s)not validate .*io\.StringIO"),
    ],
)
def test_hyper_parameters_run_and_import_nothing(tmp_path, monkeypatch, values, says):
    """Rests on Lightning, too: see `test_promises_rest_on_versions_that_are_required`."""
    (tmp_path / "planted.py").write_text(f"import builtins; builtins.{MARKER} = 1")
    monkeypatch.syspath_prepend(tmp_path)
    save_with(values, tmp_path / "x.ckpt")
    with pytest.raises((ValueError, ArgumentError), match=says):
        Activated.load_from_checkpoint(tmp_path / "x.ckpt")
    assert "planted" not in sys.modules


@pytest.mark.parametrize("name", ["state_dict", "hyper_parameters"])
def test_an_entry_that_is_no_dictionary_is_named(tmp_path, name):
    content = {"pytorch-lightning_version": "2.6.6", "state_dict": Activated().state_dict(), name: [1]}
    torch.save(content, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=f"its {name} is a list in place of a dict"):
        Activated.load_from_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hyper_parameters_name_classes_that_annotations_allow(tmp_path):
    values = {"_instantiator": BY_CLI, "activation": {"class_path": "torch.nn.modules.activation.ReLU"}}
    save_with(values, tmp_path / "x.ckpt")
    assert isinstance(Activated.load_from_checkpoint(tmp_path / "x.ckpt").activation, torch.nn.ReLU)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_classes_of_arguments_are_imported_for_a_file_that_is_trusted(tmp_path, monkeypatch):
    (tmp_path / "trusted_layers.py").write_text("import torch\n\nclass Fine(torch.nn.Module): ...")
    monkeypatch.syspath_prepend(tmp_path)
    save_with({"_instantiator": BY_CLI, "activation": {"class_path": "trusted_layers.Fine"}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"trusted_layers\.Fine, which is not imported"):
        Activated.load_from_checkpoint(tmp_path / "x.ckpt")
    module = Activated.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False)
    assert type(module.activation).__name__ == "Fine"


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.ckpt")
    for opens in (Regression.load_from_checkpoint, lambda p: engine().fit(Regression(), rows(), ckpt_path=p)):
        with pytest.raises(NotAPlainFileError, match=r"pipe\.ckpt is no plain file"):
            opens(tmp_path / "pipe.ckpt")


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


def test_a_file_in_which_torch_reads_other_records_than_we_is_damaged(tmp_path):
    """Of records that only torch reads, no size and no checksum would be checked."""
    path = tmp_path / "x.ckpt"
    torch.save({"pytorch-lightning_version": "2.6.6"}, path)
    content = bytearray(path.read_bytes())
    place = len(content) - 34  # where torch is told to find the end of the list of records
    position = int.from_bytes(content[place : place + 8], "little")
    content[place : place + 8] = bytes(8)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="two lists of records"):
        load_checkpoint(path)
    content[place : place + 8] = position.to_bytes(8, "little")
    path.write_bytes(content)
    assert load_checkpoint(path)["pytorch-lightning_version"] == "2.6.6"
