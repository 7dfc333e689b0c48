"""Each registered strategy stands in each table of the tests and of the documentation, or is compared elsewhere."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from docs.site import reference
from docs.site.strategies import PICTURES
from polyphase.engine.flags import parse_flag, split_launcher
from polyphase.engine.strategies import STRATEGIES, register_strategy
from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.options import DDPOptions
from tests.zoo.run import STRATEGIES as OF_ZOO

from . import test_parity_integration, test_portability_integration
from .compat import test_patches_integration

ROOT = Path(__file__).parents[2]


def names(flags: Iterable[str]) -> set[str]:
    """The strategies of flags."""
    return {split_launcher(parse_flag(flag, "strategy").name)[0] for flag in flags}


def headed(text: str) -> set[str]:
    """The strategies that a line of a table or a heading begins with."""
    return names(re.findall(r"^(?:\| |### )`([a-z0-9_+]+)", text, re.MULTILINE))


class Table(NamedTuple):
    """Strategies that are compared or described side by side."""

    listed: Callable[[], set[str]]
    elsewhere: Mapping[str, str] = MappingProxyType({})
    """The file that has in its place what is left out here."""


_PS = "tests/engine/strategies/ps/test_strategy_integration.py"
_LOCAL = "tests/engine/strategies/test_local_sgd_checkpoints_integration.py"
_PARITY = "tests/engine/test_parity_integration.py"
_PP = "tests/engine/strategies/pipeline/test_strategy_integration.py"
TABLES = {
    "parity": Table(
        lambda: names(test_parity_integration.FLAGS),
        {
            "dp": "tests/engine/strategies/test_dp.py",  # one process with several GPUs
            "diloco": "tests/engine/strategies/test_local_sgd_integration.py",  # another algorithm than ddp's
        },
    ),
    "portability": Table(
        lambda: names(flag for flag, _ in test_portability_integration.ALL_LAYOUTS.values()),
        {
            "dp": "tests/engine/strategies/test_dp.py",  # saves as single
            **dict.fromkeys(["ddp+cp", "hsdp+cp"], _PARITY),  # as cp and their other part
            "pp+ddp": _PP,  # stages are saved as those of pp
            "hsdp+tp": _PARITY,  # 8 processes; shards and parts as fsdp+tp and hsdp
            "local_sgd": _LOCAL,
            "diloco": _LOCAL,
            "ps": _PS,
        },
    ),
    "patches": Table(
        lambda: names(test_patches_integration.RANKS),
        {
            "dp": "tests/engine/strategies/test_dp.py",  # one process with several GPUs
            "hsdp+tp": _PARITY,  # 8 processes; the code of fsdp+tp and hsdp
            **dict.fromkeys(["ddp+cp", "fsdp+cp", "hsdp+cp"], _PARITY),
        },
    ),
    # Its columns are one strategy of each way to treat a module; the others are combinations of these.
    "zoo": Table(
        lambda: names(OF_ZOO),
        {
            **dict.fromkeys(["single", "hsdp", "fsdp+tp", "hsdp+tp", "pp+ddp", "pp+fsdp", "local_sgd", "ps"], _PARITY),
            **dict.fromkeys(["ddp+cp", "fsdp+cp", "hsdp+cp"], _PARITY),
            "dp": "tests/engine/strategies/test_dp.py",
            "diloco": "tests/engine/strategies/test_local_sgd_integration.py",
        },
    ),
    "docs/strategies.md": Table(lambda: headed((ROOT / "docs" / "strategies.md").read_text())),
    "pictures": Table(
        lambda: names(picture.flag for picture in PICTURES.values()),
        # Drawn as the strategies that they consist of.
        dict.fromkeys(
            ["dp", "hsdp+tp", "cp", "ddp+cp", "fsdp+cp", "hsdp+cp", "pp+fsdp", "diloco"], "docs/strategies.md"
        ),
    ),
}


def missing() -> dict[str, set[str]]:
    """The registered strategies that a table lacks, by table."""
    found = {name: set(STRATEGIES) - table.listed() - set(table.elsewhere) for name, table in TABLES.items()}
    return {name: lacking for name, lacking in found.items() if lacking}


def test_each_strategy_stands_in_each_table():
    assert missing() == {}


@pytest.mark.parametrize("name", TABLES)
def test_what_is_left_out_is_elsewhere(name):
    table = TABLES[name]
    assert not set(table.elsewhere) - set(STRATEGIES), "no longer registered"
    assert not set(table.elsewhere) & table.listed(), "no longer left out"
    for strategy, file in table.elsewhere.items():
        text = (ROOT / file).read_text()
        assert re.search(rf"(?<![\w+]){re.escape(strategy)}(?![a-z+])", text), (strategy, file)


@pytest.fixture
def newcomer():
    register_strategy("newcomer", DDP, options=DDPOptions, description="not in any table")
    yield "newcomer"
    del STRATEGIES["newcomer"]


def test_a_new_strategy_is_missed_in_each_table_that_is_written_by_hand(newcomer):
    assert missing() == {table: {newcomer} for table in TABLES}


def test_a_new_strategy_is_in_the_pages_that_are_made_from_the_registry(newcomer):
    (page,) = (text for name, text in reference.pages().items() if name == "options.md")
    assert newcomer in headed(page)
    assert set(STRATEGIES) - headed(page) == {"single", "dp"}, "those without options"
