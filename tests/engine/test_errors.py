"""What is refused before any process starts, by which error, and what is let through."""

import os
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from polyphase.engine.errors import RefusedError, check_checkpoint, check_nodes, refusing
from polyphase.engine.flags import check_count

from .tiny import Regression, Seen, engine, rows


def test_an_error_of_the_engines_own_is_a_refusal():
    with pytest.raises(RefusedError, match="at least 1, but got 0") as refused, refusing():
        check_count("steps", 0)
    assert isinstance(refused.value, ValueError)
    assert isinstance(refused.value, MisconfigurationException)
    assert any(entry.name == "check_count" for entry in refused.traceback), "where it comes from can be seen"


def test_errors_of_others_stay_as_they_are():
    mine = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as raised, refusing():
        raise mine
    assert raised.value is mine
    with pytest.raises(RuntimeError) as of_torch, refusing():
        torch.zeros(2).view(3)
    assert type(of_torch.value) is RuntimeError


def test_a_module_that_can_not_be_trained_is_refused():
    with pytest.raises(RefusedError, match="no layer of Seen is known to be safe to split"):
        engine(strategy="tp_fork", devices=2).fit(Seen(), rows())


# --- checkpoints


@pytest.fixture
def folder(tmp_path):
    for name in ("step=10", "step=20"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    return tmp_path / "snapshots"


@pytest.mark.parametrize("path", [None, "auto", "best", "last", "hpc", "s3://bucket/step=1", "registry:model"])
def test_what_is_looked_up_later_is_let_through(path):
    check_checkpoint(path, TorchCheckpointIO())


@pytest.mark.parametrize("path", ["x.ckpt", Path("x.ckpt"), "snapshots/step=10/"])
def test_what_is_there_is_let_through(folder, path):
    Path("x.ckpt").touch()
    check_checkpoint(path, TorchCheckpointIO())


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("snapshots/step=30", "Did you mean 'snapshots/step="),
        ("snapshots/stpe=20/", "Did you mean 'snapshots/step=20'?"),
        ("snapshts", "Did you mean 'snapshots'?"),
        ("lst", "Did you mean 'last'?"),
        ("snapshots/else", None),
        ("nowhere/step=10", None),
    ],
)
def test_a_path_at_which_there_is_nothing(folder, path, near):
    with pytest.raises(FileNotFoundError) as refused:
        check_checkpoint(path, TorchCheckpointIO())
    assert isinstance(refused.value, RefusedError)
    message = str(refused.value)
    there = os.path.abspath(path)
    assert message.startswith(f"Checkpoint file not found: {path.rstrip('/')}. There is nothing at {there}.")
    assert near in message if near else "Did you mean" not in message


class Elsewhere(CheckpointIO):
    """Keeps checkpoints where no file is."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        raise NotImplementedError

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        raise NotImplementedError

    def remove_checkpoint(self, path):
        raise NotImplementedError


def test_what_a_plugin_of_the_users_keeps_is_let_through():
    check_checkpoint("of mine", Elsewhere())


@pytest.mark.parametrize("leftover", [".saving-0123", ".replaced-0123"])
def test_a_folder_to_be_repaired_may_still_get_it(folder, leftover):
    (folder / leftover).mkdir()
    check_checkpoint(folder / "step=30", TorchCheckpointIO())


@pytest.mark.parametrize("flags", [{"resume": "nowhere"}, {"ckpt_path": "nowhere"}], ids=str)
def test_the_engine_looks_before_it_runs(flags):
    run = engine(**{name: value for name, value in flags.items() if name == "resume"})
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: nowhere\. There is nothing at .*nowhere"):
        run.fit(Regression(), rows(), ckpt_path=flags.get("ckpt_path"))
    assert not Path("failures").exists()
    assert run.state.fn is None


# --- nodes


@pytest.fixture
def nobody(monkeypatch):
    """No launcher, whatever started the tests."""
    monkeypatch.delenv("MASTER_ADDR", raising=False)


def test_nodes_that_nothing_brings_together(nobody):
    with pytest.raises(RefusedError, match=r"num_nodes=3, but .* `polyphase launch --nnodes 3`, SLURM or MPI"):
        check_nodes(3, LightningEnvironment())
    with pytest.raises(RefusedError, match="num_nodes=2, but nothing says where the nodes meet"):
        engine(strategy="ddp", num_nodes=2).fit(Regression(), rows())


def test_nodes_that_meet_somewhere(nobody, monkeypatch):
    check_nodes(1, LightningEnvironment())
    check_nodes(2, TorchElasticEnvironment())
    check_nodes(2, type("OfTheUsers", (LightningEnvironment,), {})())
    monkeypatch.setenv("MASTER_ADDR", "head")
    check_nodes(2, LightningEnvironment())
