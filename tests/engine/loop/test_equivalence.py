"""Whatever hooks are overridden and whatever they log: the engine's run is the stock trainer's, event by event.

`POLYPHASE_EXAMPLES=5000 pytest tests/engine/loop/test_equivalence.py` tries that many new plans.
"""

import logging
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from lightning.pytorch import Trainer

from polyphase.engine import Engine

from .plans import Entry, Hook, Plan, plans
from .replay import Trace, replay

NUM_EXAMPLES = os.environ.get("POLYPHASE_EXAMPLES")
"""None: the same 150 plans each time."""


def differences(stock: Trace, engine: Trace) -> str:
    """Where the two part, readably; empty if nowhere."""
    lines: list[str] = []
    for i in range(max(len(stock.events), len(engine.events))):
        of_stock, of_engine = (events[i] if i < len(events) else None for events in (stock.events, engine.events))
        if of_stock != of_engine:
            before = [f"         {event}" for event in stock.events[max(0, i - 8) : i]]
            lines += [f"event {i}, after", *before, f"  stock  {of_stock}", f"  engine {of_engine}"]
            break
    return "\n".join([*lines, *_leaves("end", stock.end, engine.end)])


def _leaves(path: str, stock: Any, engine: Any) -> list[str]:
    """A line for each item of nested dicts that differs."""
    if isinstance(stock, dict) and isinstance(engine, dict):
        keys = dict.fromkeys([*stock, *engine])
        return [line for key in keys for line in _leaves(f"{path} > {key}", stock.get(key), engine.get(key))]
    return [] if stock == engine else [path, f"  stock  {stock}", f"  engine {engine}"]


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.ERROR)  # thousands of runs say where they stopped
    yield
    logging.disable(logging.NOTSET)


@settings(
    max_examples=int(NUM_EXAMPLES or 150),
    derandomize=NUM_EXAMPLES is None,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(plan=plans())
@pytest.mark.timeout(0 if NUM_EXAMPLES else 180)
def test_a_run_is_the_stock_trainers(plan):
    found = differences(replay(Trainer, plan), replay(Engine, plan))
    assert not found, found
