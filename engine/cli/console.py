"""Ends a command with an error and exit code 2."""

import sys
from typing import NoReturn

__all__ = ["exit_with"]


def exit_with(message: str) -> NoReturn:
    """Prints an error and ends with exit code 2, which means that the command line is wrong."""
    print(f"polyphase: error: {message}", file=sys.stderr)
    sys.exit(2)
