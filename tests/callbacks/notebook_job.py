"""Runs a notebook in a real kernel, and prints what its cells put out as JSON; for `test_notebook_integration.py`."""

import json
import sys

import nbformat
from nbclient import NotebookClient

_FIT = """
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader
from polyphase.engine import Engine

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 100:
            print("rank", self.global_rank, "prints")
        loss = self.layer(batch).pow(2).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layer(batch).mean(), prog_bar=True, sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.layer(batch).mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = DataLoader(torch.randn(600 * DEVICES, 4), batch_size=2)
quiet = dict(logger=False, enable_checkpointing=False)
engine = Engine(
    strategy="STRATEGY", devices=DEVICES, accelerator="cpu", max_epochs=3, log_every_n_steps=1, **quiet
)
module = Module()
engine.fit(module, data, data)
"""
_TEST = "results = engine.test(module, data)"
_WRONG = "engine.test(module, DataLoader(torch.randn(8, 3)))"


def main(strategy: str, devices: str) -> None:
    sources = [_FIT.replace("STRATEGY", strategy).replace("DEVICES", devices), _TEST, _WRONG]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, timeout=150, allow_errors=True, kernel_name="python3").execute()
    print("OUTPUTS", json.dumps([cell.outputs for cell in notebook.cells]))


if __name__ == "__main__":
    main(*sys.argv[1:])
