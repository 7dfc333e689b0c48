"""The content of a checkpoint is checked where it is opened: damage is named, and the next older one is opened."""

import copy
import json
import math
import os
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from polyphase.callbacks import Snapshot
from polyphase.engine.checkpoint import CheckpointError, commands, load_checkpoint
from polyphase.engine.checkpoint.dcp_storage import Chunk, StoredTensor, check_index
from polyphase.engine.checkpoint.single_file import manifest_text
from polyphase.engine.checkpoint.state_tree import excess, structure_of
from polyphase.engine.data.drawing import restore_sampler

from ...pairs import nightly
from ..tiny import QUIET, Regression, engine, rows
from .sample_checkpoints import seal


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run with snapshots of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    torch.manual_seed(0)
    fit(folder, 4)
    return folder


def fit(folder: Path, steps: int, **flags: Any) -> dict[str, torch.Tensor]:
    module = Regression()
    trainer = engine(max_steps=steps, default_root_dir=folder, callbacks=[Snapshot(every_n_steps=2)], **flags)
    trainer.fit(module, rows())
    return module.state_dict()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all parts of a nested value, of long lists the first parts."""
    inner = value.items() if isinstance(value, dict) else list(enumerate(value))[:3] if type(value) is list else ()
    return [place for key, item in inner for place in ((*path, key), *places(item, (*path, key)))]


def edited(value: Any, path: tuple[Any, ...], draw: random.Random) -> None:
    for key in path[:-1]:
        value = value[key]
    if draw.random() < 0.4:
        del value[path[-1]]
    else:
        others = [None, "x", -1, 1.5, [], {}, [[]], 1 << 70, True]
        value[path[-1]] = draw.choice([other for other in others if type(other) is not type(value[path[-1]])])


@pytest.mark.parametrize("num_edits", [12, *nightly(500)])
def test_a_structural_edit_is_named_and_an_older_one_is_taken(run, tmp_path, num_edits):
    """With checksums of the files that fit; the result is that of no edit."""
    expected, draw = fit(copied(run, tmp_path / "whole"), 8, resume="auto"), random.Random(0)
    for number in range(num_edits):
        folder = copied(run, tmp_path / f"{number}")
        path = folder / "snapshots" / "step=4"
        name = draw.choice(["rest.pt", "ranks.pt"])
        content = torch.load(path / name, weights_only=True)
        place = draw.choice(places(content))
        edited(content, place, draw)
        torch.save(content, path / name)
        seal(path)
        status = commands.main(["verify", str(path)])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = fit(folder, 8, resume="auto")
        assert any("An older one is used" in str(warning.message) for warning in seen), place
        assert status == 1, place
        for key in expected:
            assert torch.equal(found[key], expected[key]), place
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A run that has saved the files of steps 2 and 4 among its snapshots."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    fit_to_files(folder, 4)
    return folder


class Scheduled(Regression):
    """Has the state of an optimizer and a scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


def fit_to_files(folder: Path, steps: int, **flags: Any) -> dict[str, torch.Tensor]:
    module = Scheduled()
    saves = ModelCheckpoint(folder / "snapshots", "file-{step}", every_n_train_steps=2, save_top_k=-1)
    flags |= {"enable_checkpointing": True, "default_root_dir": folder}
    trainer = engine(max_steps=steps, callbacks=[saves, EarlyStopping("loss", strict=False), Timer()], **flags)
    trainer.fit(module, rows())
    return module.state_dict()


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("num_edits", [12, *nightly(500)])
def test_a_structural_edit_of_a_file_is_named_and_an_older_one_is_taken(files, tmp_path, num_edits):
    """Also of what belongs to callbacks, optimizers and schedulers."""
    expected, draw = fit_to_files(copied(files, tmp_path / "whole"), 8, resume="auto"), random.Random(0)
    for number in range(num_edits):
        folder = copied(files, tmp_path / f"{number}")
        path = folder / "snapshots" / "file-step=4.ckpt"
        content = torch.load(path, weights_only=True)
        entry = draw.choice(["callbacks", "loops", "lr_schedulers", "optimizer_states", "polyphase"])
        place = draw.choice(places(content[entry]))
        if place == ("manifest",):
            continue  # then it is a file of Lightning's
        edited(content[entry], place, draw)
        torch.save(content, path)
        status = commands.main(["verify", str(path)])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            found = fit_to_files(folder, 8, resume="auto")
        told = [str(warning.message) for warning in seen]
        assert any("An older one is used" in text for text in told), (entry, place)
        assert any(f"{path} is damaged: it was renamed to" in text for text in told), (entry, place)
        assert status == 1, (entry, place)
        for key in expected:
            assert torch.equal(found[key], expected[key]), (entry, place)
        shutil.rmtree(folder)


