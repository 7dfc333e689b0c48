"""Nested values of the last stage on all stages: the form in two messages of hosts, then one for each dtype."""

from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile

from polyphase.engine.strategies.pipeline.shapes import TreeBroadcast
from tests.distributed import run_ranks

FORM, OTHER = {"loss": 1.0, "names": ["a", "b"]}, {"loss": 2}


def _broadcast(rank: int) -> None:
    values = TreeBroadcast(dist.group.WORLD, dist.group.WORLD, 1, torch.device("cpu"))

    def told(form: dict[str, Any], number: float) -> tuple[dict[str, Any], int]:
        """What all ranks have, and by how many messages."""
        value = {**form, "values": torch.full((3,), number)} if rank == 1 else None
        with profile() as profiler:
            found = values.broadcast(value)
        assert found.pop("values").tolist() == [number] * 3
        return found, sum(event.count for event in profiler.key_averages() if event.key == "gloo:broadcast")

    assert told(FORM, 1.0) == (FORM, 3)
    assert told(OTHER, 3.0) == (OTHER, 3)


def test_a_value_takes_three_messages():
    run_ranks(_broadcast, 2, start_method="fork")
