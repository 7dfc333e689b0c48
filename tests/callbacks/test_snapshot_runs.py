"""Which run a folder of snapshots belongs to: what a run continues, what it removes, and when it refuses to start."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checkpoint import CheckpointError, find, load_checkpoint, manifest, read_manifest
from polyphase.engine.checkpoint.manifest import MANIFEST
from polyphase.engine.checkpoint.run_record import RunRecord, read_record, write_record
from polyphase.engine.reliability.nonfinite import NonFiniteError

from ..engine.checkpoint.sample_checkpoints import save, seal
from ..engine.tiny import Regression, engine, rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    # Lightning's, wherever there is an OnExceptionCheckpoint.
    pytest.mark.filterwarnings("ignore:.?.fit.ckpt_path="),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


def train(folder: Path, *callbacks: Callback, steps: int = 10, module: Any = None, **flags: Any) -> Engine:
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    flags = {"enable_checkpointing": saves, "max_epochs": -1, "max_steps": steps, **flags}
    run = engine(default_root_dir=folder, callbacks=list(callbacks), **flags)
    run.fit(module or Regression(), rows(40))
    return run


def snapshots(**options: Any) -> Snapshot:
    return Snapshot(**{"every_n_steps": 2, "every_minutes": None, **options})


def names(folder: Path) -> list[str]:
    return [Path(path).name for path, _ in find(folder)]


def damage(path: Path) -> None:
    os.truncate(path / "rest.pt", 10)


# --- what a run removes


def test_models_that_another_callback_keeps_in_the_same_folder_stay(tmp_path):
    kept = ModelCheckpoint(tmp_path / "snapshots", save_top_k=-1, every_n_train_steps=2, filename="model-{step}")
    train(tmp_path, kept, snapshots(keep_last=1))
    models = [f"model-step={step}.ckpt" for step in (2, 4, 6, 8, 10)]
    assert sorted(names(tmp_path / "snapshots")) == sorted([*models, "step=10"])


def test_a_fresh_run_removes_nothing_of_the_one_before(tmp_path):
    first = train(tmp_path, snapshots(keep_last=3))
    before = {name: (tmp_path / "snapshots" / name / MANIFEST).read_bytes() for name in names(tmp_path / "snapshots")}
    second = train(tmp_path, snapshots(keep_last=1))
    third = train(tmp_path, snapshots(keep_last=1))
    assert names(tmp_path / "snapshots") == ["step=10-v2", "step=10-v1", "step=10", "step=8", "step=6"]
    assert all((tmp_path / "snapshots" / name / MANIFEST).read_bytes() == said for name, said in before.items())
    assert len({run.run_history.run.id for run in (first, second, third)}) == 3


def test_a_run_that_is_continued_is_pruned_by_the_one_that_continues_it(tmp_path):
    first = train(tmp_path, snapshots(keep_last=3), steps=6)
    again = train(tmp_path, snapshots(keep_last=2), resume="auto")
    assert again.run_history.run == first.run_history.run
    assert names(tmp_path / "snapshots") == ["step=10", "step=8"]
    named = train(tmp_path, snapshots(keep_last=1), steps=12, resume=tmp_path / "snapshots" / "step=8")
    assert named.run_history.run.lineage == (first.run_history.run.id, named.run_history.run.id)
    assert names(tmp_path / "snapshots") == ["step=12"]
    said = read_manifest(tmp_path / "snapshots" / "last")
    assert (said.run, said.lineage, said.kind) == (*named.run_history.run, "snapshot")


def test_retention_reads_no_manifest_again(tmp_path, monkeypatch):
    number = 50
    save(tmp_path / "snapshots" / "step=1000")
    for step in range(1001, 1000 + number):
        shutil.copytree(tmp_path / "snapshots" / "step=1000", tmp_path / "snapshots" / f"step={step}")
    read = []
    parse = manifest.parse_manifest
    monkeypatch.setattr(manifest, "parse_manifest", lambda *given: read.append(given[1]) or parse(*given))
    train(tmp_path, snapshots(every_n_steps=1, keep_last=1))
    others = [path for path in read if int(os.path.basename(str(path)).split("=")[1].split("-")[0]) >= 1000]
    assert len(others) == number, "each is read once, at the start"
    assert len(read) - number <= 4 * 10, "and its own: before and after each is published, and when one is removed"


# --- which one is continued


def test_the_newest_run_is_continued_whatever_its_step(tmp_path):
    train(tmp_path, snapshots(), steps=10)
    short = train(tmp_path, snapshots(), steps=6)
    assert os.readlink(tmp_path / "snapshots" / "last") == "step=6-v1"
    os.utime(tmp_path / "snapshots" / "step=10")
    again = train(tmp_path, snapshots(), steps=8, resume="auto")
    assert again.run_history.run == short.run_history.run
    assert os.readlink(tmp_path / "snapshots" / "last") == "step=8-v1"


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path):
    train(tmp_path, snapshots(keep_last=3), steps=6)
    for step in (2, 4, 6):
        path = tmp_path / "snapshots" / f"step={step}"
        seal(path, {**json.loads((path / MANIFEST).read_bytes()), "time": 1e9 - step})
    assert names(tmp_path / "snapshots") == ["step=6", "step=4", "step=2"]


def test_weights_alone_are_not_continued(tmp_path):
    weights = ModelCheckpoint(tmp_path / "snapshots", save_top_k=-1, every_n_train_steps=5, save_weights_only=True)
    train(tmp_path, snapshots(every_n_steps=4, keep_last=2), weights, steps=5)
    (tmp_path / "snapshots" / "last").unlink()
    shutil.rmtree(tmp_path / "snapshots" / "step=5")
    assert train(tmp_path, snapshots(), steps=8, resume="auto").global_step == 8
    assert read_manifest(tmp_path / "snapshots" / "epoch=0-step=5.ckpt").kind == "weights"


# --- when a run refuses to start afresh


def newer_format(folder: Path) -> None:
    for path in folder.glob("step=*"):
        said = json.loads((path / MANIFEST).read_bytes())
        seal(path, {**said, "format": 9, "versions": {"polyphase": "9.8.7"}})


def all_damaged(folder: Path) -> None:
    for path in folder.glob("step=*"):
        damage(path)


def all_manifests_damaged(folder: Path) -> None:
    for path in folder.glob("step=*"):
        (path / MANIFEST).write_text("{}")


def gone(folder: Path) -> None:
    os.rename(folder, folder.parent / "elsewhere")


def emptied(folder: Path) -> None:
    gone(folder)
    folder.mkdir()


@pytest.mark.filterwarnings("ignore:.*An older one is used", "ignore:.*It is skipped")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (newer_format, r"has format 9, .*: install Polyphase 9\.8\.7 or newer\."),
        (all_damaged, r"(?s)no checkpoint in \S+ can be opened:\n- .*step=10 is damaged: rest.pt.*step=8 is damaged"),
        (all_manifests_damaged, r"(?s)no checkpoint in \S+ can be opened:\n- .*step=10 can't be opened: .*step=8"),
        (gone, r"has no checkpoint, but run \w{12} had one there, of step \d+ or later\. Is a disk not mounted"),
        (emptied, r"has no checkpoint, but run \w{12} had one there"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_never_afresh_over_what_can_not_be_read(tmp_path, change, says):
    train(tmp_path, snapshots())
    folder = tmp_path / "snapshots"
    change(folder)
    before = sorted(os.listdir(folder)) if folder.exists() else []
    with pytest.raises(CheckpointError, match=says) as refused:
        train(tmp_path, snapshots(), resume="auto")
    assert "To start afresh nevertheless, pass resume='fresh': nothing is deleted." in str(refused.value)
    assert [name for name in sorted(os.listdir(folder)) if not name.startswith(".")] == [
        name for name in before if not name.startswith(".")
    ]
    assert train(tmp_path, snapshots(), steps=4, resume="fresh").global_step == 4
    assert {*before} <= {*os.listdir(folder)}
    assert train(tmp_path, snapshots(), steps=6, resume="auto").global_step == 6


def test_where_only_the_newest_manifest_is_damaged_an_older_one_is_taken_with_a_warning(tmp_path):
    train(tmp_path, snapshots())
    (tmp_path / "snapshots" / "step=10" / MANIFEST).write_text("{}")
    with pytest.warns(UserWarning) as told:  # noqa: PT030 - two of them
        again = train(tmp_path, snapshots(), resume="auto")
    said = [str(warning.message) for warning in told]
    assert any("step=10 can't be opened" in message and "It is skipped." in message for message in said)
    assert any("step=10 was damaged: it was renamed to" in message for message in said)
    assert again.global_step == 10
    assert len([*(tmp_path / "snapshots").glob("step=10.damaged-*")]) == 1


def test_one_odd_folder_does_not_block_the_others(tmp_path):
    train(tmp_path, snapshots(keep_last=5), steps=8)
    for number, change in enumerate((lambda p: p.mkdir(), os.mkfifo, lambda p: p.write_text("[" * 100_000))):
        odd = tmp_path / "snapshots" / f"odd{number}"
        odd.mkdir()
        change(odd / MANIFEST)
    newest = tmp_path / "snapshots" / "step=8"
    (newest / "ranks.pt").unlink()
    seal(newest)
    with pytest.warns(UserWarning) as told:  # noqa: PT030 - four of them
        again = train(tmp_path, snapshots(), steps=10, resume="auto")
    said = "\n".join(str(warning.message) for warning in told)
    for name in ("odd0", "odd1", "odd2", "step=8 is damaged: ranks.pt is missing in the manifest"):
        assert name in said
    assert again.global_step == 10


def test_a_job_that_is_started_again_goes_on_under_fresh_too(tmp_path, monkeypatch):
    train(tmp_path, snapshots(), steps=4)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = train(tmp_path, snapshots(), steps=6, resume="fresh")
    assert read_manifest(tmp_path / "snapshots" / "last").name == "step=6"
    assert len(again.run_history.run.lineage) == 1


# --- the global batch


def test_the_global_batch_is_known_before_the_first_snapshot(tmp_path):
    """Two ranks were stopped before it; the one that goes on does two micro-batches a step."""
    seen = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(read_record(str(tmp_path / "snapshots"), str(tmp_path)))

    train(tmp_path, Looks(), snapshots(), steps=2, resume="auto")
    (record,) = seen
    asked = {"accumulate_grad_batches": 1, "accumulation_asked": 1}
    assert record.batches == {**asked, "world_size": 1, "layout": {}}
    assert not record.has_saved
    assert read_record(str(tmp_path / "snapshots"), str(tmp_path)).has_saved
    folder = str(tmp_path / "other" / "snapshots")
    two = {**asked, "world_size": 2, "layout": {"replicate": 2}}
    write_record(folder, str(tmp_path / "other"), RunRecord("a" * 12, ("a" * 12,), False, 0, two))
    assert train(tmp_path / "other", snapshots(), steps=2, resume="auto").accumulate_grad_batches == 2


def test_a_record_of_nonsense_is_none(tmp_path):
    (tmp_path / "snapshots").mkdir()
    for text in ("", "[]", "{}", "[" * 100_000, '{"batches": {"world_size": "2"}}'):
        (tmp_path / "snapshots" / ".run.json").write_text(text)
        assert read_record(str(tmp_path / "snapshots"), str(tmp_path)) is None


# --- states that are of no use


class Searched(Regression):
    """Its optimizer calls the closure itself: no step can be left out."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=1)


