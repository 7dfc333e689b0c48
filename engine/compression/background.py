"""Runs functions beside backward, one after the other in the order in which they came."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

__all__ = ["Background"]


class Background:
    """A thread on the CPU, where collectives block; a stream on a GPU, where they don't.

    Args:
        device: of the tensors that the functions work on.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Tensor], Future[Any]]] = queue.SimpleQueue()
        self._device = device
        if self._stream is None:
            # A daemon, since it may be in a collective that other ranks never join when this process wants to exit.
            threading.Thread(target=self._work, name="polyphase-compression", daemon=True).start()

    def submit(self, function: Callable[[], Tensor]) -> Future[Tensor]:
        """The future of what `function` returns; an error of its is raised where the future is waited for."""
        if self._stream is None:
            done: Future[Any] = Future()
            self._tasks.put((function, done))
            return done.then(_result)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), torch.no_grad():
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(function())  # notes what the stream has still to do
        return future

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            function, done = self._tasks.get()
            outcome: Any
            try:
                outcome = function()
            except BaseException as error:
                outcome = error
            done.set_result(outcome)
            del function, done, outcome  # not kept until the next task


def _result(done: Future[Any]) -> Tensor:
    outcome = done.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
