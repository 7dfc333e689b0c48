"""Runs graphs without a compiler of C++. In a file of its own, since torch's counter takes long to import."""

import pytest
from torch._dynamo.testing import CompileCounterWithBackend

from polyphase.engine.loop import compile


def eager_graphs(monkeypatch: pytest.MonkeyPatch, backend: str = "aot_eager") -> CompileCounterWithBackend:
    """Has graphs run without a compiler of C++, which takes a minute; the result counts them."""
    compiled = CompileCounterWithBackend(backend)
    monkeypatch.setattr(compile._Backend, "_compile_graph", lambda self, graph, inputs: compiled(graph, inputs))
    return compiled
