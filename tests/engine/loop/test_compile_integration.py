"""Compiled steps under DDP and FSDP: the same weights, and each graph compiled by one process only."""

import json
import sys

import pytest
import torch

from tests.distributed import run_command

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader
from polyphase.engine import Engine
from polyphase.models import ByteGPT

class Compiled(Callback):
    def on_train_end(self, trainer, module):
        counters = torch._dynamo.utils.counters
        counts = {"graphs": counters["stats"]["unique_graphs"], "misses": counters["inductor"]["fxgraph_cache_miss"]}
        Path(f"rank{trainer.global_rank}.json").write_text(json.dumps(counts))

if __name__ == "__main__":
    seed_everything(0)
    states = {}
    for compile in (False, True):
        module = ByteGPT("tiny", num_layers=2)
        torch.manual_seed(0)
        for p in module.parameters():
            torch.nn.init.normal_(p, std=0.02)
        engine = Engine(
            strategy=sys.argv[1], devices=2, accelerator="cpu", compile=compile, max_steps=4, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[Compiled()] if compile else [], activation_checkpointing=sys.argv[2] if compile else "none",
        )
        tokens = torch.randint(0, 255, (32, 33), generator=torch.Generator().manual_seed(1))
        engine.fit(module, DataLoader(tokens, batch_size=4))
        states[compile] = module.state_dict()
    torch.save(states, "states.pt")
"""


@pytest.mark.nightly  # a minute each; `make test` compiles under ddp beside compression, and in one process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("activation_checkpointing", ["none", "full"])
@pytest.mark.parametrize("strategy", ["ddp_spawn", "fsdp_spawn"])
def test_one_process_compiles_and_all_compute_the_same(strategy, activation_checkpointing, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    finished = run_command([sys.executable, script, strategy, activation_checkpointing], timeout_s=280, cwd=tmp_path)
    assert finished.returncode == 0, finished.output
    states = torch.load(tmp_path / "states.pt", weights_only=True)
    torch.testing.assert_close(states[True], states[False], rtol=0, atol=1e-5)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["graphs"] == second["graphs"] > 0
    assert first["misses"] > 0
    assert second["misses"] == 0
    assert "split by" not in finished.output, finished.output
