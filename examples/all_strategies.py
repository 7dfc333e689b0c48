"""One module under every strategy: where its weights end up, and what each process holds of it.

python examples/all_strategies.py
python examples/all_strategies.py --strategies ddp fsdp pp:schedule=gpipe --max_steps 5
"""

import argparse
import json
import logging
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.nn import functional
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.loop.out_of_memory import model_state_bytes
from polyphase.models import ByteGPT, PythonSource

SAME = {"single": 1, "ddp": 2, "zero1": 2, "fsdp": 2, "hsdp:replicate=2": 4, "tp": 2, "fsdp+tp:tp=2": 4, "pp": 2}
SAME |= {"pp:schedule=gpipe": 2, "pp+ddp:pipeline_size=2": 4, "pp+fsdp:pipeline_size=2": 4, "ps:staleness=0": 2}
STRATEGIES = SAME | {"ps:staleness=4": 2, "local_sgd:sync_every=4": 2, "diloco:sync_every=4,outer_momentum=0.5": 2}
"""Numbers of processes by flag; those in `SAME` are to end with the same weights."""
QUIET = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)


class Model(ByteGPT):
    """With an optimizer that keeps rounding noise small: by Adam's usual eps, noise alone takes full steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, fused=self.on_gpu or None)


class Held(Callback):
    """Each process writes down what it holds after a step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        held = model_state_bytes(trainer)
        (self.folder / str(trainer.global_rank)).write_text(json.dumps(sum(held.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="FLAG")
    parser.add_argument("--max_steps", type=int, default=20, help="optimizer steps")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # each run has much to say
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    data = PythonSource(context_length=32, max_bytes=1 << 20)
    data.setup("fit")
    sample = torch.stack([data.val[i] for i in range(64)])
    expected = torch.empty(0)
    print(f"{'strategy':33} processes     loss   largest difference   MB per process")
    for flag in dict.fromkeys(["single", *options.strategies]):
        seed_everything(0, verbose=False)
        module, devices = Model(context_length=32).train(), STRATEGIES[flag]
        name, colon, rest = flag.partition(":")
        strategy = flag if devices == 1 else f"{name}_fork{colon}{rest}"
        batches = DataLoader(data.train, batch_size=8)
        with tempfile.TemporaryDirectory() as folder:
            flags = {"global_batch_size": 8, "max_steps": options.max_steps, "callbacks": [Held(folder)], **QUIET}
            engine = Engine(strategy=strategy, devices=devices, accelerator="cpu", **flags)
            engine.fit(module, batches)
            held_mb = max(json.loads(path.read_text()) for path in Path(folder).iterdir()) / 1e6
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        expected = weights if flag == "single" else expected
        difference = (weights - expected).abs().max()
        loss = functional.cross_entropy(module(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        print(f"{flag:33} {devices:9} {loss:8.4f} {difference:20.1e} {held_mb:16.1f}")


if __name__ == "__main__":
    main()
