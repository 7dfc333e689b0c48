"""What a run replaces in torch and Lightning, it puts back at its end."""

import json
import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from polyphase.engine import Engine
from tests.distributed import ROOT, run_command, run_ranks
from tests.engine.parity import QUIET, build, loader, sgd
from tests.engine.tiny import as_rank
from tests.pairs import nightly

from .libraries import contents, replaced, rules_added

SUBJECT = "gpt of four blocks, tied"
RANKS = {
    "cp": 2,
    "ddp": 2,
    "diloco": 2,
    "fsdp": 2,
    "fsdp+tp:tp=2": 4,
    "hsdp:replicate=2,shard=2": 4,
    "local_sgd": 2,
    "pp": 2,
    "pp+ddp:pipeline_size=2": 4,
    "pp+fsdp:pipeline_size=2": 4,
    "ps": 2,
    "single": 1,
    "tp": 2,
    "zero1": 2,
}
"""World size by flag; `test_registered.py` misses a strategy that is not here."""
IN_TEST = ("fsdp", "pp", "single", "tp")
LOSSES = [
    *("binary_cross_entropy", "binary_cross_entropy_backward", "binary_cross_entropy_with_logits"),
    *("huber_loss", "huber_loss_backward", "mse_loss", "mse_loss_backward"),
    *("smooth_l1_loss", "smooth_l1_loss_backward", "soft_margin_loss", "soft_margin_loss_backward"),
]
LAYERS = [
    *("_linear_cross_entropy_batch_chunked", "_prelu_kernel_backward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    *("avg_pool2d_backward", "hardshrink_backward", "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward"),
    *("put", "softshrink_backward"),
]
"""For these torch has no rule. Split weights, which a module keeps after the run, need one."""


def _rules(operators: list[str]) -> list[list[str]]:
    homes = {"_linear_cross_entropy_batch_chunked": "torch_nn"}
    return sorted(["rules", f"{homes.get(name, 'aten')}.{name}.default"] for name in operators)


def compared(rank: int, flag: str, num_ranks: int, path: Path) -> None:
    as_rank(rank)
    stock = {**QUIET, "accelerator": "cpu", "devices": 1, "max_steps": 1}
    Trainer(**stock).fit(build(SUBJECT, sgd), loader(SUBJECT, 8))  # sets what torch and Lightning set at first use
    before = contents()
    Engine(**{**stock, "devices": num_ranks, "max_steps": 2}, strategy=flag).fit(
        build(SUBJECT, sgd), loader(SUBJECT, 8)
    )
    after = contents()
    functions = [key for key in replaced(before, after) if callable(before[key])]
    path.with_suffix(f".{rank}").write_text(json.dumps([functions, rules_added(before, after)]))


@pytest.mark.parametrize("flag", [*IN_TEST, *nightly(*(flag for flag in RANKS if flag not in IN_TEST))])
def test_a_run_leaves_torch_and_lightning_as_they_were(flag, tmp_path):
    num_ranks = RANKS[flag]
    run_ranks(compared, num_ranks, flag, num_ranks, tmp_path / "found", start_method="fork")
    added = (LOSSES if re.search("fsdp|hsdp|tp|cp", flag) else []) + (LAYERS if re.search("tp|cp", flag) else [])
    for rank in range(num_ranks):
        assert json.loads((tmp_path / f"found.{rank}").read_text()) == [[], _rules(added)]


def test_what_stays_changed_is_in_the_docs():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    table = page.partition("## The rest of the process")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    ended = run_command([sys.executable, "-m", "tests.engine.compat.process_wide"], cwd=ROOT, cold=True)
    assert ended.returncode == 0, ended.output
    replaced_names = re.findall(r"^replaced: (.*)$", ended.output, re.MULTILINE)
    assert replaced_names == re.findall("`(.*)`", cells[0])
    assert "rules: []" in ended.output
    for row, names in ((1, LAYERS), (2, LOSSES)):
        assert {*re.findall("`(.*?)`", cells[row])} == {name.removesuffix("_backward") for name in names}
