"""`polyphase ckpt` as a user types it: what it prints, and its exit status."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyphase.engine.checkpoint import commands
from polyphase.engine.checkpoint.manifest import MANIFEST
from polyphase.engine.checkpoint.publish import update_link
from tests.distributed import run_command

from .sample_checkpoints import content, same, save, saved


@pytest.fixture
def ckpt(capsys):
    """Calls the command; returns its exit status, what it printed, and what it complained of."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        status = commands.main([str(word) for word in words])
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 1, 5 and 10, a link to the last, something else and what a killed process left."""
    folder = tmp_path / "snapshots"
    saved(folder, 1, 5, 10)
    update_link(folder / "step=10")
    (folder / "notes").mkdir()
    (folder / ".saving-0123").mkdir()
    return folder


def damage(path: Path) -> None:
    os.truncate(path / "rest.pt", 10)


# --- list


def test_list_shows_the_newest_first_and_what_is_none(ckpt, folder):
    status, out, _ = ckpt("list", folder)
    assert status == 0
    lines = out.splitlines()
    rows = [line.split("│")[1:-1] for line in lines if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["step=10", "step=5", "step=1"]
    assert [cell.strip() for cell in rows[0][1:3]] == ["10", "1"]
    assert rows[0][4].strip() == "1.22 MB"
    assert rows[0][5].strip() == "one process"
    assert f"torch {torch.__version__}" in rows[0][6]
    assert lines[-2:] == [
        ".saving-0123 is being saved or removed, or was when its process was killed",
        f"notes is no checkpoint: it has no {MANIFEST}",
    ]


def test_list_tells_names_as_they_are(ckpt, tmp_path):
    save(tmp_path / "[bold]step=1 :smile:")
    assert "│ [bold]step=1 :smile: │" in ckpt("list", tmp_path)[1]


def test_a_name_is_in_one_line(ckpt, tmp_path):
    save(tmp_path / "step=1")
    (tmp_path / "step=1").rename(tmp_path / "step=1\nstep=9 is whole")
    (tmp_path / "notes\nstep=8 was removed").mkdir()
    for words in (("list", tmp_path), ("verify", tmp_path), ("prune", tmp_path, "--keep-last", 1)):
        lines = [line.lstrip("│ ") for line in ckpt(*words)[1].splitlines()]
        assert not [line for line in lines if line.startswith(("step=9", "step=8"))], words


def test_list_of_nothing_says_so(ckpt, tmp_path):
    assert ckpt("list", tmp_path) == (0, f"There is no checkpoint in '{tmp_path}'.\n", "")


def test_list_of_one_checkpoint_says_what_to_type(ckpt, folder):
    status, _, error = ckpt("list", folder / "last")
    assert status == 2
    assert f"last is one checkpoint: polyphase ckpt inspect {folder}/last, or list {folder}" in error


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (0, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (10**6, "12 d")]
)
def test_ages(seconds, text):
    assert commands._age(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (1.4e14, "140 TB")]
)
def test_sizes(num_bytes, text):
    assert commands._size(num_bytes) == text


# --- inspect


def test_inspect_shows_where_the_run_was(ckpt, folder):
    status, out, _ = ckpt("inspect", folder / "last")
    assert status == 0
    said = dict(map(str.strip, line.split("│")[1:3]) for line in out.splitlines() if line.startswith("│"))
    assert said["step"] == "10"
    assert said["layout"] == "one process, world size 1"
    assert said["optimizers"] == "AdamW"
    assert said["place"] == "10 batch(es) of its epoch done"
    assert said["tensors"] == "5"
    assert said["callbacks"] == "Average"
    assert "exp_avg" not in out


def test_inspect_lists_the_tensors(ckpt, folder):
    _, out, _ = ckpt("inspect", folder / "last", "--tensors")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "float32" in line]
    assert rows == [
        ["callbacks.Average.large", "300000", "float32", "1,200,000"],
        ["optimizer_states.0.state.net.weight.exp_avg", "4x3", "float32", "48"],
        ["optimizer_states.0.state.net.weight.step", "scalar", "float32", "4"],
        ["state_dict.net.bias", "4", "float32", "16"],
        ["state_dict.net.weight", "4x3", "float32", "48"],
    ]


class Custom:
    """What only unpickling could bring back."""


def test_inspect_executes_nothing(ckpt, tmp_path):
    with pytest.warns(UserWarning, match="no plain values"):
        save(tmp_path / "x", mine=Custom())
    status, out, _ = ckpt("inspect", tmp_path / "x")
    assert status == 0
    assert "holds objects that are no plain values" in out


def test_inspect_of_weights_alone_has_no_place(ckpt, tmp_path):
    save(tmp_path / "x", polyphase={})
    assert "place" not in ckpt("inspect", tmp_path / "x")[1]


def test_inspect_refuses_what_is_damaged(ckpt, folder):
    damage(folder / "step=5")
    status, _, error = ckpt("inspect", folder / "step=5")
    assert status == 1
    assert error.startswith(f"polyphase: error: The checkpoint {folder}/step=5 is damaged: rest.pt has 10 bytes")


# --- verify


def test_verify_reads_all_of_a_folder_or_what_is_named(ckpt, folder):
    whole = "".join(f"{folder}/step={step}: whole\n" for step in (10, 5, 1))
    assert ckpt("verify", folder) == (0, whole, "")
    damage(folder / "step=5")
    (folder / "step=1" / MANIFEST).write_text("{}")
    status, out, error = ckpt("verify", folder, folder / "step=10")
    lines = out.splitlines()
    assert (status, error) == (1, "")
    assert lines[0] == f"{folder}/step=10: whole"
    assert lines[1].startswith(f"{folder}/step=5: rest.pt has 10 bytes instead of ")
    assert lines[2].startswith(
        f"{folder}/step=1: can't be opened: The checkpoint {folder}/step=1 is damaged: {MANIFEST}"
    )
    assert lines[3:] == [f"{folder}/step=10: whole"]
    status, out, _ = ckpt("verify", folder / "step=1")
    assert (status, "is damaged" in out) == (1, True)
    assert ckpt("verify", folder / "step=10")[0] == 0


def test_verify_of_nothing_is_an_error(ckpt, folder):
    status, _, error = ckpt("verify", folder / "notes")
    assert status == 2
    assert f"{folder}/notes is not a checkpoint, and contains none." in error


# --- export and prune


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_export_writes_one_file(ckpt, folder, tmp_path, suffix):
    to = tmp_path / f"model{suffix}"
    assert ckpt("export", folder / "last", "--to", to) == (0, f"wrote {to}\n", "")
    found = torch.load(to)["state_dict"] if suffix == ".ckpt" else load_file(to)
    assert same(found, content(10)["state_dict"])
    status, _, error = ckpt("export", folder / "last", "--to", to)
    assert status == 2
    assert f"{to} is there already: give another name, or overwrite=True (--overwrite) to replace it." in error
    assert ckpt("export", folder / "step=1", "--to", to, "--overwrite")[0] == 0


def test_export_says_what_it_leaves_out(ckpt, tmp_path):
    save(tmp_path / "x", state_dict={"w": torch.ones(2), "extra": 1})
    _, out, _ = ckpt("export", tmp_path / "x", "--to", tmp_path / "x.safetensors")
    assert out.startswith("left out, because they are not tensors: extra\n")


def test_export_opens_objects_only_if_trusted(ckpt, tmp_path):
    with pytest.warns(UserWarning, match="no plain values"):
        save(tmp_path / "x", mine=Custom())
    status, _, error = ckpt("export", tmp_path / "x", "--to", tmp_path / "x.ckpt")
    assert status == 1
    assert "holds objects that are no plain values" in error
    assert ckpt("export", tmp_path / "x", "--to", tmp_path / "x.ckpt", "--trust")[0] == 0


def test_prune_says_what_it_would_do_and_does_it(ckpt, folder):
    os.rename(shutil.copytree(folder / "step=1", folder / "copy"), folder / ".saving-4567")
    shutil.rmtree(folder / "step=1")
    arguments = ("prune", folder, "--keep-last", "1")
    _, would, _ = ckpt(*arguments, "--dry-run")
    assert would.splitlines() == [
        f"would be restored, because it was complete but not yet renamed: {folder}/step=1",
        f"would be removed: {folder}/step=5",
        f"would be removed: {folder}/.saving-0123",
        f"kept: {folder}/step=10",
        f"note: {folder}/notes is no checkpoint: it has no {MANIFEST}",
    ]
    assert sorted(os.listdir(folder)) == [".lock", ".saving-0123", ".saving-4567", "last", "notes", "step=10", "step=5"]
    status, did, _ = ckpt(*arguments, "--keep-every", "5")
    assert status == 0
    assert did.splitlines()[:4] == [
        f"restored, because it was complete but not yet renamed: {folder}/step=1",
        f"removed: {folder}/step=1",
        f"removed: {folder}/.saving-0123",
        f"kept: {folder}/step=10",
    ]
    assert sorted(os.listdir(folder)) == [".lock", "last", "notes", "step=10", "step=5"]


# --- what is wrong with the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lst"], "unknown ckpt command 'lst'. Did you mean 'list'?"),
        (["list"], "the following arguments are required: FOLDER"),
        (["list", "snapshot"], "There is nothing at snapshot. Did you mean snapshots?"),
        (["list", "memory://nowhere/x"], "There is nothing at memory://nowhere/x."),
        (["inspect", "snapshots/stp=10"], "Did you mean step=10?"),
        (["inspect", "snapshots/last", "--tensor"], "unrecognized arguments: --tensor. Did you mean --tensors?"),
        (["verify", "snapshots", "absent"], "There is nothing at absent."),
        (["export", "snapshots/last"], "the following arguments are required: --to"),
        (["export", "snapshots/last", "--to", "model.ckp"], "unknown ending '.ckp'. Did you mean '.ckpt'?"),
        (["export", "absent", "--to", "model.ckpt"], "There is nothing at absent."),
        (
            ["export", "snapshots/last", "--to", "model.pt", "--weights", "averag"],
            "unknown weights 'averag'. Did you mean 'average'?",
        ),
        (["export", "snapshots/last", "--to", "model.pt", "--weights", "average"], "has no average of weights"),
        (["prune", "snapshots"], "the following arguments are required: --keep-last"),
        (["prune", "snapshots", "--keep-last", "some"], "argument --keep-last: invalid int value: 'some'"),
        (["prune", "snapshots", "--keep-last", "0"], "--keep-last must be a whole number of at least 1"),
        (["prune", "snapshots", "--keep-last", "1", "--dryrun"], "Did you mean --dry-run?"),
    ],
)
def test_a_wrong_command_line_says_what_is_meant(ckpt, folder, words, message):
    status, out, error = ckpt(*words)
    assert (status, out) == (2, "")
    assert error.startswith("polyphase: error: ")
    assert message in error
    assert "usage:" not in error
    if "argument" in message:
        assert f"All options: polyphase ckpt {words[0]} --help" in error


@pytest.mark.parametrize("command", ["inspect", "export"])
def test_what_is_no_checkpoint_says_so(ckpt, folder, command):
    more = ["--to", "model.ckpt"] if command == "export" else []
    status, _, error = ckpt(command, folder / "notes", *more)
    assert status == 1
    assert f"{folder}/notes is no checkpoint: it has no {MANIFEST}" in error


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]], ids=str)
def test_help_teaches(ckpt, words):
    status, out, _ = ckpt(*words)
    assert status == 0
    for name in commands.COMMANDS:
        assert f"polyphase ckpt {name} snapshots" in out


@pytest.mark.parametrize("name", list(commands.COMMANDS))
def test_help_of_a_command_has_all_its_options(ckpt, name, capsys):
    with pytest.raises(SystemExit) as ended:
        ckpt(name, "--help")
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: polyphase ckpt {name}" in out
    for argument, options in commands.COMMANDS[name].arguments.items():
        assert options.get("metavar", argument) in out


def test_the_command_itself(folder):
    command = [sys.executable, "-m", "polyphase.engine", "ckpt"]
    damage(folder / "step=5")
    finished = run_command([*command, "verify", folder])
    assert finished.returncode == 1, finished.output
    assert f"{folder}/step=10: whole" in finished.output
