"""A checksum of batches. It shows whether a stream yields the same batches when it is read again.

A stream without a state is read again up to its position. Checkpoints may lack the generator that draws its order, for
example one that is seeded by the clock. Then the stream yields other samples, and the run would skip some samples.
"""

import zlib
from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["OTHER_BATCHES", "add_to_digest"]

OTHER_BATCHES = """\
{name} has no `state_dict`, and was read again up to its place; but it has yielded other batches than in the run that \
saved the checkpoint: its order, or its augmentation, depends on what no checkpoint has, such as a generator that is \
seeded by the clock (webdataset's `shuffle` without `seed`, and `shardshuffle` without `detshuffle=True`) or by the \
system's entropy. Resume at the end of an epoch, or load only the weights. For the next run, seed these generators; \
if only the augmentation draws so, have it draw from the global generators of torch, NumPy or Python, which \
checkpoints have, or augment in the module; or give the data set `state_dict` and `load_state_dict`, with which it is \
not read again."""
"""The error about a stream of the class `name`."""

_MOST = 64
"""Number of elements of a tensor, array or list in the checksum: a whole batch of images would take too long."""


def add_to_digest(digest: int, batch: Any) -> int:
    """Returns the checksum of the batches up to `batch`, given that of the batches before it."""
    parts: list[bytes] = []
    _add_parts(parts, batch)
    return zlib.crc32(b"".join(parts), digest)


def _add_parts(parts: list[bytes], value: Any) -> None:
    """Adds bytes that depend on a batch's type, size and contents; of unknown objects, on their type alone."""
    parts.append(type(value).__name__.encode())
    if isinstance(value, np.ndarray) and value.dtype != object:
        value = torch.from_numpy(_evenly(value.reshape(-1)).view(np.uint8).copy())
    if isinstance(value, Tensor):
        parts.append(str((value.dtype, tuple(value.shape))).encode())
        if value.layout == torch.strided and value.device.type == "cpu" and not value.is_quantized:
            flat = value.detach().resolve_conj().resolve_neg()
            parts.append(_evenly(flat.reshape(-1)).contiguous().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, (str, bytes)):
        parts.append(str(len(value)).encode())
        parts.append(value[:1024].encode(errors="replace") if isinstance(value, str) else value[:1024])
    elif isinstance(value, (bool, int, float, complex, np.generic)):
        parts.append(str(value).encode())
    elif isinstance(value, (list, tuple)):
        parts.append(str(len(value)).encode())
        for inner in value[:_MOST]:
            _add_parts(parts, inner)
    elif isinstance(value, Mapping):
        parts.append(str(len(value)).encode())
        for key, inner in islice(value.items(), _MOST):
            parts.append(str(key).encode())
            _add_parts(parts, inner)


def _evenly(flat: Any) -> Any:
    """Returns some elements of a tensor or an array of one dimension, at equal distances."""
    return flat[:: max(1, len(flat) // _MOST)]
