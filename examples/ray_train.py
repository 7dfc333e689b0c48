"""Ray Train starts the workers, and restarts them: ``pip install "ray[train]"``, then run this script."""

import os
from contextlib import nullcontext

import ray.train
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayTrainReportCallback
from ray.train.torch import TorchTrainer

from polyphase.engine import Engine


def train_loop(config):
    engine = Engine(strategy=config["strategy"], max_epochs=3, callbacks=[RayTrainReportCallback()])
    data = torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=8)
    checkpoint = ray.train.get_checkpoint()
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        engine.fit(BoringModel(), data, ckpt_path=folder and os.path.join(folder, "checkpoint.ckpt"))


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"strategy": "fsdp"},
        scaling_config=ScalingConfig(num_workers=2),  # use_gpu=True
        run_config=RunConfig(storage_path=os.path.abspath("ray"), failure_config=FailureConfig(max_failures=3)),
    )
    print(trainer.fit().checkpoint)
