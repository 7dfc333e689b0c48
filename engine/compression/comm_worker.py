"""Runs functions in the background during backward, in the order in which they were submitted."""

import atexit
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from ..devices import module_of
from ..reliability.hard_exit import hard_exit

__all__ = ["CommWorker"]

_PATIENCE_S = 2.0
"""Seconds that an exiting process waits for the thread."""


_NUM_STREAMS = 2
"""Number of streams, so that one bucket is compressed while the collectives of another are in flight."""


class CommWorker:
    """Uses a thread on the CPU, where collectives block, and streams on a GPU, where they do not.

    Functions with even and odd places use separate streams. One thread launches them, so that their collectives have
    the same order on all ranks; the computations of two successive functions may overlap.

    Args:
        device: the device of the functions' tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = module_of(device)
        num_streams = _NUM_STREAMS if hasattr(self._module, "Stream") else 0
        self._streams = [self._module.Stream(device=device) for _ in range(num_streams)]
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Tensor], Future[Any]] | None] = queue.SimpleQueue()
        self._device = device
        if not self._streams:
            # A daemon, since at exit it may still wait in a collective that other ranks never join.
            self._thread = threading.Thread(target=self._work, name="polyphase-compression", daemon=True)
            self._thread.start()
            _with_thread.append(self)

    def submit(self, function: Callable[[], Tensor], place: int = 0) -> Future[Tensor]:
        """Returns the future of `function`'s result; an error of the function is raised by waiting for the future.

        Args:
            function: called here, or in the thread.
            place: index of the data that it works on; earlier functions with this index finish first.
        """
        if not self._streams:
            done: Future[Any] = Future()
            self._tasks.put((function, done))
            return done.then(_result)
        stream = self._streams[place % len(self._streams)]
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream), torch.no_grad():
            future: Future[Tensor] = Future(devices=[self._device])
            future.set_result(function())  # the future records the pending work of the stream
        return future

    def wait(self) -> None:
        """Waits for all submitted functions; on an accelerator, the current stream waits instead of the host."""
        if not self._streams:
            self.submit(lambda: torch.empty(0)).wait()
        # Waits for streams, not futures: if a function raised after launching work, no future covers that work.
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
            del task, function, done, outcome  # frees their memory before the next task

    def end(self) -> None:
        """Ends the thread; ends the process at once if the thread waits for ranks that have failed."""
        self._tasks.put(None)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            hard_exit()


_with_thread: list[CommWorker] = []


@atexit.register
def _end_threads() -> None:
    # Torch aborts the process (SIGABRT) if a collective ends during interpreter shutdown.
    for background in _with_thread:
        background.end()


def _result(done: Future[Any]) -> Tensor:
    outcome = done.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
