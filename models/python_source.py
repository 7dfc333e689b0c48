"""`PythonSource`: the text of the Python standard library installed on this machine, as bytes."""

import os
import sysconfig
import zlib
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = ["PythonSource", "Windows"]

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


class Windows(Dataset[Tensor]):
    """A text cut into windows that overlap by one token: item i is [length + 1], int64.

    Args:
        text: [tokens], of unsigned integers.
        length: number of predictions per window.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.length)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


class PythonSource(LightningDataModule):
    """Bytes of the standard library's ``.py`` files in the order of their paths; a tenth of the files for validation.

    The split depends only on the files' names, so it is the same everywhere.

    Args:
        batch_size: number of windows per batch and process.
        context_length: number of predicted bytes per window; batches are [batch_size, context_length + 1].
        num_workers: number of loader processes.
        max_bytes: largest size of the training text.
        max_val_bytes: largest size of the validation text.
        bytes_per_token: 1, or 2: then two bytes are one of 65,536 tokens, and windows have so many of these.
    """

    def __init__(
        self,
        batch_size: int = 16,
        context_length: int = 128,
        num_workers: int = 0,
        max_bytes: int = 400_000,
        max_val_bytes: int = 64_000,
        bytes_per_token: Literal[1, 2] = 1,
    ) -> None:
        super().__init__()
        if bytes_per_token not in (1, 2):
            raise ValueError(f"bytes_per_token must be 1 or 2, but got {bytes_per_token!r}.")
        self.save_hyperparameters(logger=False)  # the model logs these names too, and loggers refuse duplicates
        self.train: Windows | None = None
        self.val: Windows | None = None

    def setup(self, stage: str) -> None:
        """Reads the files, once per process."""
        if self.train is None:
            length = self.hparams["context_length"]
            self.train = Windows(self._tokens(_read(False, self.hparams["max_bytes"])), length)
            self.val = Windows(self._tokens(_read(True, self.hparams["max_val_bytes"])), length)

    def _tokens(self, text: Tensor) -> Tensor:
        return text if self.hparams["bytes_per_token"] == 1 else text[: len(text) // 2 * 2].view(torch.uint16)

    def train_dataloader(self) -> DataLoader[Tensor]:
        """Returns the loader of shuffled windows."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        """Returns the loader of windows in order."""
        return self._loader(self.val, shuffle=False)

    def _loader(self, windows: Windows | None, shuffle: bool) -> DataLoader[Tensor]:
        if windows is None:
            self.setup("fit")
            windows = self.train if shuffle else self.val
        assert windows is not None
        workers = self.hparams["num_workers"]
        return DataLoader(
            windows,
            batch_size=self.hparams["batch_size"],
            shuffle=shuffle,
            num_workers=workers,
            persistent_workers=workers > 0,
        )


def source_files(validation: bool) -> list[Path]:
    """Returns the files of one side of the split, in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _SKIPPED  # these folders have most of the files, and are not even listed
        kept += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    return [root / path for path in sorted(kept) if (zlib.crc32(path.as_posix().encode()) % 10 == 0) == validation]


def _read(validation: bool, max_bytes: int) -> Tensor:
    text = bytearray()
    for path in source_files(validation):
        if len(text) >= max_bytes:
            break
        text += path.read_bytes()
    if not text:
        raise FileNotFoundError(
            f"found no source of the standard library under {sysconfig.get_paths()['stdlib']}: this Python was"
            " installed without it; PythonSource needs the .py files."
        )
    return torch.frombuffer(text, dtype=torch.uint8)[:max_bytes]
