"""Trains a causal language model of transformers on a folder of text, all of it or by LoRA, under any strategy.

python examples/huggingface.py llama docs --strategy fsdp --devices 2 --accelerator cpu --weights llama.safetensors
python examples/huggingface.py llama docs --strategy tp --devices 2 --accelerator cpu --finetune lora:8 --adapters tuned

`llama` is a folder with a config.json; of weights in it each rank reads its part. Without a tokenizer in it, tokens are
bytes. Nothing is downloaded. It needs `pip install ".[zoo]"`.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from polyphase.engine import Engine, read_weights


class CausalLM(LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        config = AutoConfig.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        has_weights, build = any(folder.glob("*.safetensors")), lambda: AutoModelForCausalLM.from_config(config)
        self.model = read_weights(folder, build) if has_weights else build()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.log("train/loss", loss := self.model(input_ids=batch[0], labels=batch[0]).loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=self.on_gpu or None)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("text", type=Path, help="folder of the text, with sub-folders")
    parser.add_argument("--pattern", default="*.md", help="names of its files")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--finetune", default="none", help="lora:8, ...; left out: all weights are trained")
    parser.add_argument("--adapters", type=Path, help="folder to write the adapters to, for peft")
    parser.add_argument("--weights", type=Path, help="safetensors file to write the trained weights to")
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, tp, pp, ...")
    parser.add_argument("--devices", default="auto", help="devices per node; torchrun and SLURM say so themselves")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--max_steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8, help="samples per device")
    return parser


def samples(model: Path, folder: Path, pattern: str, length: int) -> TensorDataset:
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.rglob(pattern)))
    has_tokenizer = any(model.glob("tokenizer*"))
    tokens = AutoTokenizer.from_pretrained(model)(text)["input_ids"] if has_tokenizer else list(text.encode())
    if len(tokens) < length:
        raise SystemExit(f"{len(tokens)} tokens in files {pattern} of {folder}: give another folder, or --pattern")
    return TensorDataset(torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length))


def main() -> None:
    flags = vars(arguments().parse_args())
    seed_everything(0)
    folder, adapters, weights = (flags.pop(name) for name in ("model", "adapters", "weights"))
    data = samples(folder, flags.pop("text"), flags.pop("pattern"), flags.pop("length"))
    loader = DataLoader(data, flags.pop("batch_size"), shuffle=True)
    engine = Engine(**flags, max_epochs=-1, log_every_n_steps=10)
    engine.fit(CausalLM(folder), loader)
    if adapters:
        engine.export(adapters, adapters="model")
    if weights:
        engine.export(weights)


if __name__ == "__main__":
    main()
