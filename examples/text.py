"""A byte-level GPT on the paragraphs of a folder of text, packed: nothing is padded, and no paragraph sees another.

python examples/text.py docs --strategy ddp --devices 2 --accelerator cpu
python examples/text.py ~/notes --pattern "*.txt" --max_steps 1000 --weights gpt.safetensors
"""

import argparse
import re
from pathlib import Path

from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.data import PackSequences
from polyphase.models import ByteGPT


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the text")
    parser.add_argument("--pattern", default="*.md", help="names of its files, in sub-folders too")
    parser.add_argument("--weights", type=Path, help="safetensors file to write the trained weights to")
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, hsdp:replicate=2, ...")
    parser.add_argument("--devices", default="auto", help="devices per node; torchrun and SLURM say so themselves")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--max_steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--size", default="tiny", help="tiny, 10M, 124M")
    parser.add_argument("--batch_size", type=int, default=32, help="paragraphs per device")
    return parser


def paragraphs(folder: Path, pattern: str, length: int) -> list[dict[str, list[int]]]:
    """The paragraphs of all files in the order of their paths, cut to `length` bytes, each with its end."""
    texts = [path.read_text(errors="replace") for path in sorted(folder.rglob(pattern))]
    texts_found = [
        f"{paragraph.strip()}\n".encode()
        for text in texts
        for paragraph in re.split(r"\n\s*\n", text)
        if paragraph.strip()
    ]
    if not texts_found:
        raise SystemExit(f"no text in files {pattern} of {folder}: give another folder, or --pattern")
    return [
        {"input_ids": list(paragraph[at : at + length])}
        for paragraph in texts_found
        for at in range(0, len(paragraph), length)
    ]


def main() -> None:
    flags = vars(arguments().parse_args())
    seed_everything(0)
    model = ByteGPT(size=flags.pop("size"))
    length, weights = model.net.context_length, flags.pop("weights")
    samples = paragraphs(flags.pop("folder"), flags.pop("pattern"), length)
    packed = {"batch_size": flags.pop("batch_size"), "collate_fn": PackSequences(length)}
    held_out = samples[::10]
    del samples[::10]
    train, val = DataLoader(samples, shuffle=True, **packed), DataLoader(held_out, **packed)
    engine = Engine(**flags, max_epochs=-1, log_every_n_steps=10)
    engine.fit(model, train, val)
    bits = engine.validate(model, val, verbose=False)[0]["val/bits_per_byte"]
    if weights is not None:
        engine.export(weights)
    if engine.is_global_zero:
        print(f"validation bits per byte {bits:.3f}")


if __name__ == "__main__":
    main()
