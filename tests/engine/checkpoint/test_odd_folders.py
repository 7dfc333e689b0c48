"""Whatever stands in a folder of checkpoints, each odd one is one damaged checkpoint that is named; none is trusted."""

import json
import os
import random
import re
import shutil
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyphase.doctor import records
from polyphase.engine.checkpoint import (
    AsyncCheckpointer,
    CheckpointError,
    commands,
    dcp_storage,
    find,
    folder_index,
    is_checkpoint,
    manifest,
    read_manifest,
    run_record,
)
from polyphase.engine.checkpoint.manifest import MANIFEST
from polyphase.engine.checkpoint.publish import repair
from polyphase.engine.checkpoint.retention import list_entries

from ...distributed import ROOT
from .sample_checkpoints import content, same, save, seal

NUM_EDITS = 500


def manifest_is_a_folder(path: Path) -> None:
    (path / MANIFEST).unlink()
    (path / MANIFEST).mkdir()


def manifest_is_a_pipe(path: Path) -> None:
    (path / MANIFEST).unlink()
    os.mkfifo(path / MANIFEST)


def manifest_is_a_link(path: Path) -> None:
    os.rename(path / MANIFEST, path.parent / "elsewhere.json")
    (path / MANIFEST).symlink_to(path.parent / "elsewhere.json")


def manifest_is_huge(path: Path) -> None:
    os.truncate(path / MANIFEST, (1 << 24) + 1)


def manifest_is_nested(path: Path) -> None:
    (path / MANIFEST).write_text("[" * 100_000 + "]" * 100_000)


