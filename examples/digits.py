"""Handwritten digits in five lines, and every strategy by flag.

python examples/digits.py --strategy ddp --devices 2 --accelerator cpu
"""

import argparse
import sys

from lightning.pytorch import seed_everything

from polyphase import Engine, fit
from polyphase.models import Digits, DigitsClassifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, hsdp:replicate=2, ...")
    parser.add_argument("--devices", default="auto", help="devices per node")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed, ...")
    parser.add_argument("--compression", default="none", help="none, bf16, powersgd:4, topk:0.01, auto, ...")
    parser.add_argument("--accumulate_grad_batches", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--max_epochs", type=int, default=15)
    flags = vars(parser.parse_args())

    seed_everything(0)
    data = Digits()
    engine: Engine = fit(DigitsClassifier(), data, **flags, log_every_n_steps=10)
    results = engine.test(engine.lightning_module, datamodule=data, verbose=False)
    log_dir = engine.log_dir  # on every rank: rank 0 tells the others
    if engine.is_global_zero:
        print(f"test accuracy {results[0]['test/accuracy']:.4f}")
        print(f"curves: {sys.executable} -m tensorboard.main --logdir {log_dir}")


if __name__ == "__main__":
    main()
