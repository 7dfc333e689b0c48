"""`DigitsClassifier` on `Digits`: scikit-learn's bundled 1797 handwritten digits of 8 x 8 pixels, no download."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["Digits", "DigitsClassifier"]


class DigitsClassifier(LightningModule):
    """A small convolutional net with BatchNorm; logs loss and accuracy.

    Batches are pairs: images [batch, 1, 8, 8] in [0, 1], and classes [batch] from 0 to 9.

    Args:
        width: channels of the first layer; the second has twice as many.
        lr: highest learning rate of the one-cycle schedule.
        weight_decay: weight decay of all parameters.
    """

    def __init__(self, width: int = 32, lr: float = 5e-3, weight_decay: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.weight_decay = lr, weight_decay
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )
        self.val_accuracy = MulticlassAccuracy(10, average="micro")
        self.test_accuracy = MulticlassAccuracy(10, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits [batch, 10]."""
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the mean cross-entropy."""
        images, classes = batch
        loss = functional.cross_entropy(self(images), classes)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy of the epoch over all ranks."""
        self._evaluate(batch, "val", self.val_accuracy)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Logs loss and accuracy of the epoch over all ranks."""
        self._evaluate(batch, "test", self.test_accuracy)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the most likely class of each image, [batch]."""
        return self(batch[0]).argmax(1)

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str, accuracy: MulticlassAccuracy) -> None:
        images, classes = batch
        logits = self(images)
        accuracy(logits, classes)
        loss = functional.cross_entropy(logits, classes)
        self.log(f"{stage}/loss", loss, sync_dist=True, batch_size=len(images))
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=len(images))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Returns AdamW with a one-cycle schedule per step over the whole run."""
        one_kernel = self.on_gpu or None  # instead of many, each of which reads all parameters
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay, fused=one_kernel)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Digits(LightningDataModule):
    """The digits, split by class into 60 / 15 / 25 per cent for training, validation and test.

    Args:
        batch_size: images per batch and process.
        num_workers: number of loader processes.
        seed: seed of the split.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """

    def __init__(self, batch_size: int = 32, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)  # the model logs these names too, and loggers refuse duplicates
        self.parts: dict[str, TensorDataset] = {}

    def prepare_data(self) -> None:
        """Fails early, once per node, if scikit-learn is missing."""
        _load()

    def setup(self, stage: str) -> None:
        """Splits the data, the same way in every process."""
        from sklearn.model_selection import train_test_split

        images, classes = _load()
        seed = self.hparams["seed"]
        rest, test = train_test_split(range(len(classes)), test_size=0.25, stratify=classes, random_state=seed)
        train, val = train_test_split(rest, test_size=0.2, stratify=classes[rest], random_state=seed)
        self.parts = {
            name: TensorDataset(images[split], classes[split])
            for name, split in (("train", train), ("val", val), ("test", test))
        }

    def train_dataloader(self) -> DataLoader:
        """Returns the loader of the training part, shuffled."""
        return self._loader("train")

    def val_dataloader(self) -> DataLoader:
        """Returns the loader of the validation part, in order."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        """Returns the loader of the test part, in order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        """Returns the loader of the test part, in order."""
        return self._loader("test")

    def _loader(self, split: str) -> DataLoader:
        if not self.parts:
            self.setup("fit")
        workers = self.hparams["num_workers"]
        return DataLoader(
            self.parts[split],
            batch_size=self.hparams["batch_size"],
            shuffle=split == "train",
            num_workers=workers,
            persistent_workers=workers > 0,
        )


def _load() -> tuple[Tensor, Tensor]:
    """Returns images [1797, 1, 8, 8] in [0, 1] and classes [1797]."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'Digits reads the data that ships with scikit-learn: pip install "polyphase[examples]"'
        ) from error
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
    return images, torch.from_numpy(digits.target).long()
