"""The job's key-value store, with signed messages between the ranks' threads.

Any process that reaches the store's port can write to it. So each message is signed by its writer and checked by its
reader (`signing`). An invalid message counts as missing, with one warning.
"""

import json
import logging
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from .signing import MOST_BYTES, Fields, parsed, signed, verified
from .store_calls import StoreLine

__all__ = ["FIRST_FAILURE", "CausedByRank", "JobStore", "SignedStore"]

FIRST_FAILURE = "polyphase/first_failure"
"""Key under which the first failure of the job is recorded."""

log = logging.getLogger("polyphase.engine")

_TICK_S = 0.05
_ATTEMPTS = 100
"""The number of attempts to replace an invalid message that others may keep writing."""
_FAILURE: Fields = {"rank": int, "by": int, "kind": str, "message": str}


class CausedByRank(Exception):  # noqa: N818 - what several errors have in common
    """An error that a rank raises because another rank has failed.

    Args:
        message: message of the error.
        rank: the rank that has failed.
    """

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class JobStore:
    """The job's store, as one rank uses it.

    All methods may raise RuntimeError: the store's process has ended (`torch.distributed.DistError`) or does not answer
    (`StoreLostError`).

    Args:
        store: shared by all ranks.
        rank: this rank.
        num_ranks: number of ranks.
        line: another connection to the same store; if one of the two is lost, both are.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, line: StoreLine | None = None) -> None:
        self.store: Any = store
        self.line = StoreLine(store, line)
        self.rank = rank
        self.num_ranks = num_ranks
        self._has_warned = False

    def clone(self) -> "JobStore":
        """Returns the same store over another connection, which a thread that waits in this one does not block."""
        return JobStore(self.store.clone(), self.rank, self.num_ranks, self.line)

    def has(self, *keys: str) -> bool:
        """Whether there is a value, valid or not, under each of `keys`; one call of the store."""
        return self.line.ask("check", list(keys))

    def write(self, key: str, message: dict[str, Any]) -> None:
        """Writes a message of plain values, which all ranks can read."""
        self.line.ask("set", key, signed(key, json.dumps(message).encode()))

    def read(self, key: str, fields: Fields) -> dict[str, Any] | None:
        """Returns the message under `key`; None if there is no valid one. Does not wait."""
        return self.read_all([key], fields).get(key)

    def read_all(self, keys: Iterable[str], fields: Fields) -> dict[str, dict[str, Any]]:
        """Returns the valid messages under `keys`, by key; two calls of the store, or one more a key if some lack."""
        present = list(keys)
        if not self.has(*present):
            present = [key for key in present if self.has(key)] if len(present) > 1 else []
        values = self.line.ask("multi_get", present) if present else []
        messages = {key: self._checked(key, value, fields) for key, value in zip(present, values, strict=True)}
        return {key: message for key, message in messages.items() if message is not None}

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a counter and returns it. It is not signed: nothing may depend on its value being right."""
        return self.line.ask("add", key, more)

    def first_failure(self) -> dict[str, Any] | None:
        """Returns the job's first failure: its rank, kind, message, and ``by``, the rank that has recorded it."""
        return self.read(FIRST_FAILURE, _FAILURE)

    def record_failure(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Records a failure, unless there is one already; returns the job's first failure."""
        return self.record_first(FIRST_FAILURE, failure, _FAILURE)

    def record_first(self, key: str, message: dict[str, Any], fields: Fields) -> dict[str, Any]:
        """Writes `message`, unless there is a valid message already; returns the first valid message under `key`."""
        signed_message = signed(key, json.dumps(message).encode())
        expected = b""
        for _ in range(_ATTEMPTS):
            present = self.line.ask("compare_set", key, expected, signed_message)
            first = message if present == signed_message else self._checked(key, present, fields)
            if first is not None:
                return first
            # torch: if the key was deleted, `compare_set` returns the expected value.
            expected = b"" if present == expected else present
        return message

    def _checked(self, key: str, value: bytes, fields: Fields) -> dict[str, Any] | None:
        content = verified(key, value) if len(value) <= MOST_BYTES else None
        message = None if content is None else parsed(content, fields, self.num_ranks)
        if message is None and not self._has_warned:
            self._has_warned = True
            _warn(self.rank, key)
        return message


class SignedStore:
    """A store of short signed texts; the methods are those of `torch.distributed.Store`.

    Args:
        store: shared by all ranks; it may have other values, too.
        rank: this rank.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._line = StoreLine(store)
        self._rank = rank
        self._has_warned = False

    def set(self, key: str, text: str) -> None:
        """Writes a text."""
        self._line.ask("set", key, signed(key, text.encode()))

    def set_first(self, key: str, text: str) -> str:
        """Writes a text, unless there is a valid one already; returns the first one."""
        own, expected = signed(key, text.encode()), b""
        for _ in range(_ATTEMPTS):
            present = self._line.ask("compare_set", key, expected, own)
            if present == own:
                return text
            if (first := verified(key, present)) is not None:
                return first.decode()
            # torch: if the key was deleted, `compare_set` returns the expected value.
            expected = b"" if present == expected else present
        return text

    def check(self, keys: list[str]) -> bool:
        """Whether there is a valid text under each key."""
        return self._line.ask("check", keys) and all(self._text(key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """Returns the text under a key; waits until there is a valid one."""
        while not self._line.ask("check", [key]) or (text := self._text(key)) is None:
            time.sleep(_TICK_S)
        return text

    def _text(self, key: str) -> bytes | None:
        text = verified(key, self._line.ask("get", key))
        if text is None and not self._has_warned:
            self._has_warned = True
            _warn(self._rank, key)
        return text


def _warn(rank: int, key: str) -> None:
    log.warning(
        "Rank %d ignores a message in the job's key-value store under %r: no rank of this job has written it. See"
        " docs/security.md.",
        rank,
        key,
    )
