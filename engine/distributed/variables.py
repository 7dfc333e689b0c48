"""The names of the variables that launchers set, and the whole numbers in them.

It imports neither torch nor Lightning: Lightning and torchmetrics read some of these while they are imported, and their
error has neither the name nor the value.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "MOST_PROCESSES",
    "MPI",
    "OTHERS",
    "PLAIN",
    "RANGES",
    "SLURM",
    "Names",
    "check_imported_numbers",
    "number_in",
    "with_values",
]


class Names(NamedTuple):
    """The names of the variables in which a launcher stores the ranks of a process."""

    size: str
    rank: str
    local_rank: str
    """The variable of the rank among the processes of this machine."""
    local_size: str


PLAIN = "RANK and WORLD_SIZE"
MPI = {
    "Open MPI": Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    "MVAPICH": Names(*(f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    "mpiexec": Names("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Launchers with precedence over SLURM: within an allocation, SLURM's numbers are not those of their processes."""
OTHERS = {
    "LSF": Names(*(f"JSM_NAMESPACE_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    # submitit itself starts processes on one machine only; on several machines SLURM starts them.
    "submitit": Names(*(f"SUBMITIT_LOCAL_{name}" for name in ("NTASKS", "GLOBALID", "LOCALID", "NTASKS"))),
    PLAIN: Names("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}
SLURM = Names("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
MOST_PROCESSES = 10_000_000
"""More than any cluster has: a greater number is a mistake, and each process makes lists of all of them."""
_COUNTS, _RANKS = range(1, MOST_PROCESSES + 1), range(MOST_PROCESSES)
_LAUNCHERS = (*MPI.values(), *OTHERS.values(), SLURM)
RANGES = {
    **{name: _COUNTS for names in _LAUNCHERS for name in (names.size, names.local_size)},
    **{name: _RANKS for names in _LAUNCHERS for name in (names.rank, names.local_rank)},
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), _COUNTS),
    **dict.fromkeys(("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"), _RANKS),
    **dict.fromkeys(("MASTER_PORT", "STANDALONE_PORT"), range(1, 65_536)),
    **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"), range(2**31)),
    "PL_GLOBAL_SEED": range(2**32),
    "PL_SEED_WORKERS": range(2),
    **dict.fromkeys(("SLURM_JOB_ID", "LSB_JOBID"), range(2**63)),  # Lightning makes a port of them
}
"""The whole numbers that a variable may have, by its name."""


def number_in(name: str, default: int) -> int:
    """Returns the whole number in an environment variable; `default` if it is unset.

    Raises:
        ValueError: it is empty, has something else, or a number out of its range.
    """
    if name not in os.environ:
        return default
    text, allowed = os.environ[name].strip(), RANGES[name]
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if number not in allowed:
        raise ValueError(
            f"the environment variable {name}={os.environ[name]!r} must be a whole number from {allowed[0]} to"
            f" {allowed[-1]}: correct it, or unset it where no launcher has set it."
        )
    return number


def with_values(names: Sequence[str]) -> str:
    """The variables with their values, for a message."""
    return ", ".join(f"{name}={os.environ[name]}" for name in names)


def check_imported_numbers() -> None:
    """Checks the variables that Lightning and torchmetrics read while they are imported.

    Raises:
        ValueError: one of them is no rank; the message has its name and value.
    """
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"):
        number_in(name, 0)
