"""Fine-tunes a transformer on other text by LoRA: small matrices beside its frozen layers, in plain torch.

python examples/text.py docs --weights base.safetensors
python examples/lora.py base.safetensors README.md --strategy fsdp --devices 2 --accelerator cpu

Models of the package transformers, by peft: huggingface.py.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase import Engine
from polyphase.models import ByteGPT


class LoRA(nn.Module):
    """A frozen linear layer, plus the product of two small matrices, which is zero at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.lora_down = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.lora_up(self.lora_down(x))


def add_adapters(model: ByteGPT, rank: int) -> None:
    """Freezes the model, and puts an adapter at each linear layer of its blocks."""
    model.requires_grad_(False)
    parts = [part for block in model.net.blocks for part in block.modules()]
    for part in parts:
        for name, layer in [*part.named_children()]:
            if isinstance(layer, nn.Linear):
                setattr(part, name, LoRA(layer, rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="safetensors file with the weights to begin with")
    parser.add_argument("text", type=Path, help="file to learn from")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--adapters", type=Path, default=Path("adapters.safetensors"), help="file to write them to")
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, tp, ...")
    parser.add_argument("--devices", default="auto", help="devices per node")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--max_steps", type=int, default=100, help="optimizer steps")
    flags = vars(parser.parse_args())
    weights, text, rank, adapters = (flags.pop(name) for name in ("weights", "text", "rank", "adapters"))

    seed_everything(0)
    model = ByteGPT()
    model.load_state_dict(load_file(weights), strict=False)  # the tied output layer is in the file once
    add_adapters(model, rank)
    length = model.net.context_length + 1
    tokens = torch.tensor([*text.read_bytes()])
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    engine = Engine(**flags, max_epochs=-1, log_every_n_steps=10)
    engine.fit(model, DataLoader(rows[2:], batch_size=4, shuffle=True), DataLoader(rows[:2], batch_size=1))
    engine.export(adapters, overwrite=True)  # all weights, of which the adapters are kept
    if engine.is_global_zero:
        kept = {name: tensor for name, tensor in load_file(adapters).items() if ".lora_" in name}
        save_file(kept, adapters)
        print(f"{adapters} has {len(kept)} matrices, {adapters.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
