"""Models of transformers that were trained, exported in Hugging Face's layout and read back by `from_pretrained`.

Under each strategy, on two processes of one CPU: the weights and the logits must be the trained ones, bit by bit, and
the process that writes must not have the model a second time. ``python -m tests.zoo.exported`` prints the table of
`benchmarks/results/huggingface-cpu.md`; needs transformers.
"""

import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.checkpoint.export import export
from tests.distributed import run_command
from tests.memory import Peak

WAYS = [("single", 1), *((name, 2) for name in ("ddp", "zero1", "fsdp", "tp", "pp", "local_sgd", "ps"))]
WAYS += [("fsdp+tp:tp=2", 4), ("hsdp:replicate=2", 4), ("pp+fsdp:pipeline_size=2", 4)]


def gpt2(width: int) -> hf.PreTrainedModel:
    """A GPT-2 with a hundred tokens; its output layer has the weights of its embedding."""
    sizes = {"n_embd": width, "n_layer": 4, "n_head": 2, "vocab_size": 100, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0))


class Module(LightningModule):
    """The module of a user."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = gpt2(width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, strategy: str, devices: int, width: int) -> None:
    """Trains two steps, exports, and notes what that took, from the process that writes."""
    seed_everything(0)
    module = Module(width)
    engine = Engine(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_steps=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randint(0, 100, (16, 12), generator=torch.Generator().manual_seed(1))
    engine.fit(module, DataLoader(data, batch_size=2))
    begun = time.monotonic()
    with Peak() as peak:
        engine.export(folder / "exported", huggingface="model")
    seconds = time.monotonic() - begun
    engine.save_checkpoint(folder / "snapshot", weights_only=True)
    if engine.is_global_zero:
        (folder / "peak").write_text(f"{peak.bytes} {seconds}")


def differences(folder: Path) -> float:
    """The largest difference of a trained weight, and of a logit, from those of `from_pretrained`."""
    model, about = hf.AutoModelForCausalLM.from_pretrained(folder / "exported", output_loading_info=True)
    assert type(model) is hf.GPT2LMHeadModel
    assert not about["missing_keys"], about
    assert not about["unexpected_keys"], about
    export(str(folder / "snapshot"), str(folder / "weights.pt"))
    trained = torch.load(folder / "weights.pt")
    state = model.state_dict()
    expected = Module(model.config.n_embd)
    expected.load_state_dict(trained)
    assert {f"model.{name}" for name in state} == trained.keys()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        logits = (model.eval()(tokens).logits - expected.model.eval()(tokens).logits).abs().max().item()
    return max(logits, *((value - trained[f"model.{name}"]).abs().max().item() for name, value in state.items()))


def round_trip(folder: Path, strategy: str, devices: int, width: int) -> tuple[float, float, float]:
    """The largest difference, the peak in bytes, and seconds; of a run in processes of its own."""
    words = [sys.executable, "-m", "tests.zoo.exported", str(folder), strategy, str(devices), str(width)]
    finished = run_command(words, cold=True, timeout_s=170)
    assert finished.returncode == 0, finished.output
    peak, seconds = map(float, (folder / "peak").read_text().split())
    return differences(folder), peak, seconds


@pytest.mark.parametrize(("strategy", "devices"), WAYS)
def test_from_pretrained_reads_what_was_trained(strategy, devices, tmp_path):
    difference, _, _ = round_trip(tmp_path, strategy, devices, 32)
    assert difference == 0.0


def main() -> None:
    """The round trip under every strategy, with a model of some 200 MB."""
    print("| strategy | ranks | largest difference | peak, MB | s |\n| --- | --- | --- | --- | --- |")
    for strategy, devices in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            difference, peak, seconds = round_trip(Path(folder), strategy, devices, 1024)
        print(f"| {strategy} | {devices} | {difference:g} | {peak / 1e6:.1f} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) if sys.argv[1:] else main()