def stock_file(folder: Path) -> Path:
    """A file that stock Lightning has saved, with the state of callbacks, an optimizer and a scheduler."""
    saves = ModelCheckpoint(folder / "stock", "{step}", every_n_train_steps=2, save_top_k=-1)
    flags = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder}
    callbacks = [saves, EarlyStopping("loss", strict=False), Timer()]
    Trainer(max_steps=4, devices=1, callbacks=callbacks, **flags).fit(Scheduled(), rows())
    return folder / "stock" / "step=4.ckpt"


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.filterwarnings("ignore:Found keys that are not in the model state dict")
@pytest.mark.parametrize("num_edits", [40, *nightly(500)])
def test_a_structural_edit_of_a_file_of_lightnings_is_named_or_of_no_account(tmp_path, num_edits):
    """Weights that do not fit the module are told as torch and Lightning tell it."""
    path, draw, num_refused = stock_file(tmp_path), random.Random(0), 0
    whole = torch.load(path, weights_only=True)
    entries = ["callbacks", "loops", "lr_schedulers", "optimizer_states"]
    for _ in range(num_edits):
        content = copy.deepcopy(whole)
        entry = draw.choice(entries if draw.random() < 0.7 else [*whole])
        place = draw.choice([(entry,), *((entry, *inside) for inside in places(content[entry]))])
        edited(content, place, draw)
        torch.save(content, path)
        saves = ModelCheckpoint(tmp_path / "stock", "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [saves, EarlyStopping("loss", strict=False), Timer()]
        flags = {"max_epochs": -1, "enable_checkpointing": True, "callbacks": callbacks}
        trainer = engine(max_steps=8, default_root_dir=tmp_path, **flags)
        error = None
        try:
            trainer.fit(Scheduled(), rows(), ckpt_path=path)
        except (CheckpointError, RuntimeError) as raised:
            error = raised
        is_named = isinstance(error, CheckpointError) and str(path) in str(error)
        is_mismatch = place[0] == "state_dict" and type(error) is RuntimeError
        assert is_named or is_mismatch or (error is None and trainer.global_step == 8), (place, error)
        num_refused += is_named
    assert num_refused > num_edits // 4


def copied(run: Path, to: Path) -> Path:
    shutil.copytree(run, to, symlinks=True)
    return to


def laughs() -> list[Any]:
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    return value


def test_a_value_that_repeats_is_refused_at_once(run, tmp_path):
    path = copied(run, tmp_path / "run") / "snapshots" / "step=4"
    for name in ("rest.pt", "ranks.pt"):
        content = torch.load(path / name, weights_only=True)
        (content[0] if name == "ranks.pt" else content)["more"] = laughs()
        torch.save(content, path / name)
        seal(path)
        with pytest.raises(CheckpointError, match=r"step=4 is damaged: .* repeats values"):
            load_checkpoint(path)
        assert commands.main(["verify", str(path)]) == 1


def test_what_is_too_much():
    shared, loop = [1] * 10, []
    loop.append(loop)
    assert excess([shared] * 5, 100, 0) is None
    assert "repeats" in str(excess([shared] * 5, 50, 0))
    assert "contains itself" in str(excess(loop, 100, 0))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested more than 200 deep" in str(excess({"state": [deep]}, 1 << 20, 0))
    assert "larger than the file" in str(excess([torch.zeros(1).expand(1000)], 100, 3999))
    assert excess([torch.zeros(1).expand(1000)], 100, 4000) is None
    assert "larger than the file" in str(excess([torch.zeros(1000)], 100, 3999))  # a file may say so of any memory
    with warnings.catch_warnings(action="ignore"):  # torch: nested tensors are a prototype
        assert excess([torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])], 100, 0) is None


def test_a_compressed_file_is_not_inflated(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b'{\n "name": [' * 1000)
    assert manifest_text(tmp_path / "x.ckpt") is None
    with pytest.raises(CheckpointError, match="its records are larger than the file"):
        load_checkpoint(tmp_path / "x.ckpt")


def test_a_manifest_is_found_by_its_length(tmp_path):
    text = json.dumps({"name": "x", "crc32": 0, "format": 2, "sequence": 1}, indent=1).encode()
    begun = b'{\n "name": [' * 1000
    for content, found in ((b"X" + struct.pack("<I", len(text)) + text + begun, text), (text, None), (begun, None)):
        with zipfile.ZipFile(tmp_path / "x.ckpt", "w") as archive:
            archive.writestr("a/data.pkl", content)
        assert manifest_text(tmp_path / "x.ckpt") == found


