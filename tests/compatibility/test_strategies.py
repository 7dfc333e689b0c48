"""Checkpoints of every strategy that shards nothing, opened where polyphase is not there."""

import sys

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from polyphase.engine import Engine

from ..distributed import ROOT, run_command
from .conftest import QUIET
from .small import Small

OPENS = """
import sys, torch
from lightning.pytorch import Trainer
from tests.compatibility.small import Small

path, folder = sys.argv[1:]
content = torch.load(path, weights_only=True)
module = Small.load_from_checkpoint(path)
assert torch.equal(module.net[0].weight, content["state_dict"]["net.0.weight"])
trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_progress_bar=False,
                  default_root_dir=folder)
trainer.fit(module, ckpt_path=path)
assert trainer.current_epoch == 2
assert "polyphase" not in sys.modules
print(f"{content['global_step']} steps, then {trainer.global_step}")
"""


@pytest.mark.parametrize(
    "strategy", ["single", "dp", "ddp_fork", "zero1_fork", "local_sgd_fork", "diloco_fork", "ps_fork"]
)
def test_a_file_opens_without_polyphase(strategy, tmp_path):
    # On the one device of a CPU, `dp` is `single`; on several it needs GPUs.
    devices = 1 if strategy in ("single", "dp") else 2
    flags = {**QUIET, "devices": devices, "strategy": strategy, "default_root_dir": tmp_path}
    Engine(max_epochs=1, callbacks=[ModelCheckpoint(tmp_path, "saved")], **flags).fit(Small())
    path = tmp_path / "saved.ckpt"
    assert path.is_file()
    (tmp_path / "opens.py").write_text(OPENS)
    command = ["env", f"PYTHONPATH={ROOT}", sys.executable, tmp_path / "opens.py", path, tmp_path / "later"]
    finished = run_command(command, cwd=tmp_path)
    assert finished.returncode == 0, finished.output
    assert " steps, then " in finished.output
