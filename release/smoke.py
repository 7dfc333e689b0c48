"""What is installed works, without a checkout: imports, the command, a run on two ranks and its export.

``make smoke`` builds wheel and source distribution, installs each into fresh environments, with the oldest and the
newest dependencies that are allowed, and runs this there.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import requires, version
from pathlib import Path

import torch
from lightning.pytorch import LightningModule
from packaging.requirements import Requirement
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import polyphase
from polyphase import Engine
from polyphase.callbacks import Snapshot
from polyphase.doctor import Doctor


class Module(LightningModule):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns SGD."""
        return torch.optim.SGD(self.parameters(), 0.1)


if __name__ == "__main__":
    assert "site-packages" in str(Path(polyphase.__file__)), polyphase.__file__
    needs = [Requirement(line) for line in requires("polyphase") or () if "extra ==" not in line]
    for need in needs:
        assert need.specifier.contains(version(need.name)), need
    print(", ".join(f"{need.name} {version(need.name)}" for need in needs))
    command = Path(sys.executable).with_name("polyphase")
    said = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout
    assert version("polyphase") in said, said
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [Snapshot(f"{folder}/snapshots", every_n_steps=2), Doctor()]
        engine = Engine(
            strategy="fsdp_fork",
            devices=2,
            accelerator="cpu",
            max_steps=4,
            default_root_dir=folder,
            callbacks=callbacks,
        )
        engine.fit(Module(), DataLoader(torch.ones(32, 4), batch_size=4))
        engine.export(f"{folder}/weights.safetensors")
        assert load_file(f"{folder}/weights.safetensors").keys() == {"layer.weight", "layer.bias"}
    print("works")
