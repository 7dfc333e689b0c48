"""All-gathers of plain values over remote calls: unlike collectives, they do not wait for a rank that was lost.

1. Each rank sends its value to rank 0 under the name of the gather: serialised as plain values, and signed with the
   job's secret (blocks until 2 is done);
2. once all surviving ranks have sent their values, rank 0 answers each of them with all values, in the order of ranks.

Rank 0 can't be lost. When another rank is lost, it is left out of the pending gathers and of all later ones.
"""

import builtins
import dataclasses
import json
import struct
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from ...distributed.job_store import signed, verified
from ...distributed.object_group import ObjectGroup
from .rpc import ALLOWED, Connection

__all__ = ["PendingGathers", "SurvivingRanks", "open_gathers", "pack", "unpack"]

# Serialises plain values and tensors that ranks of `ps` send to each other. No code runs when they are read.
#
# The format is a JSON tree, in which a value without a JSON type is ``{"tag": content}``, followed by the bytes of the
# tensors. Records (dataclasses and named tuples of `polyphase`) and exceptions are named by their class; a class whose
# module is not loaded already is never imported.

_LENGTH = struct.Struct("<Q")
_PACKAGE = "polyphase."


def pack(value: Any) -> bytes:
    """Serialises a value.

    Args:
        value: tensors, numpy arrays, numbers, text, bytes, paths, dtypes, None, exceptions, records of `polyphase`; and
            lists, tuples, sets and dicts of them.

    Raises:
        TypeError: it holds a value of another class; names the class.
    """
    buffers: list[bytes] = []
    tree = json.dumps(_tree(value, buffers)).encode()
    return b"".join([_LENGTH.pack(len(tree)), tree, *buffers])


def unpack(content: bytes) -> Any:
    """Returns the value that `pack` was given; tensors are on the CPU.

    Raises:
        ValueError: the bytes are not from `pack`.
    """
    try:
        (length,) = _LENGTH.unpack_from(content)
        body = content[_LENGTH.size :]
        return _Reader(memoryview(bytearray(body[length:]))).value(json.loads(body[:length]))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError, struct.error) as error:
        raise ValueError(f"these bytes are no plain values: {type(error).__name__}: {error}") from None


def _tree(value: Any, buffers: list[bytes]) -> Any:
    def of(values: Any) -> list[Any]:
        return [_tree(item, buffers) for item in values]

    if value is None or isinstance(value, (bool, int, float, str)):
        # Subclasses too (numpy's numbers, Lightning's enumerations), as plain values.
        return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)
    if isinstance(value, list):
        return of(value)
    if isinstance(value, Tensor):
        tensor = value.detach().cpu().contiguous()
        buffers.append(tensor.flatten().view(torch.uint8).numpy().tobytes())
        return {"tensor": [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), len(buffers[-1])]}
    if isinstance(value, dict):
        return {"dict": [of(pair) for pair in value.items()]}
    if isinstance(value, (set, frozenset)):
        return {type(value).__name__: of(sorted(value, key=repr))}
    if isinstance(value, (bytes, bytearray)):
        buffers.append(bytes(value))
        return {"bytes": len(value)}
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        if array.dtype.hasobject:
            raise TypeError(_refusal(value))
        buffers.append(array.tobytes())
        return {"array": [array.dtype.str, list(np.shape(value)), len(buffers[-1])]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, PurePath):
        return {"path": str(value)}
    if isinstance(value, BaseException):
        return {"error": [type(value).__module__, type(value).__qualname__, str(value)]}
    return _record(value, of)


def _record(value: Any, fields: Any) -> Any:
    kind = type(value)
    if _is_record(kind):
        names = _field_names(kind)
        return {"record": [kind.__module__, kind.__qualname__, names, fields(getattr(value, name) for name in names)]}
    if kind in (tuple, torch.Size):
        return {"tuple": fields(value)}
    raise TypeError(_refusal(value))


def _refusal(value: Any) -> str:
    return (
        "under 'ps' ranks tell each other tensors and plain values only (numbers, text, lists, dicts), but got one of"
        f" {type(value).__module__}.{type(value).__qualname__}: turn it into those, or choose 'ddp'."
    )


def _is_record(kind: Any) -> bool:
    # A peer can name any class: only classes that just store their values are created.
    is_record = isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"))
    return is_record and kind.__module__.startswith(_PACKAGE)


def _field_names(kind: Any) -> list[str]:
    return list(kind._fields) if hasattr(kind, "_fields") else [f.name for f in dataclasses.fields(kind) if f.init]


def _class(module: str, name: str) -> Any:
    """Returns a class by name if its module is loaded, else None."""
    return getattr(sys.modules.get(module), name, None) if "." not in name else None


class _Reader:
    """Turns a JSON tree back into a value.

    Args:
        buffers: the bytes of its tensors, one after the other.
    """

    def __init__(self, buffers: memoryview) -> None:
        self._buffers = buffers
        self._by_tag: dict[str, Callable[[Any], Any]] = {
            "tensor": self._tensor,
            "array": self._array,
            "bytes": lambda length: bytes(self._taken(length)),
            "dict": lambda pairs: {self.value(key): self.value(value) for key, value in pairs},
            "tuple": lambda items: tuple(map(self.value, items)),
            "set": lambda items: set(map(self.value, items)),
            "frozenset": lambda items: frozenset(map(self.value, items)),
            "dtype": self._dtype,
            "path": Path,
            "error": self._error,
            "record": self._record,
        }

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((tag, content),) = tree.items()
        if tag not in self._by_tag:
            raise ValueError(f"unknown tag {tag!r}")
        return self._by_tag[tag](content)

    def _taken(self, length: int) -> memoryview:
        if not 0 <= length <= len(self._buffers):
            raise ValueError("it was cut off")
        taken, self._buffers = self._buffers[:length], self._buffers[length:]
        return taken

    def _tensor(self, content: Any) -> Tensor:
        dtype, shape, length = content
        taken = self._taken(length)
        flat = torch.frombuffer(taken, dtype=torch.uint8).clone() if length else torch.empty(0, dtype=torch.uint8)
        return flat.view(self._dtype(dtype)).reshape(shape)

    def _array(self, content: Any) -> Any:
        dtype, shape, length = content
        array = np.frombuffer(bytes(self._taken(length)), dtype=np.dtype(str(dtype))).reshape(shape)
        return array.copy() if shape else array[()]

    def _dtype(self, content: Any) -> torch.dtype:
        dtype = getattr(torch, str(content), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype {content!r}")
        return dtype

    def _error(self, content: Any) -> BaseException:
        module, name, text = map(str, content)
        kind = _class(module, name) if module == builtins.__name__ or module.startswith(_PACKAGE) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # its constructor takes more than a text
                pass
        return RuntimeError(f"{name}: {text}")

    def _record(self, content: Any) -> Any:
        module, name, names, values = content
        kind = _class(str(module), str(name)) if str(module).startswith(_PACKAGE) else None
        if kind is None or not _is_record(kind) or kind.__module__ != module or names != _field_names(kind):
            raise ValueError(f"no record {module}.{name} of {names}")
        return kind(**dict(zip(names, (self.value(item) for item in values), strict=True)))


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
def _contribute(name: str, rank: int, message: bytes) -> Future:
    """Calls `PendingGathers.contribute` on rank 0; each rank calls it there."""
    return _pending[0].contribute(name, rank, message)


ALLOWED[__name__, "_contribute"] = _contribute


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
        call = connection.call(0, _contribute, name, self.rank, signed(name, pack(value)))
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
