"""All-gathers of plain values over remote calls: unlike collectives, they do not wait for a rank that was lost.

1. Each rank sends its value to rank 0 under the name of the gather: serialised as plain values, and signed with the
   job's secret (blocks until 2 is done);
2. once all surviving ranks have sent their values, rank 0 answers each of them with all values, in the order of ranks.

Rank 0 can't be lost. When another rank is lost, it is left out of the pending gathers and of all later ones.
"""

import threading
from collections import defaultdict
from typing import Any

from torch.distributed import rpc
from torch.futures import Future

from ...distributed.object_group import ObjectGroup
from ...distributed.signing import signed, verified
from .plain import pack, unpack
from .rpc import ALLOWED, Connection

__all__ = ["PendingGathers", "SurvivingRanks", "open_gathers"]


class PendingGathers:
    """The gathers that rank 0 has not answered yet.

    Args:
        surviving: ranks that take part.
    """

    def __init__(self, surviving: list[int]) -> None:
        self._lock = threading.Lock()
        self._surviving = set(surviving)
        self._messages: dict[str, dict[int, bytes]] = defaultdict(dict)
        self._answers: dict[str, Future] = defaultdict(Future)

    def contribute(self, name: str, rank: int, message: bytes) -> Future:
        """Adds the message of a rank to a gather.

        Returns:
            The future of the messages of all surviving ranks, a list in the order of the ranks.
        """
        with self._lock:
            answer = self._answers[name]
            self._messages[name][rank] = message
        self._answer_complete([name])
        return answer

    def lose(self, ranks: list[int]) -> None:
        """Leaves these ranks out from now on."""
        with self._lock:
            self._surviving.difference_update(ranks)
            names = list(self._messages)
        self._answer_complete(names)

    def _answer_complete(self, names: list[str]) -> None:
        complete = []
        with self._lock:
            for name in names:
                if name in self._messages and self._surviving <= self._messages[name].keys():
                    by_rank = self._messages.pop(name)
                    complete.append((self._answers.pop(name), [by_rank[rank] for rank in sorted(by_rank)]))
        for answer, messages in complete:  # not under the lock, since it sends
            answer.set_result(messages)


_pending: list[PendingGathers] = []
"""The gathers of this process, if it is rank 0."""


def open_gathers(num_ranks: int) -> PendingGathers:
    """Returns the gathers of this process, rank 0; called before the ranks are connected and contribute."""
    if not _pending:
        _pending.append(PendingGathers(list(range(num_ranks))))
    return _pending[0]


@rpc.functions.async_execution
def contribute(name: str, rank: int, message: bytes) -> Future:
    """Calls `PendingGathers.contribute` on rank 0; each rank calls it there."""
    return _pending[0].contribute(name, rank, message)


ALLOWED[__name__, "contribute"] = contribute


class SurvivingRanks(ObjectGroup):
    """Object collectives of all ranks but those that were lost, for one thread of each rank.

    Args:
        name: name of the thread; the n-th calls of the ranks' threads of this name are one gather.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._number = 0
        self._connection: Connection | None = None

    def connect(self, connection: Connection) -> None:
        """Gives the ranks their connection; before that each is alone."""
        self._connection = connection

    @property
    def process_group(self) -> None:
        """Always None: its collectives would wait for the ranks that were lost."""

    @property
    def rank(self) -> int:
        """This rank's number among all ranks that were started."""
        return 0 if self._connection is None else self._connection.rank

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns the values (tensors or plain values) of all surviving ranks, on each of them."""
        connection = self._connection
        if connection is None or not connection.is_open or self.size == 1:
            return [value] if connection is not None and connection.lost else super().all_gather_object(value)
        self._number += 1
        name = f"{self._name} {self._number}"
        call = connection.call(0, contribute, name, self.rank, signed(name, pack(value)))
        messages = connection.wait({0: call}, f"for the values of all surviving ranks in the gather {name!r}")[0]
        return [_open(name, message) for message in messages]

    def gather_object(self, value: Any) -> list[Any]:
        """Returns the values of all surviving ranks on each of them, as `all_gather_object` does."""
        return self.all_gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's value on all surviving ranks."""
        return self.all_gather_object(value if self.rank == 0 else None)[0]

    def all_gather_ints(self, value: int) -> list[int]:
        """Returns the numbers of all surviving ranks, on each of them."""
        return self.all_gather_object(value)


def _open(name: str, message: bytes) -> Any:
    content = verified(name, message)
    if content is None:
        raise RuntimeError(f"a value of the gather {name!r} was not sent by a rank of this job: see docs/security.md")
    return unpack(content)
