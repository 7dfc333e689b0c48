"""Meetings of the ranks that are left: what collectives are elsewhere, but a rank that was lost is not waited for.

1. Each rank sends what it has to say, as plain values, signed with the job's secret, to rank 0, under the meeting's
   number (blocks until the next is done);
2. rank 0, once all living ranks have come, answers all of them with what each has said, in the order of the ranks.

Rank 0 can't be lost. When another is, its place stays empty in the meetings that wait, and in all that follow.
"""

import threading
from collections import defaultdict
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from ...host_group import HostGroup
from ..signing import opened, signed
from .plain import packed, unpacked
from .rpc import ALLOWED, Connection

__all__ = ["LivingRanks", "Meetings", "hold_meetings"]


class Meetings:
    """The meetings that are being held, on rank 0.

    Args:
        living: ranks that are to come.
    """

    def __init__(self, living: list[int]) -> None:
        self._lock = threading.Lock()
        self._living = set(living)
        self._said: dict[str, dict[int, bytes]] = defaultdict(dict)
        self._answers: dict[str, Future] = defaultdict(Future)

    def come(self, name: str, rank: int, said: bytes) -> Future:
        """A rank comes to a meeting.

        Returns:
            What those who came have said, once all have: a list in the order of the ranks.
        """
        with self._lock:
            answer = self._answers[name]
            self._said[name][rank] = said
        self._close([name])
        return answer

    def lose(self, ranks: list[int]) -> None:
        """Waits for these no more."""
        with self._lock:
            self._living.difference_update(ranks)
            names = list(self._said)
        self._close(names)

    def _close(self, names: list[str]) -> None:
        complete = []
        with self._lock:
            for name in names:
                if name in self._said and self._living <= self._said[name].keys():
                    said = self._said.pop(name)
                    complete.append((self._answers.pop(name), [said[rank] for rank in sorted(said)]))
        for answer, everyones in complete:
            answer.set_result(everyones)


_held: dict[str, Meetings] = {}
"""This process's, on rank 0."""


def hold_meetings(num_ranks: int) -> Meetings:
    """The meetings held by this process, rank 0; called before the ranks are connected, and may come."""
    if "here" not in _held:
        _held["here"] = Meetings(list(range(num_ranks)))
    return _held["here"]


@rpc.functions.async_execution
def come(name: str, rank: int, said: bytes) -> Future:
    """Called on rank 0 by each rank."""
    return _held["here"].come(name, rank, said)


ALLOWED[__name__, "come"] = come


class LivingRanks(HostGroup):
    """All ranks but those that were lost, for one thread of each.

    Args:
        name: of the thread; the n-th call of each rank's thread of this name is one meeting.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._number = 0
        self._connection: Connection | None = None

    def connect(self, connection: Connection) -> None:
        """From now on the ranks can meet."""
        self._connection = connection

    @property
    def process_group(self) -> None:
        """None: its collectives would wait for those that were lost."""

    @property
    def rank(self) -> int:
        """This one's place among all ranks that were started."""
        return 0 if self._connection is None else self._connection.rank

    def gathered(self, mine: Any) -> list[Any]:
        """Returns the values of all living ranks, tensors and plain ones, on each of them."""
        if self._connection is None or not self._connection.is_open or self.size == 1:
            return [mine] if self._connection is not None and self._connection.lost else super().gathered(mine)
        self._number += 1
        name = f"{self._name} {self._number}"
        call = self._connection.call(0, come, name, self.rank, signed(name, packed(mine)))
        said = self._connection.wait({0: call}, f"what all living ranks say in meeting {name!r}")[0]
        return [_opened(name, each) for each in said]

    def collected(self, mine: Any) -> list[Any]:
        """As `gathered`."""
        return self.gathered(mine)

    def told(self, value: Any) -> Any:
        """Returns rank 0's value on all living ranks."""
        return self.gathered(value if self.rank == 0 else None)[0]

    def numbers(self, mine: int) -> list[int]:
        """Returns the numbers of all living ranks, on each of them."""
        return self.gathered(mine)


def _opened(name: str, message: bytes) -> Any:
    content = opened(name, message)
    if content is None:
        raise RuntimeError(
            f"what was said in meeting {name!r} was not said by a rank of this job: see docs/security.md"
        )
    return unpacked(content)
