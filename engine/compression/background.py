"""Runs functions beside backward, one after the other in the order in which they came."""

import atexit
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ..devices import module_of
from ..exiting import exit_at_once

__all__ = ["Background"]

_PATIENCE_S = 2.0
"""The seconds that a process that exits waits for its thread."""


_NUM_STREAMS = 2
"""While the collectives of one bucket are under way, the next bucket is compressed."""


class Background:
    """A thread on the CPU, where collectives block; streams on a GPU, where they don't.

    Functions of even and of odd places have a stream each. They are launched by one thread, so that their collectives,
    of which a group does one at a time, come in the same order on all ranks; what two in a row compute may overlap.

    Args:
        device: of the tensors that the functions work on.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = module_of(device)
        num_streams = _NUM_STREAMS if hasattr(self._module, "Stream") else 0
        self._streams = [self._module.Stream(device=device) for _ in range(num_streams)]
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Tensor], Future[Any]] | None] = queue.SimpleQueue()
        self._device = device
        if not self._streams:
            # A daemon, since it may be in a collective that other ranks never join when this process wants to exit.
            self._thread = threading.Thread(target=self._work, name="polyphase-compression", daemon=True)
            self._thread.start()
            _with_thread.append(self)

    def submit(self, function: Callable[[], Tensor], place: int = 0) -> Future[Tensor]:
        """The future of what `function` returns; an error of its is raised where the future is waited for.

        Args:
            function: called here, or in the thread.
            place: of what it works on, whose former functions are done before this one.
        """
        if not self._streams:
            done: Future[Any] = Future()
            self._tasks.put((function, done))
            return done.then(_result)
        stream = self._streams[place % len(self._streams)]
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream), torch.no_grad():
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(function())  # notes what the stream has still to do
        return future

    def wait(self) -> None:
        """Returns when all that was submitted is done; on an accelerator, has the current stream wait for it."""
        if not self._streams:
            self.submit(lambda: torch.empty(0)).wait()
        # Not by futures: where a function has raised amid its work, there is none that knows of that.
        for stream in self._streams:
            self._module.current_stream(self._device).wait_stream(stream)

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while (task := self._tasks.get()) is not None:
            function, done = task
            outcome: Any
            try:
                outcome = function()
            except BaseException as error:
                outcome = error
            done.set_result(outcome)
            del task, function, done, outcome  # not kept until the next task

    def end(self) -> None:
        """Ends the thread; or the process at once, if the thread waits for ranks that have failed."""
        self._tasks.put(None)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            exit_at_once()


_with_thread: list[Background] = []


@atexit.register
def _end_threads() -> None:
    # Torch ends a process by SIGABRT if a collective ends while the interpreter is being taken down.
    for background in _with_thread:
        background.end()


def _result(done: Future[Any]) -> Tensor:
    outcome = done.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
