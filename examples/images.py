"""Image classification with a network of one's own: augmentation, mean weights, the best checkpoint, a test.

python examples/images.py --strategy ddp --devices 2 --accelerator cpu
"""

import argparse

import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from polyphase import Engine
from polyphase.models import Digits


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.layers(x))


class Classifier(LightningModule):
    def __init__(self, width: int = 24, num_blocks: int = 3, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(num_blocks)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)))

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        if not self.training:
            return batch
        images, classes = batch  # each batch moves by up to a pixel to a side, on the device
        shift = int(torch.randint(-1, 2, ()))
        return images.roll(shift, 3) + 0.05 * torch.randn_like(images), classes

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.05)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, stage: str = "val") -> None:
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log(f"{stage}/loss", functional.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log(f"{stage}/accuracy", self.accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validation_step(batch, batch_idx, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], fused=self.on_gpu or None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, hsdp:replicate=2, ...")
    parser.add_argument("--devices", default="auto", help="devices per node")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--max_epochs", type=int, default=10)
    seed_everything(0)
    callbacks = [ModelCheckpoint(monitor="val/accuracy", mode="max"), EMAWeightAveraging(decay=0.9)]
    engine = Engine(**vars(parser.parse_args()), callbacks=callbacks, gradient_clip_val=1.0, log_every_n_steps=10)
    engine.fit(Classifier(), datamodule=Digits())
    engine.test(datamodule=Digits(), ckpt_path="best")
