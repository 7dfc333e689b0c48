"""The `polyphase` command: torch is imported only to run a model, after its flags were checked."""

from .command import main

__all__ = ["main"]
