"""Trains a causal language model of Hugging Face's on a folder of text, all of it or by LoRA, under any strategy.

python examples/huggingface.py llama docs --strategy fsdp --devices 2 --accelerator cpu --weights llama.safetensors
python examples/huggingface.py llama docs --strategy tp --devices 2 --accelerator cpu --lora 8

`llama` is a folder with a config.json, as `save_pretrained` writes it; weights and a tokenizer are taken from there if
it has some. Nothing is downloaded. Without a tokenizer the tokens are bytes. It needs transformers, and peft for LoRA:
`pip install ".[zoo]"`.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from polyphase.engine import Engine


class CausalLM(LightningModule):
    """A model of transformers, with the loss that it computes.

    Args:
        folder: of its configuration.
        lora: rank of the matrices that are trained in place of the weights; None: train the weights.
        lr: of AdamW.
    """

    def __init__(self, folder: Path, lora: int | None = None, lr: float = 3e-4) -> None:
        super().__init__()
        self.lr = lr
        has_weights = any(folder.glob("*.safetensors"))
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        self.model = (
            AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
            if has_weights
            else AutoModelForCausalLM.from_config(config)
        )
        if lora is not None:
            from peft import LoraConfig, TaskType, get_peft_model

            self.model = get_peft_model(self.model, LoraConfig(task_type=TaskType.CAUSAL_LM, r=lora))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), prog_bar=True, sync_dist=True, batch_size=len(batch[0]))

    def _loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("text", type=Path, help="folder of the text")
    parser.add_argument("--pattern", default="*.md", help="names of its files, in sub-folders too")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sample")
    parser.add_argument("--lora", type=int, help="rank of LoRA's matrices; left out: all weights are trained")
    parser.add_argument("--lr", type=float, default=3e-4, help="of AdamW")
    parser.add_argument("--weights", type=Path, help="safetensors file to write the trained weights to")
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, tp, pp, ...")
    parser.add_argument("--devices", default="auto", help="devices per node; torchrun and SLURM say so themselves")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--precision", default="32-true", help="bf16-mixed, ...")
    parser.add_argument("--max_steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--batch_size", type=int, default=8, help="samples per device")
    return parser


def windows(model: Path, text: Path, pattern: str, length: int) -> Tensor:
    """The text as tokens, [samples, length]; what fills no sample at the end is left out."""
    parts = [path.read_text(errors="replace") for path in sorted(text.rglob(pattern))]
    if any(model.glob("tokenizer*")):
        tokens = AutoTokenizer.from_pretrained(model, local_files_only=True)("\n".join(parts))["input_ids"]
    else:
        tokens = list("\n".join(parts).encode())
    if len(tokens) < 10 * length:
        raise SystemExit(f"{len(tokens)} tokens in files {pattern} of {text}: give a folder with {10 * length} or more")
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def main() -> None:
    flags: dict[str, Any] = vars(arguments().parse_args())
    seed_everything(0)
    folder, weights, batch_size = flags.pop("model"), flags.pop("weights"), flags.pop("batch_size")
    samples = windows(folder, flags.pop("text"), flags.pop("pattern"), flags.pop("length"))
    model = CausalLM(folder, lora=flags.pop("lora"), lr=flags.pop("lr"))
    is_held_out = torch.arange(len(samples)) % 10 == 0
    train = DataLoader(TensorDataset(samples[~is_held_out]), batch_size, shuffle=True)
    val = DataLoader(TensorDataset(samples[is_held_out]), batch_size)
    engine = Engine(**flags, max_epochs=-1, log_every_n_steps=10)
    engine.fit(model, train, val)
    loss = engine.validate(model, val, verbose=False)[0]["val/loss"]
    if weights is not None:
        engine.export(weights)
    if engine.is_global_zero:
        print(f"validation loss {loss:.3f}")


if __name__ == "__main__":
    main()
