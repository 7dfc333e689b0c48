"""Small fits whose outcome can be compared between the stock trainer and the engine."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.checkpoint import is_checkpoint

from .replay import describe

TRAINERS: list[type[pl.Trainer]] = [pl.Trainer, Engine]


class Small(pl.LightningModule):
    """Two linear layers with BatchNorm between, that log and validate."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lr = lr
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.backbone(rows))

    def loss(self, rows: Tensor) -> Tensor:
        return (self(rows) - rows.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        # Frozen parameters join later, by way of a callback.
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], self.lr, momentum=0.9)


class Notes(Small):
    """Notes in `seen` what its hooks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []


def rows(num_batches: int = 4, batch_size: int = 4, **arguments: Any) -> DataLoader:
    """Always the same rows, in order."""
    data = torch.randn(num_batches * batch_size, 4, generator=torch.Generator().manual_seed(num_batches))
    return DataLoader(data, batch_size=batch_size, **arguments)  # type: ignore[arg-type]


def trainer_of(trainer_class: type[pl.Trainer], folder: Path, **flags: Any) -> pl.Trainer:
    """A trainer on one CPU that writes to `folder` only, and little."""
    folder.mkdir(exist_ok=True)
    usual: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "default_root_dir": folder,
        "log_every_n_steps": 1,
        "enable_checkpointing": any(isinstance(c, Checkpoint) for c in flags.get("callbacks", [])),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    if flags.get("barebones"):
        del usual["log_every_n_steps"]
    else:
        usual["logger"] = CSVLogger(folder, name="", version="")
    return trainer_class(**{**usual, **flags})


def outcome(trainer: pl.Trainer, module: pl.LightningModule, folder: Path) -> dict[str, Any]:
    """What the run left behind, in numbers and strings."""
    return {
        "weights": exactly(module.state_dict()),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.total_batch_idx,
        "metrics": exactly(trainer.callback_metrics),
        "logged": exactly(trainer.logged_metrics),
        "bar": exactly(trainer.progress_bar_metrics),
        "optimizers": exactly([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "files": files(folder),
    }


def files(folder: Path) -> dict[str, Any]:
    """All files below `folder` by their paths in it; checkpoints and tables with what is in them."""
    # Reports of failures are Engine's alone. So are the hyperparameters of a module that has saved none: Engine logs
    # its flags, see `test_run_log.py`.
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.parent.name != "failures" and path.name != "hparams.yaml"
    )
    return {str(path.relative_to(folder)): _content(path, folder) for path in found}


def _content(path: Path, folder: Path) -> Any:
    if path.suffix == ".ckpt":
        is_ours = is_checkpoint(path)
        checkpoint = torch.load(path, weights_only=False)
        assert (checkpoint.pop("polyphase", None) is not None) is is_ours
        return without(exactly(checkpoint), folder)
    return path.read_text() if path.suffix == ".csv" else None


def compare(folder: Path, make: Any, loader: Any = rows, raises: str | None = None, **flags: Any) -> dict[str, Any]:
    """Fits what `make` makes under both trainers, and returns the outcome that they must share.

    Args:
        folder: for what they write.
        make: makes the module.
        loader: makes what it is trained on.
        raises: the name of the error that both end in.
        **flags: of both trainers.
    """
    expected, found = (_fit(c, folder / c.__name__, make(), loader(), **flags) for c in TRAINERS)
    assert found == expected
    assert (found["raised"] and found["raised"][0]) == raises, found["raised"]
    return found


def _fit(trainer_class: type[pl.Trainer], folder: Path, module: Any, train: Any, **flags: Any) -> dict[str, Any]:
    trainer = trainer_of(trainer_class, folder, **flags)
    raised = error_of(trainer.fit, module, train, rows(2))
    return {**outcome(trainer, module, folder), "seen": exactly(getattr(module, "seen", None)), "raised": raised}


def exactly(value: Any) -> Any:
    """`value` in numbers and strings, every number of a tensor included."""
    return describe(value, most=1000)


def without(value: Any, folder: Path) -> Any:
    """`value` with no mention of the folder that it was written to."""
    if isinstance(value, dict):
        return {without(key, folder): without(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [without(item, folder) for item in value]
    return value.replace(str(folder), "") if isinstance(value, str) else value


def only_names(table: str, *fragments: str) -> list[list[str]]:
    """A CSV table with `...` for what stands in columns whose names contain one of `fragments`: times and loads."""
    header, *lines = [line.split(",") for line in table.splitlines()]
    hidden = [any(fragment in name for fragment in fragments) for name in header]
    return [header, *([_hide(cell, hide) for cell, hide in zip(line, hidden, strict=True)] for line in lines)]


def _hide(cell: str, hide: bool) -> str:
    return "..." if hide and cell else cell


def error_of(function: Any, *arguments: Any, **named: Any) -> tuple[str, str] | None:
    """Type and text of what the call raises; None if it doesn't."""
    try:
        function(*arguments, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    return None
