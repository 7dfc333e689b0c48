"""A save that finds no room (a limit on the size of files, no inode) fails without a trace; what was there stays."""

import os
import resource
import sys
from contextlib import contextmanager

import pytest
from lightning.pytorch.loggers import CSVLogger

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError
from polyphase.engine.checkpoint.checked_io import naming
from polyphase.engine.checkpoint.export import export

from ...distributed import in_a_fork
from ..tiny import Regression, engine, rows
from .no_inodes import save_without_inodes
from .sample_checkpoints import about, content, is_whole, rank_state, save

ROOM_BYTES = 500_000


@contextmanager
def little_room(num_bytes=ROOM_BYTES):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# The tensors, or the rest, are too large.
TOO_LARGE = [{}, {"callbacks": {"Notes": "x" * 2 * ROOM_BYTES}}]


@pytest.mark.parametrize("name", ["1", "2"], ids=["the same name", "another name"])
@pytest.mark.parametrize("large", TOO_LARGE, ids=["tensors", "rest"])
def test_in_the_background_it_warns_and_the_previous_one_is_whole(tmp_path, name, large):
    saver = AsyncCheckpointer()
    save(tmp_path / "1", 1, saver)
    says = rf"{name} could not be saved: .*File too large.* The newest checkpoint is \S+/1; training continues"
    with little_room():
        saver.save({**content(2), **large}, str(tmp_path / name), about=about(2), of_rank=rank_state(2))
        with pytest.warns(RuntimeWarning, match=says):
            saver.finish()
    assert os.listdir(tmp_path) == ["1"]
    assert is_whole(str(tmp_path / "1"), 1)
    assert is_whole(save(tmp_path / name, 3, saver), 3)


@pytest.mark.parametrize(
    ("large", "error"), [(TOO_LARGE[0], CheckpointError), (TOO_LARGE[1], OSError)], ids=["tensors", "rest"]
)
def test_in_the_foreground_it_raises_and_the_previous_one_is_whole(tmp_path, large, error):
    save(tmp_path / "1", 1)
    with little_room(), pytest.raises(error, match="File too large"):
        save(tmp_path / "1", 2, **large)
    assert os.listdir(tmp_path) == ["1"]
    assert is_whole(str(tmp_path / "1"), 1)


class Logged(Regression):
    def training_step(self, batch, batch_idx):
        self.log_dict({f"{'x' * 100}{number}": 1.0 for number in range(9)})
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("path", ["model.ckpt", "lightning_logs/version_0"])
def test_an_error_names_what_was_to_be_written(tmp_path, path):
    """And not the temporary file, whose name nobody has chosen."""
    logger = CSVLogger(tmp_path) if path != "model.ckpt" else False
    trainer = engine(max_steps=1, default_root_dir=tmp_path, logger=logger, log_every_n_steps=1)

    def run() -> None:
        trainer.fit(Logged(), rows())
        trainer.save_checkpoint(tmp_path / path)

    with little_room(600), pytest.raises(OSError, match="File too large") as raised:
        run()
    assert raised.value.filename == str(tmp_path / path)


def test_a_full_disk_names_the_remedy(tmp_path):
    def write() -> None:
        with naming("/dev/full"), open("/dev/full", "w") as file:
            file.write("x")

    with pytest.raises(OSError, match=r"No space left on device \(make room there, or save elsewhere\): '/dev/full'"):
        write()


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_an_export_leaves_nothing_behind(tmp_path, suffix):
    path = save(tmp_path / "1", state_dict=content(1)["callbacks"]["Average"])
    (tmp_path / f"out{suffix}").write_text("was there")
    with little_room(), pytest.raises(OSError, match="File too large"):
        export(path, str(tmp_path / f"out{suffix}"), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["1", f"out{suffix}"]
    assert (tmp_path / f"out{suffix}").read_text() == "was there"


@pytest.mark.skipif(sys.platform != "linux", reason="mounts of a process's own are Linux's")
def test_without_inodes_the_reason_is_said(tmp_path):
    found = in_a_fork(save_without_inodes, tmp_path, timeout_s=120)
    assert "2 could not be saved: " in str(found.warned)
    for said in (str(found.warned), found.raised):
        assert "No space left on device" in said
    assert found.left, "nothing half-made"
    assert found.whole
