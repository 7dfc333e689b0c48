"""`polyphase strategies`: a line each, and everything about one."""

import dataclasses
import re
from typing import Literal

import pytest

from polyphase.engine.cli.strategies import main
from polyphase.engine.compression.registry import ROWS
from polyphase.engine.config import field_docs
from polyphase.engine.finetune_options import FINETUNES, LoRAOptions
from polyphase.engine.flags import LAUNCHERS
from polyphase.engine.precision import PRECISIONS
from polyphase.engine.strategies import STRATEGIES, register_strategy
from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.options import NoOptions


def shown(capsys, *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_each_has_one_line(capsys):
    lines = shown(capsys).splitlines()
    assert max(map(len, lines)) <= 100
    assert not [line for line in lines if line.endswith("...")]
    for name in (*STRATEGIES, *PRECISIONS, *ROWS, *FINETUNES):
        assert any(re.match(rf"  {re.escape(name)} +\S", line) for line in lines), name
    assert len(lines) < 60


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_one_strategy_is_told_in_full(name, capsys):
    text, row = shown(capsys, name), STRATEGIES[name]
    assert max(map(len, text.splitlines())) <= 100
    flat = " ".join(text.split())
    for part in (row.description, row.choose_when, row.traffic, *row.compressions, *row.precisions):
        assert part
        assert part in flat
    for field in dataclasses.fields(row.options):
        assert f"{field.name}=" in text
        assert field_docs(row.options)[field.name].split(",")[0] in flat
    for suffix in filter(None, LAUNCHERS):
        assert (f"{name}_{suffix}" in text) == (row.make is not None)
    assert f"--strategy {name}" in text.splitlines()[-1]


@pytest.mark.parametrize("name", list(ROWS))
def test_one_compression_is_told_in_full(name, capsys):
    text = " ".join(shown(capsys, name).split())
    assert ROWS[name].description in text
    for field in dataclasses.fields(ROWS[name].options):
        assert f"{field.name}=" in text
        assert field_docs(ROWS[name].options)[field.name] in text


def test_fine_tuning_is_told_in_full(capsys):
    text = " ".join(shown(capsys, "lora").split())
    assert FINETUNES["lora"] in text
    for field in dataclasses.fields(LoRAOptions):
        assert f"{field.name}=" in text
        assert field_docs(LoRAOptions)[field.name] in text


def test_one_precision_is_told_in_full(capsys):
    text = shown(capsys, "16")
    assert "--precision 16-mixed" in text
    assert re.search(r"^strategies: +all$", text, re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(NoOptions):
    mode: Literal["fast", "exact"] = "fast"
    """How
    it is done."""
    size: int | None = None


def test_what_is_registered_is_there(capsys, monkeypatch):
    monkeypatch.setattr("polyphase.engine.cli.strategies.STRATEGIES", STRATEGIES)
    register_strategy("ours", DDP, options=Options, description="a strategy of ours", choose_when="it is raining")
    try:
        assert "  ours         a strategy of ours\n" in shown(capsys)
        text = shown(capsys, "ours")
    finally:
        del STRATEGIES["ours"]
    assert "it is raining" in text
    assert "not stated" in text
    assert re.search(r"mode=fast +How it is done. \(fast \| exact\)", text)
    assert re.search(r"size=derived +\(whole number\)", text)
