"""Whatever happens to any file of a checkpoint, it is noticed before a tensor of it is used."""

import os
import shutil
from pathlib import Path

import pytest

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, commands, find, opening, read_manifest
from polyphase.engine.checkpoint.manifest import MANIFEST
from polyphase.engine.checkpoint.publish import check_files

from .sample_checkpoints import is_whole, saved

FILES = ("tensors.json", "shard-0-0.safetensors", "shard-0-1.safetensors", "rest.pt", "ranks.pt", MANIFEST)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    saved(folder, 1, 2)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def lengthen(file: Path) -> None:
    with file.open("ab") as stream:
        stream.write(b"\0")


def flip(position: float):
    def damage(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[int(position * (len(content) - 1))] ^= 1 << int(position * 7)
        file.write_bytes(content)

    damage.__name__ = f"flip at {position}"
    return damage


DAMAGES = [shorten, empty, lengthen, Path.unlink, *(flip(position) for position in (0, 0.1, 0.33, 0.5, 0.77, 1))]


def test_these_are_all_files(whole):
    assert {path.name for path in (whole / "step=2").iterdir()} == set(FILES)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_before_anything_is_read(folder, name, damage, monkeypatch):
    damage(folder / "step=2" / name)
    for reader in ("load_file", "read_index"):
        monkeypatch.setattr(opening, reader, lambda *_, reader=reader: pytest.fail(f"{reader} of a damaged checkpoint"))
    with pytest.raises(CheckpointError, match=name):
        AsyncCheckpointer().load(str(folder / "step=2"))
    monkeypatch.undo()
    assert newest_valid(folder) == str(folder / "step=1")
    assert is_whole(newest_valid(folder), 1)


def newest_valid(folder: Path) -> str:
    return next(path for path, manifest in find(folder) if not check_files(path, manifest))


def test_what_does_not_belong_there_is_ignored(folder):
    (folder / "step=2" / "shard-1-0.safetensors").write_bytes(b"of another save")
    (folder / "step=2" / ".DS_Store").write_bytes(b"of a file manager")
    (folder / "step=2" / ".nfs000000000001").mkdir()
    (folder / "step=2" / "linked").symlink_to(folder)
    assert newest_valid(folder) == str(folder / "step=2")
    assert is_whole(str(folder / "step=2"), 2)
    assert commands.main(["verify", str(folder / "step=2")]) == 0


def test_files_of_another_checkpoint_are_found(folder):
    shutil.copy(folder / "step=1" / "shard-0-0.safetensors", folder / "step=2")
    with pytest.raises(CheckpointError, match=r"the content of shard-0-0\.safetensors was changed"):
        AsyncCheckpointer().load(str(folder / "step=2"))


def test_all_that_is_wrong_is_said(folder):
    shorten(folder / "step=2" / "rest.pt")
    (folder / "step=2" / "ranks.pt").unlink()
    with pytest.raises(CheckpointError, match=r"step=2 is damaged: ranks.pt is missing; rest.pt has \d+ bytes instead"):
        AsyncCheckpointer().load(str(folder / "step=2"))


def test_no_bit_of_the_manifest_can_change_what_it_says(folder):
    file = folder / "step=2" / MANIFEST
    content, said = file.read_bytes(), read_manifest(folder / "step=2")
    for position in range(len(content) * 8):
        changed = bytearray(content)
        changed[position // 8] ^= 1 << position % 8
        file.write_bytes(changed)
        try:
            assert read_manifest(folder / "step=2") == said, f"bit {position}"
        except CheckpointError:
            continue
