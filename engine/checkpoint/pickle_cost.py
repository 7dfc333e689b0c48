"""Bounds the time and the memory that torch takes to open a pickle of plain values: they are linear in its size.

Torch's unpickler (`weights_only=True`) runs no code, but a short pickle may ask it for much: to copy one list again and
again, to hash nested tuples, to enter keys of equal hashes in a dict, to encode a text by a slow codec. So the pickle's
instructions are followed here first, and nothing that it names is imported or called.
"""

import struct
import time
from collections.abc import Callable, Iterable
from pickle import (
    APPEND,
    APPENDS,
    BINFLOAT,
    BINGET,
    BININT,
    BININT1,
    BININT2,
    BINPERSID,
    BINPUT,
    BINUNICODE,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    EMPTY_TUPLE,
    GLOBAL,
    LONG1,
    LONG_BINGET,
    LONG_BINPUT,
    MARK,
    NEWFALSE,
    NEWOBJ,
    NEWTRUE,
    NONE,
    PROTO,
    REDUCE,
    SETITEM,
    SETITEMS,
    SHORT_BINSTRING,
    STOP,
    TUPLE,
    TUPLE1,
    TUPLE2,
    TUPLE3,
    decode_long,
)
from typing import IO, Any

__all__ = ["check_cost"]

_PER_BYTE = 4
"""Parts of arguments for each byte of the pickle. Those that are in it once have fewer than one a byte."""
_SPARE = 10_000
_COPIED = 4
"""A part that is copied counts so often, since its copy takes memory."""
_MOST_KEY_DEPTH = 20
"""Python hashes nested tuples by a recursion without a limit, and the process ends when its stack is full."""
_KEY_S = 20e-6
"""The most CPU time for a key: 20 times what one takes in a dict of a million. With equal hashes, each takes more."""
_SPARE_S = 1.0
_KEYS_A_LOOK = 256
_NUM_PICKLES = 5
"""So many has a file of torch.save without an archive, one behind the other; the tensors follow."""
_ENCODE, _BYTEARRAY, _SIZE = "_codecs.encode", "builtins.bytearray", "torch.Size"
_ORDERED, _COUNTER = "collections.OrderedDict", "collections.Counter"
_COPYING = (_ENCODE, _BYTEARRAY, _SIZE, _ORDERED, _COUNTER, "builtins.set")


class _Result:
    """Stands for what torch looks up by name, and for what a call returns."""

    def __init__(self, name: str = "", num_bytes: int = 0) -> None:
        self.name, self.num_bytes = name, num_bytes


def check_cost(stream: IO[bytes], num_bytes: int) -> None:
    """Follows the pickle at the position of `stream`, or those of an older file of `torch.save`.

    Args:
        stream: is read as far as torch would.
        num_bytes: size of the pickles.

    Raises:
        ValueError: they would take more than their size allows, or torch would fail, too.
    """
    for _ in range(_NUM_PICKLES):
        followed = _Followed(stream, num_bytes)
        try:
            if not followed.is_whole():
                return
        except (KeyError, IndexError, TypeError, AttributeError, struct.error) as error:
            raise ValueError(f"its pickle can't be followed ({type(error).__name__})") from None


