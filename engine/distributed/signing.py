"""Signatures of the messages between ranks, with the job's secret: other processes can write to the same store.

The signature is the HMAC-SHA256 (RFC 2104) of the message and of its key, so that a message is valid under one key
only. A job without a secret (see `environment.job_secret`) checks only the form of its messages.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from .environment import job_secret

__all__ = ["MOST_BYTES", "Fields", "parsed", "signed", "verified"]

Fields = Mapping[str, type | tuple[type, ...]]
"""Names and types of the fields that a message must have; it may have more."""

MOST_BYTES = 2_000_000
"""The largest size of a message: the stack of a recursive thread has thousands of lines."""
_MOST_DEPTH = 8
_SIGNATURE_BYTES = hashlib.sha256().digest_size


def signed(key: str, content: bytes) -> bytes:
    """Returns `content` with its signature in front.

    Args:
        key: under which the message will be read.
        content: at most `MOST_BYTES` bytes, if it goes into a store.
    """
    return _signature(key, content) + content


def verified(key: str, message: bytes) -> bytes | None:
    """Returns the content of a signed message; None if the signature is not of this job and this key."""
    signature, content = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
    return content if hmac.compare_digest(signature, _signature(key, content)) else None


def parsed(content: bytes, fields: Fields, num_ranks: int) -> dict[str, Any] | None:
    """Parses a message of JSON; returns None if it is no object, lacks one of `fields`, or names an unknown rank.

    Args:
        content: UTF-8.
        fields: names and types; the fields ``"rank"`` and ``"by"`` are ranks.
        num_ranks: number of ranks.
    """
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not _is_plain(message, _MOST_DEPTH):
        return None
    for name, kind in fields.items():
        value = message.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            return None
    ranks = [message[name] for name in ("rank", "by") if name in fields]
    return message if all(0 <= rank < num_ranks for rank in ranks) else None


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return True


def _signature(key: str, content: bytes) -> bytes:
    # Without a secret it is a checksum.
    return hmac.digest(job_secret() or b"polyphase", f"{len(key)}:{key}".encode() + content, "sha256")
