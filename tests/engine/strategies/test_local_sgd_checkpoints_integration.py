"""What ranks that train alone save: resumed in mid-window, and opened under other layouts."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checkpoint import load_checkpoint
from polyphase.engine.checkpoint.export import export
from tests.engine.parity import MLP, build, largest_difference, loader
from tests.engine.tiny import QUIET, Saves, SavesIn
from tests.pairs import nightly

from .test_local_sgd_integration import fit


def normed() -> LightningModule:
    torch.manual_seed(1)
    module = MLP()
    module.net.append(nn.BatchNorm1d(10))
    return module.train()


SPARSE = "topk:0.1,chunk=64,bits=2,decay=0.9"


@pytest.mark.parametrize(
    ("flag", "flags"),
    [
        *nightly(("local_sgd_fork:sync_every=4", {})),
        ("diloco_fork:sync_every=4", {}),
        ("diloco_fork:sync_every=3,warmup=1", {"compression": "int8", "precision": "16-mixed"}),
        ("diloco_fork:sync_every=2", {"compression": "topk:0.3"}),  # saved right after an exchange
        ("local_sgd_fork:sync_every=4", {"compression": SPARSE}),
        ("local_sgd_fork:sync_every=2,warmup=7", {}),  # saved in the warm-up
        ("diloco_fork:sync_every=4,overlap_steps=3", {}),  # saved while an exchange is under way
        ("local_sgd_fork:sync_every=4,fragments=2,overlap_steps=3", {"compression": SPARSE}),  # and while two are
        ("ddp_fork", {}),  # whose ranks have statistics of their own, too
    ],
)
def test_a_run_saved_in_mid_window_goes_on_bit_for_bit(flag, flags, tmp_path):
    whole, resumed = normed(), normed()
    fit(whole, flag, 9, callbacks=[Saves(tmp_path / "six", 6)], **flags)
    fit(resumed, flag, 9, ckpt_path=tmp_path / "six", **flags)
    assert largest_difference(whole.state_dict(), resumed.state_dict()) == 0


class Validates(MLP):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_validation_end", *nightly("on_validation_start")])
def test_a_run_saved_while_it_validates_goes_on_bit_for_bit(hook, tmp_path):
    whole, resumed = Validates(), Validates()
    resumed.load_state_dict(whole.state_dict())
    flags = {"limit_val_batches": 2, "val_check_interval": 3, "num_sanity_val_steps": 0}
    fit(whole, "diloco_fork:sync_every=4", 9, callbacks=[SavesIn(hook, 2, tmp_path / "six")], **flags)
    assert load_checkpoint(tmp_path / "six")["global_step"] == (3 if "batch" in hook else 6)
    fit(resumed, "diloco_fork:sync_every=4", 9, ckpt_path=tmp_path / "six", **flags)
    assert largest_difference(whole.state_dict(), resumed.state_dict()) == 0


class Asks(MLP):
    """Rank 1 asks for a snapshot at its fourth batch, when the other one is well ahead of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.03 + 0.1 * self.global_rank)
        if batch_idx == 3 and self.global_rank == 1:
            self.trainer.request_snapshot()
        return super().training_step(batch, batch_idx)


def test_ranks_out_of_step_save_at_the_same_one(tmp_path):
    torch.manual_seed(1)
    asking, resumed = Asks(), build("mlp")
    fit(asking, "diloco_fork:sync_every=11", 20, callbacks=[Snapshot(tmp_path, every_minutes=None)])
    (path,) = (path for path in tmp_path.glob("step=*") if path.name != "step=20")
    assert 4 <= load_checkpoint(path)["global_step"] < 20
    fit(resumed, "diloco_fork:sync_every=11", 20, ckpt_path=path)
    assert largest_difference(asking.state_dict(), resumed.state_dict()) == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "six"
    fit(normed(), "diloco_fork:sync_every=4", 9, callbacks=[Saves(path, 6)])
    return path


