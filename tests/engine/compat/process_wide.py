"""What the engine leaves changed in torch and Lightning: a process of its own, which has imported them before it.

python -m tests.engine.compat.process_wide
"""

import importlib
import pkgutil
import sys
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.rpc
from torch import nn
from torch.utils.data import DataLoader

from .libraries import contents, replaced, rules_added


class Layer(pl.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(trainer: type[pl.Trainer]) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer(**quiet, enable_model_summary=False, max_steps=2, accelerator="cpu", devices=1).fit(
        Layer(), DataLoader(torch.randn(8, 4), batch_size=4)
    )


def main() -> None:
    """Prints the functions and classes that are replaced, and the rules that are added."""
    _fit(pl.Trainer)  # sets what torch and Lightning set at first use
    assert not any(name.startswith("polyphase") for name in sys.modules)
    before = contents()
    engine = importlib.import_module("polyphase.engine")
    for module in pkgutil.walk_packages(engine.__path__, "polyphase.engine."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    _fit(engine.Engine)
    after = contents()
    for key in replaced(before, after):
        if callable(before[key]):
            print("replaced:", ".".join(key))
    print("rules:", rules_added(before, after))


if __name__ == "__main__":
    main()