class Poisoned(Searched):
    """Its loss is not a number from a step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.global_step >= 5 else loss


def is_finite(path: Path) -> bool:
    return all(value.isfinite().all() for value in load_checkpoint(path)["state_dict"].values())


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_poisoned_state_is_never_saved_nor_displaces_a_good_one(tmp_path, every):
    others = OnExceptionCheckpoint(tmp_path, filename="failed")
    with (
        pytest.raises(NonFiniteError, match=r"is not saved: the loss was not finite at step 5"),
        pytest.warns(UserWarning, match="is not saved: the loss was not finite"),
    ):
        train(tmp_path, others, snapshots(every_n_steps=every, keep_last=1), module=Poisoned(), nonfinite="error")
    assert names(tmp_path / "snapshots") == [f"step={5 // every * every}"]
    assert is_finite(tmp_path / "snapshots" / "last")
    assert not (tmp_path / "failed.ckpt").exists()
    resumed = train(tmp_path, snapshots(), module=Searched(), resume="auto", nonfinite="error")
    assert resumed.global_step == 10


def test_one_that_fails_of_something_else_is_not_saved_poisoned_either(tmp_path):
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                raise KeyError("something else")

    with pytest.raises(KeyError), pytest.warns(UserWarning, match="is not saved: the loss was not finite"):
        train(tmp_path, Stops(), snapshots(every_n_steps=4), module=Poisoned(), nonfinite="error")
    assert names(tmp_path / "snapshots") == ["step=4"]


def test_who_wants_to_go_on_with_it_saves_it(tmp_path):
    train(tmp_path, snapshots(keep_last=1), module=Poisoned())
    assert names(tmp_path / "snapshots") == ["step=10"]


# --- folders


def test_a_change_of_directory_in_mid_run_does_not_split_it(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    class Moves(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 5:
                os.chdir(tmp_path / "elsewhere")

    train(Path("run"), Moves(), snapshots(keep_last=9))
    assert names(tmp_path / "run" / "snapshots") == [f"step={step}" for step in (10, 8, 6, 4, 2)]
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "other", Moves(), snapshots(dirpath="given", keep_last=9))
    assert names(tmp_path / "given") == [f"step={step}" for step in (10, 8, 6, 4, 2)]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_name_that_is_taken_is_worked_around(tmp_path):
    (tmp_path / "snapshots" / "step=4").mkdir(parents=True)
    (tmp_path / "snapshots" / "step=4" / "thesis.tex").write_text("three years")
    (tmp_path / "snapshots" / "step=6").write_text("a file")
    (tmp_path / "snapshots" / "step=8").symlink_to(tmp_path / "snapshots" / "step=4")
    train(tmp_path, snapshots(keep_last=9))
    assert names(tmp_path / "snapshots") == ["step=10", "step=8-v1", "step=6-v1", "step=4-v1", "step=2"]
    assert os.listdir(tmp_path / "snapshots" / "step=4") == ["thesis.tex"]
    assert (tmp_path / "snapshots" / "step=6").read_text() == "a file"
    assert (tmp_path / "snapshots" / "step=8").is_symlink()


def put_a_file(path: Path) -> None:
    (path / ".DS_Store").write_bytes(b"of a file manager")


def put_a_link(path: Path) -> None:
    (path / "linked").symlink_to(path.parent)


@pytest.mark.parametrize("put", [put_a_file, put_a_link], ids=lambda put: put.__name__)
@pytest.mark.filterwarnings("ignore:.*An older one is used", "ignore:.*it is not removed")
@pytest.mark.filterwarnings("ignore:.* is damaged. it was renamed to")
def test_what_is_put_into_a_snapshot_does_not_block_the_run(tmp_path, put):
    train(tmp_path, snapshots(), steps=6)
    put(tmp_path / "snapshots" / "step=6")
    begun = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begun.append(trainer.global_step)

    train(tmp_path, Looks(), snapshots(), steps=8, resume="auto")
    put(tmp_path / "snapshots" / "step=8")
    damage(tmp_path / "snapshots" / "step=8")
    train(tmp_path, Looks(), snapshots(keep_last=9), steps=10, resume="auto")
    assert begun == [6, 6]
    assert names(tmp_path / "snapshots")[:2] == ["step=10", "step=8"]


# --- numbers and names that a file supplies


@pytest.mark.parametrize("said", [{}, {"run": "stranger", "lineage": ["stranger"]}, {"format": 9}], ids=str)
@pytest.mark.parametrize("resume", ["auto", "fresh"])
def test_a_number_that_leaves_no_next_one_is_refused_before_training(tmp_path, said, resume):
    train(tmp_path, snapshots(keep_last=9), steps=6)
    path = tmp_path / "snapshots" / "step=2"
    seal(path, {**json.loads((path / MANIFEST).read_bytes()), "sequence": (1 << 62) - 1, **said})
    before = sorted(os.listdir(tmp_path / "snapshots"))
    with pytest.raises(CheckpointError, match=r"step=2 (claims to be save number 46|can't be opened: .*has format 9)"):
        train(tmp_path, snapshots(keep_last=1), steps=10, resume=resume)
    assert sorted(os.listdir(tmp_path / "snapshots")) == before


class Best(ModelCheckpoint):
    """Keeps the best one of a value that gets better in each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, monitor="loss", mode="max", every_n_train_steps=1, filename="{step}", save_top_k=1)