def says(**changes: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        said = {**json.loads((path / MANIFEST).read_bytes()), **changes}
        del said["crc32"]
        said["crc32"] = zlib.crc32(json.dumps(said, sort_keys=True).encode())
        (path / MANIFEST).write_text(json.dumps(said))

    change.__name__ = f"says {changes}"
    return change


def lists(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        files = json.loads((path / MANIFEST).read_bytes())["files"]
        says(files={**files, name: [1 << 40, 0]})(path)

    change.__name__ = f"lists {name}"
    return change


def left_out(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).unlink()
        seal(path)

    change.__name__ = f"without {name}"
    return change


def holds(name: str, text: str | bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        seal(path)

    change.__name__ = f"{name} holds {text[:20]!r}"
    return change


def index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes what `tensors.json` says, and makes the manifest fit."""

    def apply(path: Path) -> None:
        said = json.loads((path / "tensors.json").read_bytes())
        change(said)
        (path / "tensors.json").write_text(json.dumps(said))
        seal(path)

    return apply


def four_terabytes(said: dict[str, Any]) -> None:
    said["tensors"]["state_dict.net.bias"]["size"] = [1 << 40]


def four_terabytes_in_a_chunk(said: dict[str, Any]) -> None:
    four_terabytes(said)
    said["tensors"]["state_dict.net.bias"]["chunks"] = [[[0], [1 << 40], 0, 0, 1 << 42]]


def overlapping(said: dict[str, Any]) -> None:
    (_, _, number, start, _) = said["tensors"]["state_dict.net.bias"]["chunks"][0]
    said["tensors"]["state_dict.net.bias"]["chunks"] = [[[0], [2], number, start, 8], [[1], [2], number, start, 8]]


def replaced(name: str, value: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        torch.save(value, path / name)
        seal(path)

    change.__name__ = f"{name} is {str(value)[:20]}"
    return change


def linked_file(path: Path) -> None:
    os.rename(path / "rest.pt", path.parent / "rest.pt")
    (path / "rest.pt").symlink_to(path.parent / "rest.pt")


DAMAGES: list[Callable[[Path], None]] = [
    *(manifest_is_a_folder, manifest_is_a_pipe, manifest_is_a_link, manifest_is_nested, manifest_is_huge, linked_file),
    *(says(step="20"), says(step=True), says(step=-1), says(step=1 << 70), says(epoch=None), says(time="now")),
    *(says(time=1e300), says(time=10**400), says(time=-1.0)),
    *(says(name="../../escaped"), says(name="/etc"), says(name=".."), says(name=".lock"), says(world_size=0)),
    *(says(layout={"shard": "2"}), says(files={"rest.pt": [1]}), says(files=[]), says(sequence="1"), says(kind="x")),
    *(says(lineage=[1]), says(step=7), says(epoch=9), says(world_size=2)),
    *(lists("/dev/zero"), lists("../x"), lists(""), lists("a/b"), lists("..")),
    *(left_out("ranks.pt"), left_out("rest.pt"), left_out("tensors.json")),
    *(holds("tensors.json", "junk"), holds("tensors.json", "[" * 100_000), holds("rest.pt", "junk")),
    *(holds("ranks.pt", b""), holds("notes.txt", "mine")),
    *(index(four_terabytes), index(four_terabytes_in_a_chunk), index(overlapping)),
    index(lambda said: said["tensors"].pop("state_dict.net.bias")),
    index(lambda said: said["files"].__setitem__(0, "/dev/zero")),
    index(lambda said: said["tensors"]["state_dict.net.bias"].update(dtype="Tensor")),
    *(replaced("ranks.pt", []), replaced("ranks.pt", {"a": 1}), replaced("rest.pt", [1]), replaced("ranks.pt", [1])),
    replaced("rest.pt", {"state_dict": {"__tensor__": ["a"]}}),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_is_one_damaged_checkpoint_that_is_named(tmp_path, capsys, damage):
    save(tmp_path / "step=1", 1)
    save(tmp_path / "step=2", 2)
    path = tmp_path / "step=2"
    damage(path)
    if damage.__name__ == "notes.txt holds 'mine'":  # the manifest lists it: no harm
        assert AsyncCheckpointer().load(str(path))
        return
    with pytest.raises(CheckpointError, match="step=2 is damaged"):
        AsyncCheckpointer().load(str(path))
    assert {entry.name for entry in list_entries(tmp_path)} == {"step=1", "step=2"}
    assert "step=1" in [os.path.basename(found) for found, _ in find(tmp_path)]
    assert commands.main(["verify", str(path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: ")
    assert not line.endswith("whole")
    assert commands.main(["inspect", str(path)]) == 1 or damage in (linked_file,) or "step=7" in str(damage)
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert commands.main(["export", str(path), "--to", str(tmp_path / "out.ckpt")]) == 1
    assert not (tmp_path / "out.ckpt").exists()
    for words in (["list"], ["prune", "--keep-last", "5"]):
        assert commands.main([*words, str(tmp_path)]) == 0


def test_no_name_leads_out_of_the_folder(tmp_path):
    save(tmp_path / "a" / "b" / "step=1", 1)
    says(name="../../escaped")(tmp_path / "a" / "b" / "step=1")
    os.rename(tmp_path / "a" / "b" / "step=1", tmp_path / "a" / "b" / ".saving-0123456789ab")
    assert repair(tmp_path / "a" / "b") == []
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "name", [".lock", ".index.jsonl", ".run.json", ".run.json.0123456789ab", ".polyphase", ".nfs000000000001"]
)
def test_names_that_are_no_checkpoints_are_not_looked_into(tmp_path, name):
    save(tmp_path / "step=1", 1)
    shutil.copytree(tmp_path / "step=1", tmp_path / name)
    assert [entry.name for entry in list_entries(tmp_path)] == ["step=1"]
    assert [os.path.basename(path) for path, _ in find(tmp_path)] == ["step=1"]


# --- random edits


def edited(value: Any, draw: random.Random) -> Any:
    """The same nested value with one thing changed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice([*value])
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: edited(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        place = draw.randrange(len(value))
        return [*value[:place], edited(value[place], draw), *value[place + 1 :]]
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 1 << 33, -value, 1 << 80])
    return draw.choice([None, -1, 0, 1, 2.5, "", "x", "../x", "/dev/zero", [], {}, True, [1, 2], {"a": 1}])


def test_random_edits_are_found_or_harmless(tmp_path):
    """Of what a manifest and an index say, made to fit: 500 edits; none changes a value that comes out."""
    draw = random.Random(0)
    save(tmp_path / "whole", 3)
    expected = AsyncCheckpointer().load(str(tmp_path / "whole"))
    found = harmless = 0
    for number in range(NUM_EDITS):
        path = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "whole", path)
        name = draw.choice([MANIFEST, "tensors.json"])
        said = json.loads((path / name).read_bytes())
        said.pop("crc32", None)
        changed = edited(said, draw)
        if name == MANIFEST and isinstance(changed, dict):
            changed["crc32"] = zlib.crc32(json.dumps(changed, sort_keys=True).encode())
        (path / name).write_text(json.dumps(changed))
        if name != MANIFEST:
            seal(path)
        try:
            opened = AsyncCheckpointer().load(str(path))
        except CheckpointError:
            found += 1
        else:
            harmless += 1
            assert same(opened, expected) or is_relabelled(said, changed), (number, changed)
        shutil.rmtree(path)
    assert found + harmless == NUM_EDITS
    assert found > harmless


def is_relabelled(said: Any, changed: Any) -> bool:
    """Whether an index was made to say something else that makes sense: other bytes, which no checksum can tell."""
    return "tensors" in said and "tensors" in changed


def test_what_no_file_backs_takes_no_memory(tmp_path):
    save(tmp_path / "x")
    index(four_terabytes)(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"the tensor state_dict\.net\.bias has chunks of 4 elements in all"):
        AsyncCheckpointer().load(str(tmp_path / "x"))


def test_the_page_has_the_limits_of_json():
    """Each file of JSON is read up to its limit, and takes no more memory for each byte than docs/security.md says."""
    page = " ".join((ROOT / "docs" / "security.md").read_text().split())
    limits = {
        "`MANIFEST.json`": manifest._MOST_BYTES,
        "`tensors.json`": dcp_storage._INDEX_MOST_BYTES,
        "`.index.jsonl`": folder_index._MOST_BYTES,
        "`.run.json`": run_record._MOST_BYTES,
        "the doctor's records": records._MOST_BYTES,
    }
    for name, most_bytes in limits.items():
        assert f"{name} {most_bytes >> 20} MiB" in page
    (factor,) = re.findall(r"JSON takes up to (\d+) times its bytes", page)
    for part in ("[]", '{"":0}', '{"a":[]}', '{"":{"":0}}', '"ab"', "1e9", "999"):
        content = f"[{','.join([part] * 50_000)}]"
        tracemalloc.start()
        parsed = json.loads(content)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert parsed, part
        assert most < int(factor) * len(content), part


def test_content_of_the_helpers(tmp_path):
    assert is_checkpoint(save(tmp_path / "x", 3))
    assert read_manifest(tmp_path / "x").step == content(3)["global_step"]
