"""Ray Tune, four trials of one process each: ``pip install "ray[tune]"``, then run this script."""

import os
from contextlib import nullcontext

import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from ray import tune
from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback

from polyphase.engine import Engine


class Model(BoringModel):
    def __init__(self, lr):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def trial(config):
    report = TuneReportCheckpointCallback({"loss": "loss"}, on="train_epoch_end")
    engine = Engine(devices=1, max_epochs=3, callbacks=[report])
    data = torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=8)
    checkpoint = tune.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        engine.fit(Model(config["lr"]), data, ckpt_path=folder and os.path.join(folder, "checkpoint"))


if __name__ == "__main__":
    results = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.5}),  # "gpu": 1
        param_space={"lr": tune.grid_search([0.01, 0.02, 0.05, 0.1])},
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(
            storage_path=os.path.abspath("ray"), failure_config=tune.FailureConfig(max_failures=3)
        ),
    ).fit()
    best = results.get_best_result()
    print(Model.load_from_checkpoint(os.path.join(best.checkpoint.path, "checkpoint")).hparams)