class Rising(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", float(self.global_step))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("named", "says"),
    [("../other/best.ckpt", "is not in its folder"), ("step=1.ckpt", r"was saved by another run \(\w+\)")],
)
def test_a_callbacks_state_does_not_have_other_runs_files_removed(tmp_path, named, says):
    """A checkpoint names the path of another run's model as the one that its next best replaces."""
    (tmp_path / "mine").mkdir()
    train(tmp_path, Best(tmp_path / "other"), steps=1, module=Rising())
    other = tmp_path / "mine" / named
    shutil.copy(tmp_path / "other" / "step=1.ckpt", other)
    train(tmp_path, Best(tmp_path / "mine"), steps=3, module=Rising())
    (path,) = (tmp_path / "mine").glob("step=3.ckpt")
    content = torch.load(path, weights_only=True)
    (state,) = [state for name, state in content["callbacks"].items() if name.startswith(("Best", "ModelCheckpoint"))]
    state["best_k_models"] = {f"{tmp_path}/mine/{named}": torch.tensor(2.0)}
    state["kth_best_model_path"] = state["best_model_path"] = state["last_model_path"] = f"{tmp_path}/mine/{named}"
    del content["polyphase"]["manifest"]  # which has the form of the rest
    torch.save(content, path)
    with pytest.warns(UserWarning, match=rf"The checkpoint names \S+ for ModelCheckpoint, but it {says}"):
        again = train(tmp_path, Best(tmp_path / "mine"), steps=6, module=Rising(), resume=path)
    assert again.global_step == 6
    assert other.exists()
    assert again.checkpoint_callback.best_model_path == str(tmp_path / "mine" / "step=6.ckpt")


def test_save_checkpoint_over_a_folder_of_the_users_is_an_error(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("three years")

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "thesis")

    with pytest.raises(CheckpointError, match=r"thesis is a folder that holds thesis\.tex"):
        train(tmp_path / "run", Saves())
    assert os.listdir(tmp_path / "thesis") == ["thesis.tex"]
