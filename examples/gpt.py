"""A byte-level GPT on the source of the Python standard library; under torchrun and SLURM without a change.

python examples/gpt.py --strategy fsdp --devices 2 --accelerator cpu
torchrun --nproc_per_node=2 examples/gpt.py --strategy fsdp
"""

import argparse

from lightning.pytorch import seed_everything

from polyphase.callbacks import MemoryMonitor, ThroughputMonitor
from polyphase.engine import Engine
from polyphase.models import ByteGPT, PythonSource


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, hsdp:replicate=2, ...")
    parser.add_argument("--devices", default="auto", help="devices per node; torchrun and SLURM say so themselves")
    parser.add_argument("--num_nodes", type=int, default=1, help="likewise")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--precision", default="32-true", help="on GPUs bf16-mixed, or 16-mixed, ...")
    parser.add_argument("--compression", default="none", help="none, bf16, powersgd:4, topk:0.01, auto, ...")
    parser.add_argument("--max_steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--resume", default=None, help="auto: go on from the newest snapshot")
    parser.add_argument("--default_root_dir", default=None, help="folder of logs and snapshots")
    parser.add_argument("--size", default="tiny", help="tiny, 10M, 124M")
    parser.add_argument("--batch_size", type=int, default=16, help="windows per device")
    return parser


def main() -> None:
    flags = vars(arguments().parse_args())
    seed_everything(0)
    model = ByteGPT(size=flags.pop("size"))
    data = PythonSource(batch_size=flags.pop("batch_size"), context_length=model.net.context_length)
    throughput = ThroughputMonitor(every_n_steps=10)
    engine = Engine(**flags, callbacks=[throughput, MemoryMonitor()], log_every_n_steps=10)
    engine.fit(model, datamodule=data)
    bits = engine.validate(model, datamodule=data, verbose=False)[0]["val/bits_per_byte"]
    if engine.is_global_zero:
        print(f"validation bits per byte {bits:.3f}")
        for name, value in throughput.last.items():
            print(f"{name} {value:.4g}")


if __name__ == "__main__":
    main()
