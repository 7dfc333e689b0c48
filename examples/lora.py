"""Fine-tunes a transformer on other text by LoRA: small matrices beside its frozen layers.

python examples/text.py docs --weights base.safetensors
python examples/lora.py base.safetensors README.md --strategy fsdp --devices 2 --accelerator cpu

Models of the package transformers: huggingface.py.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from polyphase import Engine
from polyphase.models import ByteGPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="safetensors file with the weights to begin with")
    parser.add_argument("text", type=Path, help="file to learn from")
    parser.add_argument("--finetune", default="lora:rank=8", help="lora:rank=16,alpha=32, ...")
    parser.add_argument("--adapters", type=Path, default=Path("adapters"), help="new folder to write them to, for peft")
    parser.add_argument("--merged", type=Path, help="safetensors file to write all weights to, adapters merged")
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, tp, ...")
    parser.add_argument("--devices", default="auto", help="devices per node")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--max_steps", type=int, default=100, help="optimizer steps")
    flags = vars(parser.parse_args())
    weights, text, adapters, merged = (flags.pop(name) for name in ("weights", "text", "adapters", "merged"))

    seed_everything(0)
    model = ByteGPT()
    model.load_state_dict(load_file(weights), strict=False)  # the tied output layer is in the file once
    length = model.net.context_length + 1
    tokens = torch.tensor([*text.read_bytes()])
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    engine = Engine(**flags, max_epochs=-1, log_every_n_steps=10)
    engine.fit(model, DataLoader(rows[2:], batch_size=4, shuffle=True), DataLoader(rows[:2], batch_size=1))
    engine.export(adapters, adapters="net")
    if merged:
        engine.export(merged)
    if engine.is_global_zero:
        size = (adapters / "adapter_model.safetensors").stat().st_size
        print(f"{adapters} has {size:,} bytes, {weights} {weights.stat().st_size:,}")


if __name__ == "__main__":
    main()