class _Followed:
    """The unpickler's stack and memo, with placeholders for all that is no plain value."""

    def __init__(self, stream: IO[bytes], num_bytes: int) -> None:
        self.read, self.readline = stream.read, stream.readline
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.left = _PER_BYTE * num_bytes + _SPARE
        self.num_keys, self.keys_s = 0, 0.0

    def is_whole(self) -> bool:
        """Follows all instructions; returns False at one that torch does not know, since it ends there."""
        while (code := self.read(1)) != STOP:
            if code not in _INSTRUCTIONS:
                return False
            _INSTRUCTIONS[code](self)
        return True

    # --- instructions

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.read(struct.calcsize(form)))[0]

    def push_name(self) -> None:
        module, name = (self.readline()[:-1].decode() for _ in range(2))
        self.stack.append(_Result(f"{module}.{name}"))

    def push_tuple(self, count: int) -> None:
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def to_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.outer.pop()
        return items

    def push_marked(self) -> None:
        items = self.to_mark()
        self.stack.append(tuple(items))

    def extend(self, items: list[Any]) -> None:
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        self.enter(self.stack[-1], zip(items[::2], items[1::2], strict=True))

    def call(self, arguments: Any) -> None:
        self.stack[-1] = self.result(self.stack[-1].name, arguments)

    def make(self, arguments: Any) -> None:
        """The class is not called: its `__new__` is, which takes arguments and copies none into a set or a dict."""
        self.spend(len(arguments))
        is_dict = self.stack[-1].name in (_ORDERED, _COUNTER)
        self.stack[-1] = {} if is_dict else self.result(self.stack[-1].name, arguments)

    def build(self, state: Any) -> None:
        """Torch updates the object's attributes from a dict, or from two."""
        parts = [state, *state] if type(state) is tuple else [state]
        self.spend(sum(len(part) for part in parts if isinstance(part, (dict, list, tuple))))

    # --- costs

    def spend(self, num_parts: int) -> None:
        self.left -= num_parts
        if self.left < 0:
            raise ValueError("its calls repeat values, so that they are many times its size")

    def result(self, name: str, arguments: Any) -> Any:
        """Returns what stands for the result of a call. A part of the arguments counts each time that it is there."""
        waiting, is_copying = [arguments], name in _COPYING
        while waiting:
            part = waiting.pop()
            inner: Any = ()
            if isinstance(part, (list, tuple)):
                inner = part
            elif isinstance(part, dict):
                inner = [*part, *part.values()]
            elif is_copying and isinstance(part, (str, bytes, _Result)):
                self.spend(part.num_bytes if isinstance(part, _Result) else len(part))
            self.spend(1 + len(inner) * (_COPIED if is_copying else 1))
            waiting += inner
        if name in (_ENCODE, _BYTEARRAY):
            return _Result("bytes", _num_encoded(name, *arguments))
        if name == _SIZE:
            return tuple(*arguments)
        if name == "builtins.complex":
            return complex(*arguments)
        if name not in _COPYING:
            return _Result()
        content: Any = arguments[0] if arguments else ()
        keys: dict[Any, Any] = {}
        pairs = content.items() if isinstance(content, dict) else content
        self.enter(keys, pairs if name == _ORDERED else ((key, None) for key in content))
        return keys

    def enter(self, target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> None:
        """Enters keys as torch will; only their time can show that many of them meet in one place.

        That of all else does not count: under a profiler it is many times as long.
        """
        began_s = time.thread_time()
        for key, value in pairs:
            if type(key) is tuple:
                self.check_key(key, 0)
            target[key] = value
            self.num_keys += 1
            if not self.num_keys % _KEYS_A_LOOK:
                taken_s = self.keys_s + time.thread_time() - began_s
                if taken_s > _SPARE_S + _KEY_S * self.num_keys:
                    raise ValueError(f"{self.num_keys} keys of dicts take {taken_s:.1f} s, as if made to be slow")
        self.keys_s += time.thread_time() - began_s

    def check_key(self, key: tuple[Any, ...], depth: int) -> None:
        if depth > _MOST_KEY_DEPTH:
            raise ValueError(f"it has a key that is nested more than {_MOST_KEY_DEPTH} deep")
        self.spend(len(key))
        for part in key:
            if type(part) is tuple:
                self.check_key(part, depth + 1)


def _num_encoded(name: str, *arguments: Any) -> int:
    """Returns the number of bytes that pickle has written as a text; a codec may take hours, `bytearray` a number."""
    if name == _BYTEARRAY and len(arguments) < 2:
        (content,) = arguments or (b"",)
        if type(content) is bytes:
            return len(content)
        if type(content) is _Result and content.name == "bytes":
            return content.num_bytes
    elif len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in ("latin1", "latin-1"):
        return len(arguments[0])
    raise ValueError("it encodes a text otherwise than pickle encodes bytes")


_Instruction = Callable[[_Followed], None]


def _pushing(value: Callable[[_Followed], Any]) -> _Instruction:
    return lambda pickled: pickled.stack.append(value(pickled))


def _number(form: str) -> _Instruction:
    return _pushing(lambda pickled: pickled.number(form))


def _recalling(form: str) -> _Instruction:
    return _pushing(lambda pickled: pickled.memo[pickled.number(form)])


def _remembering(form: str) -> _Instruction:
    return lambda pickled: pickled.memo.update({pickled.number(form): pickled.stack[-1]})


def _of_top(act: Callable[[_Followed, Any], None], num_items: int) -> _Instruction:
    """Takes items from the stack's top for `act`: one of them itself, several as a list."""

    def instruction(pickled: _Followed) -> None:
        items = pickled.stack[-num_items:]
        del pickled.stack[-num_items:]
        act(pickled, items if num_items > 1 else items[0])

    return instruction


_INSTRUCTIONS: dict[bytes, _Instruction] = {
    BINPUT: _remembering("<B"),
    LONG_BINPUT: _remembering("<I"),
    BINGET: _recalling("<B"),
    LONG_BINGET: _recalling("<I"),
    BININT1: _number("<B"),
    BININT2: _number("<H"),
    BININT: _number("<i"),
    BINFLOAT: _number(">d"),
    LONG1: _pushing(lambda pickled: decode_long(pickled.read(pickled.number("<B")))),
    BINUNICODE: _pushing(lambda pickled: str(pickled.read(pickled.number("<I")), "utf-8", "surrogatepass")),
    SHORT_BINSTRING: _pushing(lambda pickled: pickled.read(pickled.number("<B"))),
    NONE: _pushing(lambda _: None),
    NEWTRUE: _pushing(lambda _: True),
    NEWFALSE: _pushing(lambda _: False),
    EMPTY_TUPLE: _pushing(lambda _: ()),
    EMPTY_LIST: _pushing(lambda _: []),
    EMPTY_DICT: _pushing(lambda _: {}),
    EMPTY_SET: _pushing(lambda _: _Result()),
    MARK: _Followed.mark,
    TUPLE: lambda pickled: pickled.push_marked(),
    TUPLE1: lambda pickled: pickled.push_tuple(1),
    TUPLE2: lambda pickled: pickled.push_tuple(2),
    TUPLE3: lambda pickled: pickled.push_tuple(3),
    APPEND: _of_top(lambda pickled, item: pickled.extend([item]), 1),
    APPENDS: lambda pickled: pickled.extend(pickled.to_mark()),
    SETITEM: _of_top(_Followed.set_items, 2),
    SETITEMS: lambda pickled: pickled.set_items(pickled.to_mark()),
    GLOBAL: _Followed.push_name,
    REDUCE: _of_top(_Followed.call, 1),
    NEWOBJ: _of_top(_Followed.make, 1),
    BUILD: _of_top(_Followed.build, 1),
    BINPERSID: _of_top(lambda pickled, _: pickled.stack.append(_Result()), 1),
    PROTO: lambda pickled: pickled.number("<B"),
}
"""The instructions that torch's unpickler knows."""