@pytest.mark.parametrize(("strategy", "devices"), [("ddp_fork", 2), ("single", 1), ("diloco_fork:sync_every=4", 4)])
def test_other_layouts_go_on_from_the_mean(saved, strategy, devices, tmp_path):
    before = load_checkpoint(saved)
    module = normed()
    engine = Engine(strategy=strategy, devices=devices, max_steps=9, callbacks=[Saves(tmp_path / "seven", 7)], **QUIET)
    engine.fit(module, loader("mlp", 1, devices), ckpt_path=saved)
    after = load_checkpoint(tmp_path / "seven")
    assert {state["step"].item() for state in after["optimizer_states"][0]["state"].values()} == {7}
    for name, weight in before["state_dict"].items():
        if weight.is_floating_point() and "running" not in name:
            # One step of AdamW at 1e-3, which its momentum may make longer.
            assert 0 < (after["state_dict"][name] - weight).abs().max() < 5e-3
    assert all(weight.isfinite().all() for weight in module.state_dict().values())


@pytest.mark.parametrize("more", ["", ",fragments=2", ",fragments=2,overlap_steps=1"])
def test_what_is_under_way_is_not_lost_with_other_options(more, tmp_path):
    """With an outer step that takes the mean, the mean of the ranks' weights goes on as that of ranks alone."""
    flag = "local_sgd_fork:sync_every=4"
    fit(build("mlp"), f"{flag},overlap_steps=3", 9, callbacks=[Saves(tmp_path / "six", 6)])
    before = load_checkpoint(tmp_path / "six")
    assert before["polyphase"]["ranks"][0]["strategy"]["under_way"][0]["due_step"] == 7
    module = build("mlp")
    fit(module, f"{flag}{more}", 7, ckpt_path=tmp_path / "six")
    moved = max((module.state_dict()[name] - value).abs().max() for name, value in before["state_dict"].items())
    assert 0 < moved < 5e-3  # a step of AdamW at 1e-3, which its momentum may make longer


class Unsent(Callback):
    """Writes down what a rank has not sent yet as training begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        residuals = trainer.strategy.comm_hook.state_dict()["residuals"]
        torch.save({name: value.clone() for name, value in residuals.items()}, self.folder / str(trainer.global_rank))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_other_ranks_owe_the_mean_of_what_was_not_sent(devices, tmp_path):
    flags = {"strategy": "local_sgd_fork:sync_every=4", "compression": SPARSE}
    fit(normed(), "local_sgd_fork:sync_every=4", 9, compression=SPARSE, callbacks=[Saves(tmp_path / "six", 6)])
    saved = [rank["compression"]["residuals"] for rank in load_checkpoint(tmp_path / "six")["polyphase"]["ranks"]]
    engine = Engine(devices=devices, max_steps=9, callbacks=[Unsent(tmp_path)], **flags, **QUIET)
    engine.fit(normed(), loader("mlp", 1, devices), ckpt_path=tmp_path / "six")
    for rank in range(devices):
        found = torch.load(tmp_path / str(rank), weights_only=True)
        assert found.keys() == saved[0].keys()
        for name, value in found.items():
            of_ranks = torch.stack([residuals[name] for residuals in saved])
            expected = of_ranks[rank] if devices == 2 else of_ranks.mean(0)
            torch.testing.assert_close(value.flatten(), expected.flatten(), atol=0, rtol=0)
    assert all(value.any() for name, value in saved[0].items() if name.endswith("2.weight"))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_one_file_of_it_has_the_mean_for_stock_lightning(saved, tmp_path):
    export(str(saved), str(tmp_path / "six.ckpt"))
    found = torch.load(tmp_path / "six.ckpt", weights_only=True)
    assert largest_difference(found["state_dict"], load_checkpoint(saved)["state_dict"]) == 0
    assert all(len(state) == 3 for state in found["optimizer_states"][0]["state"].values())  # AdamW's, of rank 0
    module = normed()
    trainer = Trainer(**QUIET, max_steps=7)
    trainer.fit(module, loader("mlp", 1), ckpt_path=tmp_path / "six.ckpt")
    assert trainer.global_step == 7


def test_a_run_of_ddp_goes_on_alone(tmp_path):
    fit(normed(), "ddp_fork", 6, callbacks=[Saves(tmp_path / "six", 6)])
    whole, parted = normed(), normed()
    fit(whole, "local_sgd_fork:sync_every=2,warmup=6", 9)
    fit(parted, "local_sgd_fork:sync_every=2,warmup=6", 9, ckpt_path=tmp_path / "six")
    assert largest_difference(whole.state_dict(), parted.state_dict()) == 0
