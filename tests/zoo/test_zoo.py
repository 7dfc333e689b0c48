"""A sample of the zoo; all of it by ``make zoo``."""

import re
from collections import Counter

import pytest

from tests.distributed import ROOT
from tests.pairs import nightly

from . import methods, plain
from .__main__ import _read, _row
from .run import STRATEGIES, Cell, largest_difference, run

RESULTS = ROOT / "benchmarks" / "results" / "zoo-cpu.md"
MODELS = {**plain.MODELS, **methods.MODELS}
SAMPLE = [
    ("fsdp", "GAN", "equal", ""),
    *nightly(("tp", "auxiliary loss", "equal", "")),
    ("tp", "gradient penalty", "refused", "gradient of a gradient"),
    ("pp", "DiT", "equal", ""),
    ("pp", "auxiliary loss", "refused", "'auxiliary' of 'blocks.0'"),
    ("tp", "built late", "equal", ""),
    ("ddp", "mixture of experts", "equal", "find_unused_parameters=true"),
]


@pytest.mark.parametrize(("strategy", "name", "kind", "detail"), SAMPLE)
def test_equal_or_refused_by_name(strategy, name, kind, detail):
    found = run(MODELS[name], strategy)
    assert (found.kind, detail in found.detail) == (kind, True), found


def test_the_page_is_read_as_it_is_written():
    page = RESULTS.read_text()
    cells = _read(page)
    assert [key for key, cell in cells.items() if not cell.is_good] == []
    reasons = {reason: int(number) for number, reason in re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE)}
    for name in MODELS:
        row = _row({strategy: cells[f"{strategy}: {name}"] for strategy in STRATEGIES}, reasons)
        assert re.search(rf"^\| {re.escape(name)}( \(.*\))? \| {re.escape(' | '.join(row))} \|$", page, re.MULTILINE)


def test_the_counts_of_the_page_are_those_of_the_results():
    kinds = Counter((key.partition(":")[0], cell.kind) for key, cell in _read(RESULTS.read_text()).items())
    rows = re.findall(
        r"^\| (`.*?`) \| (\d+) \| (\d+) \| (\d+) \|", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE
    )
    counts = {name.strip("`"): tuple(map(int, row[1:])) for row in rows for name in row[0].split(", ")}
    assert counts == {name: tuple(kinds[name, kind] for kind in ("equal", "refused", "warned")) for name in STRATEGIES}


@pytest.mark.parametrize("name", ["batch norm", *nightly("spectral norm")])
def test_a_pipeline_of_one_stage_is_one_process(name):
    assert run(MODELS[name], "pp", devices=1) == Cell("equal", "0e+00")
    cut = run(MODELS[name], "pp:microbatches=2", devices=1)  # a warning, which these tests make an error
    assert "microbatches=1 with schedule=gpipe is as in one process" in cut.detail, cut


def test_what_is_wrong_is_seen():
    wrong = MODELS["DiT"]._replace(data=_drawn_anew)
    assert run(wrong, "ddp").kind == "different"
    crashes = MODELS["DiT"]._replace(data=lambda size: ())
    assert run(crashes, "ddp").kind == "failed"
    assert not Cell("hangs", "").is_good
    assert largest_difference({}, MODELS["DiT"].make().state_dict()) == float("inf")


_num_calls = [0]


def _drawn_anew(size: int):
    import torch

    _num_calls[0] += 1
    return torch.randn(size, 8) + _num_calls[0], torch.arange(size) % 4
