"""Each rank writes its own trace."""

import os

from polyphase.callbacks import TraceProfiler
from tests.distributed import run_ranks
from tests.engine.tiny import as_rank

from .test_trace_profiler import events, fit, named


def test_each_of_two_ranks_writes_its_own():
    run_ranks(_two_ranks, 2, start_method="fork", timeout_s=120)


def _two_ranks(rank):
    as_rank(rank)
    callback = TraceProfiler(wait=2, warmup=1, active=2, slow_factor=None)
    fit(callback, callbacks=[callback], devices=2, strategy="ddp", num_steps=8)
    (path,) = callback.files
    assert os.path.basename(path) == f"rank_{rank}-step_3-set.json.gz"
    found = events(path)
    assert len(named(found, "backward")) == 2
    assert any("all_reduce" in event["name"] for event in found)
