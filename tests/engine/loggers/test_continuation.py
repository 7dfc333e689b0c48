"""What a file says of a run's logs: they are continued, but no other run's log is cut or removed, whatever it says."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checkpoint.manifest import MANIFEST
from polyphase.engine.loggers.continuation import kind_of

from ..checkpoint.sample_checkpoints import seal
from ..tiny import Regression, engine, rows

LOGGERS = [CSVLogger, TensorBoardLogger]


class Fails(Callback):
    """Ends a run before its first snapshot."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            raise SystemExit(3)


class Logged(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def train(root: Path, logger: Any, steps: int, *callbacks: Any, **flags: Any) -> Engine:
    flags = {"max_epochs": -1, "max_steps": steps, "log_every_n_steps": 1, **flags}
    run = engine(default_root_dir=root, logger=logger, callbacks=list(callbacks), **flags)
    run.fit(Logged(), rows(40))
    return run


def logs(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def are_kept(before: dict[str, bytes], folder: Path) -> bool:
    after = logs(folder)
    return all(after.get(name) == content for name, content in before.items())


def snapshots() -> Snapshot:
    return Snapshot(every_n_steps=2, every_minutes=None)


@pytest.mark.parametrize("other_saves", [False, True], ids=["without snapshots", "with snapshots"])
@pytest.mark.parametrize("make", LOGGERS)
def test_a_manifest_does_not_have_another_runs_log_cut(tmp_path, make, other_saves):
    def new() -> Any:
        return make(tmp_path, name="logs")

    other = train(tmp_path / "other", new(), 8, *[snapshots()] * other_saves)
    before = logs(tmp_path / "logs" / "version_0")
    train(tmp_path / "run", new(), 4, snapshots())
    path = tmp_path / "run" / "snapshots" / "step=4"
    said = json.loads((path / MANIFEST).read_bytes())
    for entry in said["loggers"]:
        entry.update(id=0, position=0 if make is CSVLogger else {})
    run = other.run_history.run
    seal(path, {**said, **({"run": run.id, "lineage": list(run.lineage)} if other_saves else {})})
    again = train(tmp_path / "run", new(), 6, snapshots(), resume="auto")
    assert again.global_step == 6
    assert again.logger.version == 2
    assert are_kept(before, tmp_path / "logs" / "version_0")


@pytest.mark.parametrize("make", LOGGERS)
def test_a_record_does_not_either(tmp_path, make):
    def new() -> Any:
        return make(tmp_path, name="logs")

    train(tmp_path / "other", new(), 8)
    before = logs(tmp_path / "logs" / "version_0")

    with pytest.raises(SystemExit):
        train(tmp_path / "run", new(), 4, Snapshot(every_n_steps=9), Fails())
    record = tmp_path / "run" / "snapshots" / ".run.json"
    said = json.loads(record.read_text())
    for entry in said["loggers"]:
        entry.update(id=0)
    record.write_text(json.dumps(said))
    train(tmp_path / "run", new(), 6, snapshots(), resume="auto")
    assert are_kept(before, tmp_path / "logs" / "version_0")


@pytest.mark.parametrize("make", LOGGERS)
def test_its_own_log_is_continued_start_after_start(tmp_path, make):
    for steps in (3, 5, 7):
        run = train(tmp_path, make(tmp_path), steps, snapshots(), resume="auto")
        assert run.logger.version == 0
    assert os.listdir(tmp_path / "lightning_logs") == ["version_0"]


def test_what_a_link_leads_to_is_not_cut(tmp_path):
    other = tmp_path / "events.out.tfevents.other"
    other.write_bytes(b"another experiment")
    logger = TensorBoardLogger(tmp_path, version="mine")
    Path(logger.log_dir).mkdir(parents=True)
    (Path(logger.log_dir) / "events.out.tfevents.1").symlink_to(other)
    kind = kind_of(logger)
    kind.take_back(logger, {"events.out.tfevents.1": 3}, 0)
    kind.take_back(logger, {}, 0)
    assert other.read_bytes() == b"another experiment"


def test_a_file_that_has_another_name_elsewhere_is_copied_before_it_is_cut(tmp_path):
    """Of a copy by hard links, or another experiment's."""

    def new() -> TensorBoardLogger:
        return TensorBoardLogger(tmp_path, name="logs")

    train(tmp_path / "run", new(), 5, snapshots())
    (tmp_path / "copy").mkdir()
    for path in (tmp_path / "logs" / "version_0").glob("*tfevents*"):
        os.link(path, tmp_path / "copy" / path.name)
    shutil.rmtree(tmp_path / "run" / "snapshots" / "step=5")
    before = logs(tmp_path / "copy")
    assert train(tmp_path / "run", new(), 8, snapshots(), resume="auto").global_step == 8
    assert logs(tmp_path / "copy") == before
    assert not are_kept(before, tmp_path / "logs" / "version_0")


def test_nothing_is_removed_from_the_runs_of_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")

    def new() -> WandbLogger:
        return WandbLogger(save_dir=tmp_path, offline=True)

    first = train(tmp_path / "run", new(), 5, snapshots())
    first.logger.experiment.finish()
    before = logs(tmp_path / "wandb")
    shutil.rmtree(tmp_path / "run" / "snapshots" / "step=5")
    again = train(tmp_path / "run", new(), 8, snapshots(), resume="auto")
    assert again.logger.version == first.logger.version
    again.logger.experiment.finish()
    written = {name: content for name, content in before.items() if name.endswith(".wandb")}
    after = logs(tmp_path / "wandb")
    assert written
    assert all(after[name].startswith(content) for name, content in written.items())


@pytest.mark.parametrize(
    "position",
    [
        *(None, 5, [], {"recent": []}, {"next": -1, "recent": []}, {"next": 1e999, "recent": []}),
        *({"next": 1, "recent": rows} for rows in (5, [5], [[]], [[1e999, 1, {}]], [[1, 1, [1]]], [[1, 1, {"a": 1}]])),
        {"next": 1, "recent": [[1, 1, {"a": "x"}]]},
    ],
)
def test_a_position_of_wandb_that_is_none_is_refused(position):
    kind = kind_of(WandbLogger(offline=True))
    assert kind is not None
    with pytest.raises(ValueError, match=r"position|could not convert"):
        kind.checked(position)
    rows = {"next": 3, "recent": [[2, 1, {"loss": "nan"}]]}
    assert kind.checked(rows)["recent"][0][:2] == (2, 1)


def of_bytes(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"epoch", b"ep\xffch"))


def of_long_rows(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\r\n", b",1,2,3\r\n").replace(b",1,2,3", b"", 1))


def of_a_long_field(path: Path) -> None:
    path.write_bytes(b"x" * 200_000 + b"," + path.read_bytes())


def a_link(path: Path) -> None:
    path.rename(path.parent / "others.csv")
    path.symlink_to("others.csv")


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [of_bytes, of_long_rows, of_a_long_field, a_link, a_pipe])
def test_rows_are_not_added_to_a_file_that_has_no_place_for_them(tmp_path, damage):
    train(tmp_path, CSVLogger(tmp_path, name="logs"), 4, snapshots())
    folder = tmp_path / "logs" / "version_0"
    damage(folder / "metrics.csv")
    before = {name: content for name, content in logs(folder).items() if name != "metrics.csv"}
    with pytest.warns(UserWarning, match=r"metrics.csv is not continued: .* renamed to .*\.damaged-"):
        train(tmp_path, CSVLogger(tmp_path, name="logs"), 6, snapshots(), resume="auto")
    assert (folder / "metrics.csv").read_text().splitlines()[1:]
    assert not (folder / "metrics.csv").is_symlink()
    assert are_kept(before, folder)
