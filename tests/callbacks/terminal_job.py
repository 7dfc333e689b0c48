"""What `test_terminal_integration.py` runs in a terminal: entry points in a row, with lines from all around."""

import argparse
import os
import sys
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.terminal import mark

NUM_BATCHES = 6
LONG = "train/a_metric_with_a_name_as_long_as_some_people_write_them"


class Talking(LightningModule):
    """Prints on every rank, in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.say(f"training {self.current_epoch}.{batch_idx}")
        loss = self.layer(batch).pow(2).mean()
        self.log_dict({"train/loss": loss, LONG: loss, **{f"train/part_{i}": loss for i in range(4)}}, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.say(f"validation {dataloader_idx}.{batch_idx}")
        self.log("val/loss", self.layer(batch).mean(), prog_bar=True, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.say(f"test {batch_idx}")
        self.log("test/loss", self.layer(batch).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.say(f"prediction {batch_idx}")
        return self.layer(batch)

    def say(self, text: str) -> None:
        print(f"<print of rank {self.global_rank}: {text}>")
        print(f"<error of rank {self.global_rank}: {text}>\n<its second line>", file=sys.stderr)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Marks(Callback):
    """Has the screen read in mid-epoch, in mid-validation, and so on."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 0:
            os.write(2, b"<a line of a library in C++>\n")  # past all streams of Python
        self.at(trainer, f"train-{trainer.current_epoch}", batch_idx)

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        loader = args[4] if len(args) > 4 else 0
        if trainer.state.fn == "validate":
            self.at(trainer, f"validate-{loader}", args[3])
        elif not trainer.sanity_checking and trainer.current_epoch == 0:
            self.at(trainer, f"validation-{loader}", args[3])

    def on_test_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self.at(trainer, "test", batch_idx)

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, out: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.at(trainer, "predict", batch_idx)

    def at(self, trainer: Any, name: str, batch_idx: int) -> None:
        if batch_idx == 3:
            if trainer.is_global_zero:
                time.sleep(1.2)  # longer than another rank's line may have erased the bar for
                mark(name)
            trainer.strategy.barrier()


def data(num_batches: int = NUM_BATCHES) -> DataLoader:
    world_size = int(os.environ.get("NUM_RANKS", "1"))
    return DataLoader(torch.randn(2 * num_batches * world_size, 4), batch_size=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="single")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--entries", nargs="+", default=["fit", "validate", "test", "predict"])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ["NUM_RANKS"] = str(given.devices)
    seed_everything(0, verbose=False)
    engine = Engine(
        strategy=given.strategy,
        devices=given.devices,
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=2,
        callbacks=[Marks()],
    )
    module = Talking()
    for entry in given.entries:
        if entry == "fit":
            engine.fit(module, data(), [data(), data(5)])
        elif entry == "validate":
            engine.validate(module, [data(), data(5)])
        else:
            getattr(engine, entry)(module, data())
    if engine.is_global_zero:
        print("<the end>")


if __name__ == "__main__":
    main()
