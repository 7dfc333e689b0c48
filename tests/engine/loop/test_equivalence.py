"""Whatever hooks are overridden and whatever they log: the engine's run is the stock trainer's, event by event.

`POLYPHASE_EXAMPLES=5000 pytest tests/engine/loop/test_equivalence.py` tries that many new plans.
"""

import logging
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from lightning.pytorch import Trainer

from polyphase.engine import Engine
from tests.pairs import nightly

from .plans import REDUCTIONS, Entry, Hook, Plan, plans
from .replay import Trace, replay

NUM_EXAMPLES = os.environ.get("POLYPHASE_EXAMPLES")
"""None: the same plans each time."""


CORNERS = {
    # Each once differed. They run first, and by name.
    "logged in a batch that raised": Plan(
        module=(Hook(name="on_train_batch_start", entries=(Entry(),), does="raise"),),
    ),
    "logged in a batch that raised, over a batch that ended": Plan(
        module=(Hook(name="on_before_zero_grad", entries=(Entry(on_epoch=True, prog_bar=True),), does="raise", at=1),),
    ),
    "logged in a batch that was cancelled": Plan(
        module=(Hook(name="on_train_batch_start", entries=(Entry(),)),),
        cancel_at=0,
    ),
    "logged in a batch that was cancelled, over a batch that ended": Plan(
        module=(Hook(name="on_train_batch_start", entries=(Entry(prog_bar=True),)),),
        cancel_at=1,
    ),
    "one name in a training step and in a validation step": Plan(
        module=(
            Hook(name="training_step", entries=(Entry(prog_bar=True),)),
            Hook(name="validation_step", entries=(Entry(prog_bar=True),)),
        ),
        val_batches=(1,),
    ),
    "one name in a training step and in a validation step in mid-epoch": Plan(
        module=(
            Hook(name="training_step", entries=(Entry(first=1, prog_bar=True, on_step=True),)),
            Hook(name="validation_step", entries=(Entry(prog_bar=True, on_step=True, on_epoch=False),)),
        ),
        windows=3,
        val_batches=(2, 1),
        val_check_interval=1,
    ),
    "a logger that reads what was logged": Plan(val_batches=(1, 1), logger="reads", then="test"),
    "a value that overflows in the logger": Plan(
        module=(Hook(name="training_step", entries=(Entry(name="step", value="nan"), Entry())),),
    ),
    "a validation that raised, before another fit": Plan(
        module=(
            Hook(name="validation_step", entries=(Entry(on_step=True, on_epoch=False),), does="raise"),
            Hook(name="transfer_batch_to_device", reads=("logged_metrics",)),
        ),
        val_batches=(1,),
        then="fit",
    ),
    **{
        f"a tensor overwritten after {reduce_fx}": Plan(
            module=(
                Hook(
                    name="training_step",
                    entries=(Entry(value="tensor", reduce_fx=reduce_fx, on_epoch=True, spoiled=True),),
                ),
            ),
            windows=4,
        )
        for reduce_fx in dict.fromkeys(REDUCTIONS)
    },
}


def differences(stock: Trace, engine: Trace) -> str:
    """Where the two part, readably; empty if nowhere."""
    lines: list[str] = []
    for i in range(max(len(stock.events), len(engine.events))):
        of_stock, of_engine = (events[i] if i < len(events) else None for events in (stock.events, engine.events))
        if of_stock != of_engine:
            before = [f"         {event}" for event in stock.events[max(0, i - 8) : i]]
            lines += [f"event {i}, after", *before, *_leaves("event", _as_dict(of_stock), _as_dict(of_engine))]
            break
    return "\n".join([*lines, *_leaves("end", stock.end, engine.end)])


def _as_dict(event: tuple | None) -> Any:
    return event and dict(enumerate(event))


def _leaves(path: str, stock: Any, engine: Any) -> list[str]:
    """A line for each item of nested dicts that differs."""
    if isinstance(stock, dict) and isinstance(engine, dict):
        keys = dict.fromkeys([*stock, *engine])
        return [line for key in keys for line in _leaves(f"{path} > {key}", stock.get(key), engine.get(key))]
    return [] if stock == engine else [path, f"  stock  {stock}", f"  engine {engine}"]


def check(plan: Plan) -> None:
    stock, engine = replay(Trainer, plan), replay(Engine, plan)
    if any("NothingTrainedError" in str(outcome) for outcome in engine.end["outcome"]):
        return  # no step had a loss: the stock trainer ends as if all were well, the engine says so
    found = differences(stock, engine)
    assert not found, found


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.ERROR)  # thousands of runs say where they stopped
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("corner", CORNERS)
def test_a_corner_is_the_stock_trainers(corner):
    check(CORNERS[corner])


@pytest.mark.parametrize("num_plans", [int(NUM_EXAMPLES)] if NUM_EXAMPLES else [25, *nightly(60)])
@pytest.mark.timeout(0 if NUM_EXAMPLES else 600)
def test_a_run_is_the_stock_trainers(num_plans):
    @settings(
        max_examples=num_plans,
        derandomize=NUM_EXAMPLES is None,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    @given(plan=plans())
    def drawn(plan):
        check(plan)

    drawn()
