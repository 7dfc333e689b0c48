"""The same global batch on one process and on several: a table of how far the weights are from those of one process.

python examples/global_batch.py
python examples/global_batch.py --global_batch_size 48 --micro_batch_size 5 --devices 1 3
"""

import argparse

import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from polyphase.models import Digits, DigitsClassifier

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Classifier(DigitsClassifier):
    """Without the running statistics of BatchNorm, which each rank takes of its own samples."""

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        for module in self.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        return self


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp_fork", "fsdp_fork"], help="ddp_fork, fsdp_fork, ...")
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2, 3, 4], help="numbers of processes")
    parser.add_argument("--global_batch_size", type=int, default=32, help="samples of each optimizer step")
    parser.add_argument("--micro_batch_size", type=int, default=8, help="samples that a process takes at once, at most")
    parser.add_argument("--max_steps", type=int, default=30, help="optimizer steps")
    return parser


def main() -> None:
    options = vars(arguments().parse_args())
    strategies, devices = options.pop("strategies"), options.pop("devices")
    data = Digits()
    data.setup("fit")
    samples = TensorDataset(*(tensor[:401] for tensor in data.parts["train"].tensors))  # a prime number of them

    def train(strategy: str, num_processes: int) -> torch.Tensor:
        seed_everything(0, verbose=False)
        module = Classifier(width=8).train()
        engine = Engine(strategy=strategy, devices=num_processes, accelerator="cpu", **options, **QUIET)
        engine.fit(module, DataLoader(samples, batch_size=options["micro_batch_size"], shuffle=True))
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    expected = train("single", 1)
    rows = []
    for strategy in strategies:
        for num_processes in devices:
            difference = (train(strategy, num_processes) - expected).abs().max().item()
            rows.append(f"{strategy:10} {num_processes:9}   {difference:.1e}")
    print(f"\nafter {options['max_steps']} steps of {options['global_batch_size']} samples each")
    print("\n".join(["strategy   processes   largest difference of a weight from one process", *rows]))


if __name__ == "__main__":
    main()