@pytest.mark.parametrize(
    ("blocks", "fits"),
    [
        ([(0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 2, 4)], True),
        ([(0, 0, 2, 2), (0, 1, 2, 2), (2, 0, 2, 4)], False),
        ([(0, 0, 4, 2), (0, 0, 4, 2)], False),
        ([(0, 0, 4, 4), (1, 0, 0, 4)], True),
        ([(0, 0, 4, 4), (0, 0, 4, 0)], True),
    ],
)
def test_chunks_fill_a_tensor(blocks, fits):
    chunks = [Chunk((a, b), (m, n), "f", 0, 4 * m * n) for a, b, m, n in blocks]
    index = {"t": StoredTensor(torch.float32, (4, 4), chunks)}
    if fits:
        check_index(index, {"f": (64, 0)})
    else:
        with pytest.raises(CheckpointError, match="has chunks that overlap"):
            check_index(index, {"f": (64, 0)})


@pytest.mark.parametrize(
    ("group", "state", "says"),
    [
        (5, {}, r"optimizer_states\[0\].param_groups\[0\] is 5 in place of dict"),
        ({"params": ["a", -1]}, {}, r"params\[1\] is -1 in place of str"),
        ({"params": ["a", "a"]}, {}, "has a parameter twice"),
        ({"params": ["a"]}, {"b": {}}, "has the state of a parameter of none of its groups"),
        ({"params": ["a"]}, {"a": 5}, "an entry of .*state is 5 in place of dict"),
    ],
)
def test_the_groups_of_an_optimizer(run, tmp_path, group, state, says):
    path = copied(run, tmp_path / "run") / "snapshots" / "step=4"
    rest = torch.load(path / "rest.pt", weights_only=True)
    rest["optimizer_states"] = [{"state": state, "param_groups": [group]}]
    torch.save(rest, path / "rest.pt")
    seal(path)
    with pytest.raises(CheckpointError, match=says):
        load_checkpoint(path)


class InSequence(Regression):
    """With Adam and a schedule, whose states have more parts."""

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=0.01)
        linear = torch.optim.lr_scheduler.LinearLR(adam)
        return [adam], [torch.optim.lr_scheduler.SequentialLR(adam, [linear, linear], [3])]


def timed(*, steps: int, folder: Path, **flags: Any) -> None:
    callbacks = [Snapshot(every_n_steps=2), Timer(duration="01:00:00:00")]
    trainer = engine(max_steps=steps, max_epochs=-1, default_root_dir=folder, callbacks=callbacks, **flags)
    trainer.fit(InSequence(), rows())


def group_with(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda rest: rest["optimizer_states"][0]["param_groups"][0].update(values)


def schedule_with(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda rest: rest["lr_schedulers"][0].update(values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (group_with(lr="abc"), r"of optimizer_states\[0\], its group 0 can't be stepped"),
        (group_with(lr=None), "can't be stepped"),
        (group_with(lr=math.nan), r"of optimizer_states\[0\], lr of its group 0 is nan"),
        (group_with(betas=(0.9, math.nan)), r"betas of its group 0 is \(0.9, nan\)"),
        (group_with(betas=(0.9,)), "can't be stepped"),
        (group_with(amsgrad=True), "can't be stepped"),
        (lambda rest: rest["optimizer_states"][0]["param_groups"][0].pop("eps"), "can't be stepped"),
        (schedule_with(step=5), r"lr_schedulers\[0\] has 'step', which is no state of SequentialLR"),
        (schedule_with(optimizer=5), "has 'optimizer', which is no state"),
        (
            lambda rest: rest["lr_schedulers"][0]["_schedulers"][1].update(get_lr=5),
            r"lr_schedulers\[0\]\._schedulers has 'get_lr', which is no state of LinearLR",
        ),
        (lambda rest: rest["callbacks"]["Timer"]["time_elapsed"].update(train=math.inf), "time_elapsed is inf"),
        (lambda rest: rest["callbacks"]["Timer"]["time_elapsed"].update(train=1e300), "time_elapsed is 1e"),
    ],
)
def test_a_state_that_fails_in_the_first_step_is_refused_before(tmp_path, change, says):
    timed(steps=2, folder=tmp_path)
    path = tmp_path / "snapshots" / "step=2"
    rest = torch.load(path / "rest.pt", weights_only=True)
    change(rest)
    torch.save(rest, path / "rest.pt")
    said = json.loads((path / "MANIFEST.json").read_bytes())
    said["structures"]["rest.pt"] = structure_of(rest)
    seal(path, said)
    with pytest.raises(CheckpointError, match=says):
        timed(steps=4, folder=tmp_path, resume="auto")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"optimizer_states": 5}, "optimizer_states is 5 in place of list"),
        ({"state_dict": 5}, "state_dict is 5 in place of dict"),
        ({"callbacks": [1]}, "callbacks is a value of type list in place of dict"),
        ({"loops": {"fit_loop": 5}}, "loops.* is 5 in place of dict"),
        ({"polyphase": 5}, "polyphase is 5 in place of dict"),
    ],
)
def test_a_file_is_whole_exactly_if_a_fit_opens_it(run, tmp_path, capsys, change, says):
    path = tmp_path / "x.ckpt"
    trainer = engine(max_steps=2, default_root_dir=tmp_path)
    trainer.fit(Regression(), rows())
    trainer.save_checkpoint(path)
    torch.save({**torch.load(path, weights_only=True), **change}, path)
    assert commands.main(["verify", str(path)]) != 0
    with pytest.raises(CheckpointError, match=says):
        engine(max_steps=4, default_root_dir=tmp_path).fit(Regression(), rows(), ckpt_path=path)


