"""The job's key-value store, as this rank's threads use it: whatever else stands there is no word of a rank's.

Anybody who reaches the store's port can write to it. So what is read is signed and checked (`signing`); what is not in
order is as if it weren't there, and a warning says so once.
"""

import json
import logging
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from .signing import MOST_BYTES, Fields, opened, parsed, signed
from .store_calls import StoreLine

__all__ = ["FIRST_FAILURE", "CausedByRank", "JobStore", "SignedStore"]

FIRST_FAILURE = "polyphase/first_failure"
"""Key under which the first failure of the job is recorded."""

log = logging.getLogger("polyphase.engine")

_TICK_S = 0.05
_ATTEMPTS = 100
"""To write over what others write."""
_FAILURE: Fields = {"rank": int, "by": int, "kind": str, "message": str}


class CausedByRank(Exception):  # noqa: N818 - what several errors have in common
    """An error that a rank raises because of another one.

    Args:
        message: what is wrong.
        rank: the one that is to blame.
    """

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class JobStore:
    """The job's store; all methods may raise RuntimeError: its host is gone (`torch.distributed.DistError`), or silent.

    Args:
        store: shared by all ranks.
        rank: this one.
        num_ranks: number of ranks.
        line: another connection to it.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, line: StoreLine | None = None) -> None:
        self.store: Any = store
        self.line = StoreLine(store, line)
        self.rank = rank
        self.num_ranks = num_ranks
        self._has_warned = False

    def clone(self) -> "JobStore":
        """The same over a connection of its own: a thread that waits in this one would block it."""
        return JobStore(self.store.clone(), self.rank, self.num_ranks, self.line)

    def has(self, *keys: str) -> bool:
        """Whether something stands under each of `keys`, in order or not; one exchange."""
        return self.line.ask("check", list(keys))

    def write(self, key: str, word: dict[str, Any]) -> None:
        """Says something to all ranks; plain values."""
        self.line.ask("set", key, signed(key, json.dumps(word).encode()))

    def read(self, key: str, fields: Fields) -> dict[str, Any] | None:
        """Returns the word under `key`; None if there is none, or none that is valid. Does not wait for one."""
        return self.read_all([key], fields).get(key)

    def read_all(self, keys: Iterable[str], fields: Fields) -> dict[str, dict[str, Any]]:
        """Returns the valid words under `keys`, all read in one exchange; where one is missing, each is asked for."""
        there = list(keys)
        if not self.has(*there):
            there = [key for key in there if self.has(key)] if len(there) > 1 else []
        values = self.line.ask("multi_get", there) if there else []
        words = {key: self._understood(key, value, fields) for key, value in zip(there, values, strict=True)}
        return {key: word for key, word in words.items() if word is not None}

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a counter, and returns it. Unsigned: it is no word to act on."""
        return self.line.ask("add", key, more)

    def first_failure(self) -> dict[str, Any] | None:
        """The job's first failure: rank, kind, message and by whom it was recorded."""
        return self.read(FIRST_FAILURE, _FAILURE)

    def record_failure(self, failure: dict[str, Any]) -> dict[str, Any]:
        """The job's first failure: `failure`, unless there is one already."""
        return self.record_first(FIRST_FAILURE, failure, _FAILURE)

    def record_first(self, key: str, word: dict[str, Any], fields: Fields) -> dict[str, Any]:
        """The first word that a rank has said there: `word`, unless there is one already."""
        signed_word = signed(key, json.dumps(word).encode())
        there = b""
        for _ in range(_ATTEMPTS):
            now = self.line.ask("compare_set", key, there, signed_word)
            winner = word if now == signed_word else self._understood(key, now, fields)
            if winner is not None:
                return winner
            there = b"" if now == there else now  # torch: where nothing stands any more it returns what was expected
        return word

    def _understood(self, key: str, value: bytes, fields: Fields) -> dict[str, Any] | None:
        content = opened(key, value) if len(value) <= MOST_BYTES else None
        word = None if content is None else parsed(content, fields, self.num_ranks)
        if word is None and not self._has_warned:
            self._has_warned = True
            _warn(self.rank, key)
        return word


class SignedStore:
    """A store of short texts, for what ranks agree on; the methods are those of `torch.distributed.Store`.

    Args:
        store: in which there may be other things, too.
        rank: this one.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._line = StoreLine(store)
        self._rank = rank
        self._has_warned = False

    def set(self, key: str, text: str) -> None:
        """Writes a text."""
        self._line.ask("set", key, signed(key, text.encode()))

    def check(self, keys: list[str]) -> bool:
        """Whether there are texts under all keys."""
        return self._line.ask("check", keys) and all(self._text(key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """The text under a key, as soon as there is one."""
        while not self._line.ask("check", [key]) or (text := self._text(key)) is None:
            time.sleep(_TICK_S)
        return text

    def _text(self, key: str) -> bytes | None:
        text = opened(key, self._line.ask("get", key))
        if text is None and not self._has_warned:
            self._has_warned = True
            _warn(self._rank, key)
        return text


def _warn(rank: int, key: str) -> None:
    log.warning(
        "Rank %d ignores what stands in the job's key-value store under %r: no rank of this job has written it. See"
        " docs/security.md.",
        rank,
        key,
    )
