"""A run over data of a public library: ``python package_run.py KIND FOLDER RANKS EPOCHS [CHECKPOINT]``.

`data_libraries.py` starts it. Each rank writes the batches that it was trained on to a file in `FOLDER`; a checkpoint
is saved there after some of them. The data are in the folder above, where ``python package_run.py KIND FOLDER`` writes
them first.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported: it would ask the hub for news

import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine

SIZE, BATCH, STOP = 48, 3, 4


class Kind(NamedTuple):
    """Training data of a public library."""

    package: str
    """The name of the library's package."""
    write: Callable[[Path], None]
    """Writes the data into a folder."""
    make: Callable[[Path], Any]
    """Returns a loader of them."""
    launcher: str = "ddp"
    """``"ddp"``, ``"ddp_fork"`` or ``"torchrun"``."""
    is_made_first: bool = False
    """The script makes the loader before the run, and not in a hook."""


def write_parquet(folder: Path) -> None:
    """Writes eight files of six numbers each."""
    import pyarrow
    import pyarrow.parquet

    for shard in range(8):
        numbers = list(range(shard * 6, shard * 6 + 6))
        pyarrow.parquet.write_table(pyarrow.table({"id": numbers}), folder / f"{shard}.parquet")


def hugging_face(folder: Path, streaming: bool) -> Any:
    """Hugging Face's data set of the files that `write_parquet` has written."""
    import datasets

    files = sorted(map(str, folder.glob("*.parquet")))
    datasets.disable_progress_bars()
    data: Any = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=streaming, cache_dir=str(folder / "cache")
    )
    return data


def _buffered(folder: Path) -> Any:
    return DataLoader(hugging_face(folder, streaming=True).shuffle(seed=3, buffer_size=7), BATCH)


def write_tars(folder: Path) -> None:
    """Writes eight tar files of six numbers each."""
    import webdataset

    for shard in range(8):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for number in range(shard * 6, shard * 6 + 6):
                writer.write({"__key__": f"{number:03}", "id": str(number).encode()})


def webdataset_loader(folder: Path, shuffle: dict[str, Any] | None = None, **how: Any) -> DataLoader:
    """A loader of the numbers in the tar files of a folder; `shuffle` are the arguments of webdataset's."""
    import webdataset

    files = sorted(map(str, folder.glob("*.tar")))
    stream = webdataset.WebDataset(files, shardshuffle=False, **how).map(_id_of)
    return DataLoader(stream if shuffle is None else stream.shuffle(**shuffle), BATCH)


def _id_of(sample: Any) -> int:
    return int(sample["id"])


def _split_by_node(folder: Path) -> DataLoader:
    import webdataset

    return webdataset_loader(folder, nodesplitter=webdataset.split_by_node)


def _as_it_is(number: int) -> int:
    return number


def _write_litdata(folder: Path) -> None:
    import litdata

    litdata.optimize(_as_it_is, list(range(SIZE)), output_dir=str(folder / "lit"), chunk_size=6, num_workers=1)


def _litdata(folder: Path, loader: str) -> Any:
    import litdata

    data = litdata.StreamingDataset(str(folder / "lit"), shuffle=True, drop_last=False)
    return DataLoader(data, BATCH) if loader == "torch" else litdata.StreamingDataLoader(data, batch_size=BATCH)


def _write_mds(folder: Path) -> None:
    import streaming

    with streaming.MDSWriter(out=str(folder / "mds"), columns={"id": "int"}, size_limit=60) as writer:
        for number in range(SIZE):
            writer.write({"id": number})


def _mds(folder: Path, loader: str) -> Any:
    import streaming

    data = streaming.StreamingDataset(local=str(folder / "mds"), batch_size=BATCH, shuffle=True)
    return DataLoader(data, BATCH) if loader == "torch" else streaming.StreamingDataLoader(data, batch_size=BATCH)


def _mosaicml(loader: str = "own", **how: Any) -> Kind:
    return Kind("streaming", _write_mds, lambda folder: _mds(folder, loader), **how)


KINDS: dict[str, Kind] = {
    "`datasets` {version}, `load_dataset(..., streaming=True)`": Kind(
        "datasets", write_parquet, lambda folder: DataLoader(hugging_face(folder, streaming=True), BATCH)
    ),
    "the same, 2 workers": Kind(
        "datasets",
        write_parquet,
        lambda folder: DataLoader(hugging_face(folder, streaming=True), BATCH, num_workers=2),
    ),
    "the same, `shuffle(buffer_size=7)`": Kind("datasets", write_parquet, _buffered),
    "the same, not streaming, `shuffle=True`": Kind(
        "datasets",
        write_parquet,
        lambda folder: DataLoader(hugging_face(folder, streaming=False), BATCH, shuffle=True),
    ),
    "`webdataset` {version}, `nodesplitter=split_by_node`": Kind("webdataset", write_tars, _split_by_node),
    "the same without a `nodesplitter`": Kind("webdataset", write_tars, webdataset_loader),
    "`litdata` {version}, its `StreamingDataLoader`": Kind(
        "litdata", _write_litdata, lambda folder: _litdata(folder, "own")
    ),
    "the same in a `DataLoader`": Kind("litdata", _write_litdata, lambda folder: _litdata(folder, "torch")),
    "`mosaicml-streaming` {version}, its `StreamingDataLoader`, under torchrun": _mosaicml(launcher="torchrun"),
    "the same in a `DataLoader`, under torchrun": _mosaicml("torch", launcher="torchrun"),
    "the same under `ddp` without torchrun, made in `train_dataloader()`": _mosaicml(),
    "the same, made at the top of the script": _mosaicml(is_made_first=True),
    "the same under `ddp_fork`": _mosaicml(launcher="ddp_fork"),
}


class Notes(LightningModule):
    def __init__(self, folder: Path, make: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.folder, self.train_dataloader = folder, make
        self.seen: list[Any] = []
        """The engine takes back what a batch that counts for nothing adds to it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        numbers = batch["id"] if isinstance(batch, dict) else batch
        if not self.seen:
            self._write()  # for a run that fails later
        self.seen.append([self.current_epoch, batch_idx, numbers.flatten().tolist()])
        return self.weight * 1.0

    def _write(self) -> None:
        (self.folder / f"rank{self.global_rank}").write_text(json.dumps(self.seen))

    on_train_end = _write

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SavesOnce(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STOP:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def train(kind: Kind, folder: Path, ranks: int, epochs: int, checkpoint: str | None = None) -> None:
    """Begins a run, or goes on with one."""
    seed_everything(7 if checkpoint is None else 8, verbose=False)
    made = kind.make(folder.parent) if kind.is_made_first else None
    flags: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    if ranks > 1:
        flags |= {"strategy": kind.launcher.replace("torchrun", "ddp"), "devices": ranks}
    callbacks = [SavesOnce()] if checkpoint is None else []
    trainer = Engine(accelerator="cpu", max_epochs=epochs, callbacks=callbacks, default_root_dir=folder, **flags)
    module = Notes(folder, lambda: kind.make(folder.parent) if made is None else made)
    trainer.fit(module, ckpt_path=checkpoint)


def main(name: str, folder: str, ranks: str = "0", epochs: str = "0", *checkpoint: str) -> None:
    """Runs what the command line says."""
    kind = KINDS[name]
    if ranks == "0":
        kind.write(Path(folder))
    else:
        train(kind, Path(folder), int(ranks), int(epochs), *checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])
