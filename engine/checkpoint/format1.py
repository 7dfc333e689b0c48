"""Reads the `.metadata` pickle of format 1 without unpickling: no class in it is imported, called or changed.

A pickle is a program for a stack machine. The machine here supports only the instructions that such a file needs, and
builds inert records of names, arguments and states. The index is then read from these records by name.
"""

import pickletools
from typing import Any, NamedTuple

from .manifest import METADATA, CheckpointError
from .tensor_index import DTYPES, Chunk, Index, StoredTensor, whole_numbers

__all__ = ["parse_metadata"]

_META = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    "collections OrderedDict",
    "torch Size",
    "torch.serialization _get_layout",
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    *(
        f"{_META} {name}"
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(f"torch {name}" for name in DTYPES),
}
_MARK = object()
_PUSHES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "INT", "LONG", "BINFLOAT", "FLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _MARK}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name(NamedTuple):
    """A class or function that the pickle names."""

    text: str


class _Object:
    """A record of the object that the pickle would build by calling a class or function; nothing is called."""

    def __init__(self, name: _Name, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name.text, arguments
        self.state: Any = None


def parse_metadata(content: bytes) -> Index:
    """Returns the tensors by key; objects that are not tensors are left out.

    Raises:
        CheckpointError: the content is not valid metadata, or names something other than torch's metadata classes.
    """
    try:
        return _index(_Machine().run(content))
    except CheckpointError:
        raise
    except Exception as damage:  # `pickletools` raises many types for invalid content
        raise CheckpointError(f"{METADATA} makes no sense ({type(damage).__name__}: {str(damage)[:200]})") from None


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                (result,) = self._stack
                return result
            self._step(opcode.name, argument)
        raise ValueError("no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _PUSHES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[argument])
        elif name in ("APPEND", "APPENDS"):
            values = self._pop(1) if name == "APPEND" else self._to_mark()
            _exactly(stack[-1], list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            self._set_items(self._pop(2) if name == "SETITEM" else self._to_mark())
        else:
            self._object(name, argument)

    def _object(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name == "GLOBAL":
            stack.append(_allowed(argument))
        elif name == "STACK_GLOBAL":
            stack.append(_allowed(" ".join(_exactly(name_part, str) for name_part in self._pop(2))))
        elif name in ("NEWOBJ", "REDUCE"):
            called, arguments = self._pop(2)
            stack.append(_Object(_exactly(called, _Name), _exactly(arguments, tuple)))
        elif name == "BUILD":
            (state,) = self._pop(1)
            record = _exactly(
                stack[-1], _Object
            )  # never a class: setting state on a class would affect the whole process
            if record.state is not None:
                raise ValueError("an object is built twice")
            record.state = state
        else:
            raise CheckpointError(
                f"{METADATA} has the instruction {name}, which no checkpoint needs: it is not opened."
            )

    def _pop(self, number: int) -> list[Any]:
        if len(self._stack) < number:
            raise ValueError("the stack is empty")
        values = self._stack[len(self._stack) - number :]
        del self._stack[len(self._stack) - number :]
        if any(value is _MARK for value in values):
            raise ValueError("a mark in place of a value")
        return values

    def _to_mark(self) -> list[Any]:
        position = max(i for i, value in enumerate(self._stack) if value is _MARK)
        values = self._stack[position + 1 :]
        del self._stack[position:]
        return values

    def _set_items(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is _Object and target.name == "collections OrderedDict":
            if target.state is None:
                target.state = {}
            target = target.state
        _exactly(target, dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            # Only these keys are allowed: hashing deeply nested tuples would crash the process.
            target[_Key(key) if type(key) is _Object else _exactly(key, str)] = value


class _Key:
    """A `MetadataIndex` as the key of a dict."""

    def __init__(self, record: _Object) -> None:
        self.record = record


def _allowed(text: str) -> _Name:
    if text not in _CLASSES:
        raise CheckpointError(
            f"{METADATA} of the checkpoint names {text.replace(' ', '.')}, which no checkpoint needs: it is not opened."
        )
    return _Name(text)


def _exactly(value: Any, expected: type) -> Any:
    if type(value) is not expected:
        raise ValueError(f"{type(value).__name__} in place of {expected.__name__}")
    return value


# --- the index from the records


def _index(metadata: Any) -> Index:
    fields = _state(metadata, f"{_META} Metadata")
    places = {}
    for key, info in _exactly(fields["storage_data"], dict).items():
        about = _state(_exactly(key, _Key).record, f"{_META} MetadataIndex")
        offset = about.get("offset")
        storage_info = _state(info, "torch.distributed.checkpoint.filesystem _StorageInfo")
        name = (
            _exactly(storage_info["relative_path"], str),
            *whole_numbers((storage_info["offset"], storage_info["length"])),
        )
        places[_exactly(about["fqn"], str), None if offset is None else _size(offset)] = name
    return {
        _exactly(key, str): _tensor(key, about, places)
        for key, about in _exactly(fields["state_dict_metadata"], dict).items()
        if _exactly(about, _Object).name != f"{_META} BytesStorageMetadata"  # which torch would unpickle
    }


def _tensor(key: str, record: Any, places: dict[Any, Any]) -> StoredTensor:
    fields = _state(record, f"{_META} TensorStorageMetadata")
    chunks = []
    for chunk in _exactly(fields["chunks"], list):
        about = _state(chunk, f"{_META} ChunkStorageMetadata")
        offsets = _size(about["offsets"])
        chunks.append(Chunk(offsets, _size(about["sizes"]), *places[key, offsets]))
    properties = _exactly(fields["properties"], _Object)
    if properties.name != f"{_META} TensorProperties":
        raise ValueError("no properties")
    dtype = _exactly(_exactly(properties.state, tuple)[0], _Name).text.removeprefix("torch ")
    return StoredTensor(DTYPES[dtype], _size(fields["size"]), chunks)


def _state(record: Any, name: str) -> dict[str, Any]:
    if _exactly(record, _Object).name != name:
        raise ValueError(f"{record.name} in place of {name}")
    return _exactly(record.state, dict)


def _size(record: Any) -> tuple[int, ...]:
    if _exactly(record, _Object).name != "torch Size":
        raise ValueError(f"{record.name} in place of torch Size")
    (numbers,) = record.arguments
    return whole_numbers(numbers)
