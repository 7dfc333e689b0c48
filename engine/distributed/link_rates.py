"""Measures the rate between each two ranks over the hosts' network (gloo), not NCCL's.

Phases, for each distance 1 to W - 1: rank r sends 2 MB to rank r + distance and receives as much from rank
r - distance, three times. Each rank sends 6 (W - 1) MB, and waits for the slowest pair of each distance.
"""

import statistics
import time

import torch
import torch.distributed as dist

__all__ = ["MOST_RANKS", "all_reduce_rate", "receive_rates"]

MOST_RANKS = 16
"""The largest number of ranks for which links are measured; the time grows with it."""
_BYTES, _REPEATS = 2_000_000, 3


def receive_rates() -> list[float]:
    """Returns the rate in MB/s at which this rank receives from each rank, 0 for itself; to be called on all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(_BYTES, dtype=torch.uint8), torch.empty(_BYTES, dtype=torch.uint8)
    rates = [0.0] * world_size
    for distance in range(1, world_size):
        source = (rank - distance) % world_size
        times_s = []
        for _ in range(_REPEATS):
            dist.barrier()
            began = time.perf_counter()
            sends, receives = dist.isend(sent, (rank + distance) % world_size), dist.irecv(received, source)
            assert sends is not None, "this rank is in the group"
            assert receives is not None
            receives.wait()
            times_s.append(time.perf_counter() - began)
            sends.wait()
        rates[source] = _BYTES / statistics.median(times_s) / 1e6
    return rates


def all_reduce_rate() -> float:
    """Returns the rate in MB/s at which each rank sends in an all-reduce of 8 MB; to be called on all ranks."""
    values = torch.zeros(4 * _BYTES // 4)
    times_s = []
    for _ in range(_REPEATS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        times_s.append(time.perf_counter() - began)
    world_size = dist.get_world_size()
    return values.nbytes * 2 * (world_size - 1) / world_size / statistics.median(times_s) / 1e6
