"""Words that ranks leave for each other where others can write too: checked, and signed with the job's secret.

HMAC-SHA256 (RFC 2104) of the word and of the place where it stands, so that no word counts anywhere else. A job without
a secret (see `environment.job_secret`) checks only what its words look like.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

from ..environment import job_secret

__all__ = ["MOST_BYTES", "Fields", "opened", "parsed", "signed"]

Fields = Mapping[str, type | tuple[type, ...]]
"""Names and types of the fields that a word must have; it may have more."""

MOST_BYTES = 2_000_000
"""The longest word: the stack of a thread that recurses has thousands of lines."""
_MOST_DEPTH = 8
_SIGNATURE_BYTES = hashlib.sha256().digest_size


def signed(place: str, content: bytes) -> bytes:
    """`content`, behind its signature.

    Args:
        place: where it will be read.
        content: at most `MOST_BYTES` in a store.
    """
    return _signature(place, content) + content


def opened(place: str, message: bytes) -> bytes | None:
    """Returns the content of a signed message; None if its signature is not the one of this job and this place."""
    signature, content = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
    return content if hmac.compare_digest(signature, _signature(place, content)) else None


def parsed(content: bytes, fields: Fields, num_ranks: int) -> dict[str, Any] | None:
    """The JSON object that `content` is; None if it is none, or lacks one of `fields`, or names a rank there isn't.

    Args:
        content: UTF-8.
        fields: names and types; those called ``"rank"`` and ``"by"`` are ranks.
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


def _signature(place: str, content: bytes) -> bytes:
    # Without a secret it is a checksum.
    return hmac.digest(job_secret() or b"polyphase", f"{len(place)}:{place}".encode() + content, "sha256")
