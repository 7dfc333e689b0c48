"""How the ranks of one start of a job find each other, where torchrun starts the job again and again.

torchrun keeps one key-value store over all starts. torch would look in it for the addresses of the peers, find those of
the last start, whose processes are gone, and wait for them until its timeout. So each start has a part of the store of
its own. Nothing that torchrun tells its processes names a start: nodes that joined later count restarts from 0. So rank
0 makes up a name, and tells it to whoever asks.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

__all__ = ["name_of_start"]

_PERIOD_S = 0.02


def name_of_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that the ranks of this start have in common, and no other start has; all ranks call it.

    Args:
        store: what all starts share.
        rank: this rank, 0 to `world_size` - 1.
        world_size: number of ranks of this start.
        timeout: how long to wait for the others.

    Raises:
        TimeoutError: some ranks did not come; on rank 0.
        torch.distributed.DistStoreError: rank 0 did not come; on the others.
    """
    if rank > 0:
        # Not the rank's number alone: that is what this rank of an earlier start has asked under.
        question = uuid.uuid4().hex
        store.set(f"asks/{rank}", question)
        store.wait([f"answer/{question}"], timeout)
        name = store.get(f"answer/{question}").decode()
        store.set(f"{name}/here/{rank}", "")
        return name
    name = f"start/{uuid.uuid4().hex}"
    deadline = time.monotonic() + timeout.total_seconds()
    absent, answered = set(range(1, world_size)), set()
    while absent:
        for other in list(absent):
            if store.check([f"{name}/here/{other}"]):
                absent.remove(other)
            elif store.check([f"asks/{other}"]):
                question = store.get(f"asks/{other}").decode()
                if question not in answered:
                    answered.add(question)
                    store.set(f"answer/{question}", name)
        if absent and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(absent)} of {world_size} have not come within {timeout}.")
        time.sleep(_PERIOD_S)
    return name
