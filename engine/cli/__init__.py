"""The `polyphase` command: torch is imported to run a model, not before its flags are checked."""

from .command import main

__all__ = ["main"]