def test_an_accumulation_that_no_number_of_ranks_asks_for(run, tmp_path):
    path = copied(run, tmp_path / "run") / "snapshots" / "step=4"
    rest = torch.load(path / "rest.pt", weights_only=True)
    rest["polyphase"]["accumulate_grad_batches"] = 10**12
    torch.save(rest, path / "rest.pt")
    seal(path)
    with pytest.raises(CheckpointError, match="batches is 1000000000000, more than any number of ranks"):
        load_checkpoint(path)


def test_passes_of_a_sampler_that_are_too_many_to_repeat():
    class Odd:
        def __iter__(self) -> Any:
            yield 0

        def __len__(self) -> int:
            return 1

    with pytest.raises(CheckpointError, match=f"Odd has made {1 << 40} passes, which are too many to repeat"):
        restore_sampler(Odd(), 1 << 40, None)


def hostile(draw: random.Random, pieces: list[bytes]) -> bytes:
    """The pickle of a checkpoint with parts of it repeated, exchanged and taken out."""
    content = bytearray(draw.choice(pieces))
    for _ in range(draw.choice([1, 2, 5])):
        at, size = draw.randrange(len(content)), draw.randrange(1, 200)
        part = bytes(content[at : at + size])
        content[at : at + draw.choice([0, size])] = part * draw.choice([0, 1, 50])
    return bytes(content)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_files", [30, *nightly(500)])
def test_a_hostile_file_is_opened_or_refused(tmp_path, num_files):
    trainer = engine(max_steps=2, default_root_dir=tmp_path)
    trainer.fit(Regression(), rows())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with zipfile.ZipFile(tmp_path / "x.ckpt") as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    pickles, draw = [content for name, content in records.items() if name.endswith("data.pkl")], random.Random(0)
    for number in range(num_files):
        path = tmp_path / f"{number}.ckpt"
        with zipfile.ZipFile(path, "w", draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
            for name, content in records.items():
                archive.writestr(name, hostile(draw, pickles) if name.endswith("data.pkl") else content)
        is_whole = commands.main(["verify", str(path)]) == 0
        try:
            load_checkpoint(path)
            assert is_whole
        except CheckpointError:
            assert not is_whole
        os.remove(path)
    assert commands.main(["list", str(tmp_path)]) == 0


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_file_that_was_edited_is_one_of_lightnings(tmp_path):
    """What people do to a checkpoint by hand: new weights, and optimizers that begin anew."""
    path = tmp_path / "x.ckpt"
    module = Scheduled()
    trainer = engine(max_steps=2, default_root_dir=tmp_path)
    trainer.fit(module, rows())
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    for state in content["optimizer_states"]:
        state["state"] = {}
    content["state_dict"] = {name: torch.zeros_like(t) for name, t in content["state_dict"].items()}
    torch.save(content, path)
    trainer = engine(max_steps=3, max_epochs=5, default_root_dir=tmp_path)
    with pytest.warns(UserWarning, match=r"x\.ckpt was changed after it was saved \(optimizer_states\)"):
        trainer.fit(Scheduled(), rows(), ckpt_path=path)
    assert trainer.global_step == 3
    steps = [state["step"] for state in trainer.optimizers[0].state.values()]
    assert [float(step) for step in steps] == [1.0] * len(steps)


def test_a_checkpoint_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*nowhere\.ckpt"):
        engine(max_steps=1).fit(Scheduled(), rows(), ckpt_path=tmp_path / "nowhere.ckpt")


@pytest.mark.parametrize("best", [{"value": 1.0}, {"path": 5, "value": 1.0}, {"path": "x", "value": "y"}, [1]])
def test_the_best_snapshot_is_a_path_and_a_value(run, tmp_path, best):
    folder = copied(run, tmp_path / "run")
    path = folder / "snapshots" / "step=4"
    content = torch.load(path / "rest.pt", weights_only=True)
    content["callbacks"]["Snapshot"] = best
    torch.save(content, path / "rest.pt")
    said = json.loads((path / "MANIFEST.json").read_text())
    said["structures"]["rest.pt"] = structure_of(content)
    seal(path, said)
    assert commands.main(["verify", str(path)]) == 1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(folder, 6, resume="auto")
    assert any("of Snapshot" in str(warning.message) for warning in seen)
