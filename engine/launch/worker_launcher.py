"""The launcher of workers, which the user's process spawns or forks, and the results that they return to it."""

import faulthandler
import gc
import logging
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.strategies.launchers import multiprocessing as launchers
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.nn.parameter import is_lazy

# Lightning: the private launcher that its own DDPStrategy uses.
from .._compat.lightning import _MultiProcessingLauncher
from ..checkpoint import get_random_state
from ..distributed.environment import (
    child_environment,
    compute_with_one_thread,
    owns_master_port,
    reserve_port,
    shows_all_frames,
)
from ..initialization import make_room
from ..reliability.failure import report_failure, watch_parent
from ..reliability.hard_exit import end_tree
from ..reliability.rendezvous import listen, serve
from ..reliability.signals import STOPPED
from ..reliability.tracebacks import shorten

__all__ = ["WorkerLauncher", "check_forks"]

_INTERRUPTED_S = 3.0
"""The time limit for workers to end after Ctrl-C."""
_TICK_S = 0.05
_UNGUARDED = 96
"""Exit code of a worker that ran the script from its first line, and so would start workers itself."""
_NO_GUARD = """\
strategy {strategy!r} starts workers that run this script from its first line, so they reach this call themselves:
put the start of training under `if __name__ == "__main__":`, or leave out _spawn."""
_USED = """\
strategy {strategy!r} forks its processes from this one, which has used {module}; after that no fork can use it, or
train where it is. In a notebook, restart the kernel and train before anything moves to a device; in a script, leave out
the suffix of the strategy."""


def check_forks(strategy: Any, modules: Sequence[Any] = (torch.cuda, torch.xpu)) -> None:
    """Checks that this process has used no device yet of those that forks of a process can't share with it.

    Lightning has its workers read the generators of all devices, those of a CPU run, too.

    Raises:
        RuntimeError: it has.
    """
    for module in modules:
        if module.is_initialized():
            raise RuntimeError(_USED.format(strategy=strategy, module=module.__name__))


def _has_native_threads() -> bool:
    """Whether this process has threads that Python has not started, as those of OpenMP; False where it is unknown."""
    try:
        return len(os.listdir("/proc/self/task")) > threading.active_count()
    except OSError:
        return False


class _Stored:
    """Results of a worker in a file: a queue would share memory of a process that has ended."""

    def __init__(self, results: Any) -> None:
        self.path = os.path.join(tempfile.mkdtemp(), "results.pt")
        torch.save(results, self.path)

    def take(self) -> Any:
        try:
            # Any objects: this run's worker has just written them, to a folder that only this user can access.
            return torch.load(self.path, weights_only=False)
        finally:
            shutil.rmtree(os.path.dirname(self.path))


class _Workers(mp.ProcessContext):
    """Worker processes; some may fail without ending the others."""

    def __init__(
        self, started: mp.ProcessContext, can_lose: Callable[[int, int], bool], has_results: Callable[[], bool]
    ) -> None:
        super().__init__(started.processes, started.error_files)
        self._can_lose = can_lose
        self._has_results = has_results
        self._lost: list[int] = []

    def join(self, *args: Any, **kwargs: Any) -> bool:
        for sentinel in wait(self.sentinels) if self.sentinels else ():
            index = self.sentinels[sentinel]
            self.processes[index].join()
            code = self.processes[index].exitcode
            is_last = len(self.sentinels) == 1 and not self._has_results()
            if code and not is_last and self._can_lose(index, code):
                del self.sentinels[sentinel]
                self._lost.append(index)
                return not self.sentinels
        try:
            are_done = super().join(*args, **kwargs)
            if are_done and self._lost and not self._has_results():
                raise self._no_results()
            return are_done
        except (ProcessExitedException, ProcessRaisedException) as ended:
            if isinstance(ended, ProcessRaisedException) and not shows_all_frames():
                ended.msg = shorten(ended.msg)
                ended.args = (ended.msg,)
            earlier = [index for index in self._lost if os.path.exists(self.error_files[index])]
            if not earlier or getattr(ended, "exit_code", None) == STOPPED:
                raise
            text = str(ended)
            for index in earlier:  # perhaps the run needed it then, and the others have ended because of it
                with open(self.error_files[index], "rb") as file:
                    exception = pickle.load(file)  # noqa: S301 - what torch has written
                text += f"\n\nBefore that, process {index} had failed:\n{exception}"
            raise ProcessRaisedException(text, ended.error_index, ended.error_pid) from None

    def _no_results(self) -> ProcessExitedException:
        last = self._lost[-1]
        process = self.processes[last]
        reason = f"process {last} was lost when the run was over, before it had returned the results"
        return ProcessExitedException(reason, last, process.pid or 0, process.exitcode or 0)


@contextmanager
def _joining(can_lose: Callable[[int, int], bool], on_started: Callable[[], Any]) -> Iterator[None]:
    """In this context, started workers are joined as `_Workers`.

    Args:
        can_lose: whether the run continues without a worker that has ended with an exit code.
        on_started: called when all workers were started; what it returns is kept until the context is left.
    """
    # Lightning: _MultiProcessingLauncher.launch calls torch.multiprocessing.start_processes, and joins them itself.
    start = mp.start_processes
    torchs = logging.getLogger("torch.multiprocessing.spawn")  # it logs for each ended worker that another one failed
    level = torchs.level

    kept: list[Any] = []

    def started(*args: Any, **kwargs: Any) -> _Workers:
        results = kwargs["args"][4]  # Lightning: the queue for the results of the run
        workers = _Workers(start(*args, **kwargs), can_lose, lambda: not results.empty())
        kept.append(on_started())
        return workers

    mp.start_processes = started
    torchs.setLevel(logging.ERROR)
    try:
        yield
    finally:
        mp.start_processes = start
        torchs.setLevel(level)


@contextmanager
def _fork_allowed(strategy: Any) -> Iterator[None]:
    """Lets Lightning fork workers without a GPU, also in a process that was forked itself.

    Lightning asks torch, which considers CUDA unusable in such a process once the number of GPUs was queried.
    """
    check = launchers._check_bad_cuda_fork  # Lightning: _MultiProcessingLauncher.launch calls it before it forks
    if not isinstance(strategy.accelerator, CUDAAccelerator):
        launchers._check_bad_cuda_fork = lambda: None
    try:
        yield
    finally:
        launchers._check_bad_cuda_fork = check


@contextmanager
def _port_reserved(environment: Any) -> Iterator[None]:
    """Reserves a new port for the workers that are started in this context, unless one is set.

    The port of the last run of this process may be in use since.
    """
    # Lightning: LightningEnvironment keeps the port of its first launch in _main_port, and _MultiProcessingLauncher
    # leaves it in MASTER_PORT for all later launches.
    with owns_master_port(environment) as is_ours:
        if not is_ours:
            yield
            return
        with reserve_port(environment):
            try:
                yield
            finally:
                environment._main_port = -1


_before: list[Any] = []
"""The SIGTERM handlers that this process had before it started workers that are still alive."""


@contextmanager
def _sigterm_calls(handler: Callable[..., None]) -> Iterator[None]:
    """Calls `handler` when this process gets a SIGTERM."""
    if threading.current_thread() is not threading.main_thread():  # no other thread may set handlers
        yield
        return
    _before.append(signal.signal(signal.SIGTERM, handler))
    try:
        yield
    finally:
        _restore_sigterm()


def _display_in_cell() -> None:
    """Has a fork of a notebook's kernel display tables, bars and pictures in the cell, where its printed lines go."""
    ipython: Any = sys.modules.get("IPython")
    kernel = getattr(ipython and ipython.get_ipython(), "kernel", None)
    if kernel is not None:
        # ipykernel drops displays of forked processes, with a warning on the server's terminal.
        kernel.session.check_pid = False


def _restore_sigterm() -> None:
    signal.signal(signal.SIGTERM, _before.pop() or signal.SIG_DFL)


class WorkerLauncher(_MultiProcessingLauncher):
    """Starts workers by spawn or fork; reports failed ones, and returns whole weights, sharded or not."""

    returns_predictions = True
    """Whether `predict` may return its outputs, which Lightning's own launchers of workers refuse."""
    _is_stopping = False
    _needs_one_thread = False
    """Whether forks must compute with one thread, because this process has computed with several."""
    _callbacks: "dict[str, _Stored]"
    """States of the callbacks at the end of training, by their keys."""
    _engine_state: "_Stored | None" = None
    """The engine's own state at the end of training, in the worker that returns the results."""
    outlives_ranks = True
    """Whether this process is none of the ranks, and could tell them after any of them has ended."""
    _results_of_rank_0: Any = None
    _failures = ""
    """Folder to which workers write their exceptions."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Starts the workers, and returns what the function returns on rank 0."""
        # multiprocessing: set in a worker that runs the script again, since the script has no ``__main__`` guard.
        # Lightning checks the same attribute, but its message is longer.
        if self._start_method == "spawn" and getattr(mp.current_process(), "_inheriting", False):
            sys.exit(_UNGUARDED)  # the parent prints the reason
        if self._start_method == "spawn":
            _pickle_generators()
        else:
            check_forks(self._strategy)
            self._needs_one_thread = torch.get_num_threads() > 1 and _has_native_threads()
        self._failures = tempfile.mkdtemp()
        self._strategy.random_state_at_launch = get_random_state()  # type: ignore[attr-defined]
        try:
            return self._launch(function, *args, trainer=trainer, **kwargs)
        except ProcessRaisedException as raised:
            raised.__cause__ = self._first_exception(raised.error_index)
            raise
        finally:
            self._strategy.random_state_at_launch = None  # type: ignore[attr-defined]
            shutil.rmtree(self._failures, ignore_errors=True)

    def _launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        try:
            with (
                _port_reserved(self._strategy.cluster_environment),
                child_environment(num_nodes=self._strategy.num_nodes),  # type: ignore[attr-defined]
                _sigterm_calls(self._stop),
                self._store() as serve_store,
                _joining(self._can_lose, serve_store),
                _fork_allowed(self._strategy),
            ):
                results = super().launch(function, *args, trainer=trainer, **kwargs)
            return results.take() if isinstance(results, _Stored) else results
        except ProcessExitedException as ended:
            # SIGTERM has ended workers that had no handler yet.
            if ended.exit_code == STOPPED or (self._is_stopping and ended.exit_code == -signal.SIGTERM):
                raise SIGTERMException(STOPPED) from None
            if ended.exit_code == _UNGUARDED:
                reason = _NO_GUARD.format(strategy=self._strategy)
                raise ProcessExitedException(reason, ended.error_index, ended.error_pid, ended.exit_code) from None
            raise
        except KeyboardInterrupt:
            self._stop_workers()
            raise
        except BaseException:
            self.kill(signal.SIGKILL)  # nobody waits for them any more, but they may wait for each other
            raise

    @contextmanager
    def _store(self) -> Iterator[Callable[[], Any]]:
        """Context with a function that opens the job's store in this process, which outlives each worker.

        The ranks connect to a port that listens from now on, and are answered when all of them were started: a fork
        must not have the locks of the store's thread.
        """
        environment: Any = self._strategy.cluster_environment
        if not self._strategy.survives_losses:  # type: ignore[attr-defined]
            yield lambda: None
            return
        listening = listen(environment.main_address, environment.main_port)
        try:
            yield lambda: serve(listening)
        finally:
            listening.close()

    def _can_lose(self, worker: int, code: int) -> bool:
        """Whether the run continues without a worker that has ended with an exit code; minus a signal's number."""
        strategy: Any = self._strategy
        is_killed = code < 0 and not self._is_stopping
        return strategy.can_lose(worker) or (strategy.survives_losses and is_killed)

    def _stop(self, signum: int, _: Any) -> None:
        """Asks the workers to stop; they save their state before they end."""
        self._is_stopping = True
        if not any(worker.is_alive() for worker in self.procs):
            raise SIGTERMException(STOPPED)
        self.kill(signum)

    def _stop_workers(self) -> None:
        """Waits until workers have stopped after their step because of Ctrl-C; pressed again, for a moment only."""
        try:
            self.kill(signal.SIGTERM)  # they received Ctrl-C, too, unless it was sent to this process only
            for worker in self.procs:
                worker.join()
        except KeyboardInterrupt:
            self._end_workers(_INTERRUPTED_S)

    def _end_workers(self, patience_s: float) -> None:
        """Waits for the workers to end, and kills those that don't."""
        deadline = time.monotonic() + patience_s
        while any(worker.is_alive() for worker in self.procs) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        for worker in self.procs:
            if worker.is_alive() and worker.pid is not None:
                end_tree(worker.pid)

    # Lightning: _MultiProcessingLauncher._wrapping_function runs in each worker, outside of the trainer's own handling
    # of exceptions, so callbacks don't see them there.
    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any, **kwargs: Any) -> None:
        watch_parent(process_idx, grace_s=0.0)
        if self._start_method == "fork":
            gc.freeze()  # collected here, the parent's dropped groups and stores would join threads that only it has
            if self._needs_one_thread:  # the parent's threads of OpenMP are not here, and it would wait for them
                compute_with_one_thread()
            _display_in_cell()
        else:
            _pickle_generators()  # as do its loaders' workers
        if not faulthandler.is_enabled():  # a fork: other processes read it from the environment
            faulthandler.enable(file=2)
        if _before:  # a fork of the parent
            _restore_sigterm()
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
            if self._results_of_rank_0 is not None and process_idx > 0:  # the first worker was lost
                args[3].put(self._results_of_rank_0)  # Lightning: the queue for the results of the run
        except SIGTERMException:
            sys.exit(STOPPED)  # with exit code 0, the parent would wait for a result
        except BaseException as exception:
            report_failure(exception, print_traceback=False)  # the parent raises it, with this worker's traceback
            with suppress(Exception):  # an exception that can't be pickled stays in this process
                self._keep(process_idx, exception)
            raise
        finally:
            _finish_experiments(trainer)

    def _keep(self, worker: int, exception: BaseException) -> None:
        """Stores this worker's exception for the parent, which otherwise has only its traceback as text."""
        with open(os.path.join(self._failures, str(worker)), "wb") as file:
            file.write(pickle.dumps(exception))

    def _first_exception(self, worker: int) -> BaseException | None:
        with suppress(Exception), open(os.path.join(self._failures, str(worker)), "rb") as file:
            exception = pickle.load(file)  # noqa: S301 - this run's worker has just written it, to this user's folder
            return exception if isinstance(exception, BaseException) else None
        return None

    # Lightning: _MultiProcessingLauncher._collect_rank_zero_results gets the weights from the module, which has only
    # rank 0's shards; the strategy gathers them.
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        state = trainer._checkpoint_connector.state_for_parent()  # type: ignore[attr-defined]
        self._engine_state = None if state is None or self._strategy.local_rank else _Stored(state)
        self._callbacks = _states_of_callbacks(trainer)
        if trainer.state.fn == TrainerFn.PREDICTING and results is not None and self._strategy.local_rank == 0:
            results = _Stored(results)
        state_dict = self._strategy.lightning_module_state_dict()
        module = trainer.lightning_module
        buffers = {name for name, _ in module.named_buffers()}
        self._shapes = {
            name: _Shape(tuple(value.shape), value.dtype, name in buffers)
            for name, value in state_dict.items()
            if isinstance(value, Tensor)
        }
        module.state_dict = lambda *args, **kwargs: state_dict  # type: ignore[method-assign, assignment]
        try:
            self._results_of_rank_0 = super()._collect_rank_zero_results(trainer, results)
            return self._results_of_rank_0
        finally:
            del module.state_dict

    # Lightning: _MultiProcessingLauncher._recover_results_in_main_process loads the weights into the module.
    def _recover_results_in_main_process(self, worker_output: Any, trainer: Trainer) -> None:
        shapes = worker_output.extra["shapes"].take()
        if worker_output.weights_path is not None:
            module = trainer.lightning_module
            make_room(module)
            _make_places(module, shapes)
            if str(trainer.precision).endswith("-true"):  # as in the workers: the weights would be rounded to 32 bits
                trainer.precision_plugin.convert_module(module)
        super()._recover_results_in_main_process(worker_output, trainer)

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        """Returns, in a worker, what the parent takes over; Lightning's are only the metrics of callbacks."""
        progress = {name: tracker.state_dict() for name, tracker in _progress(trainer).items()}
        return {
            **super().get_extra_results(trainer),
            "progress": progress,
            "num_logged_steps": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "callbacks": self._callbacks,
            "engine_state": self._engine_state,
            "logged_metrics": _Stored(apply_to_collection(trainer.logged_metrics, Tensor, Tensor.cpu)),
            "progress_bar_metrics": trainer.progress_bar_metrics,
            # In a file: the parent reads the queue when its workers have ended, which a full pipe would keep them from.
            "shapes": _Stored(self._shapes),
        }

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        """Takes over the results of the workers in this process."""
        connector = trainer._logger_connector
        connector.reset_metrics()  # as each run of one process does: none of an earlier run is left
        super().update_main_process_results(trainer, extra)
        connector.logged_metrics.update(extra["logged_metrics"].take())
        connector._progress_bar_metrics = extra["progress_bar_metrics"]
        for name, tracker in _progress(trainer).items():
            tracker.load_state_dict(extra["progress"][name])
        # Lightning: the step under which loggers get values.
        trainer.fit_loop.epoch_loop._batches_that_stepped = extra["num_logged_steps"]
        if extra["engine_state"] is not None:
            trainer._checkpoint_connector.state_of_workers = extra["engine_state"].take()  # type: ignore[attr-defined]
        _take_over(trainer, extra["callbacks"])


def _states_of_callbacks(trainer: Any) -> dict[str, _Stored]:
    """Stores what callbacks declare as their state, in a worker; all ranks call it, for a callback may gather."""
    states = {}
    for callback in trainer.callbacks if trainer.state.fn == TrainerFn.FITTING else ():
        if isinstance(callback, StochasticWeightAveraging):
            continue  # its average belongs to the run, and is the module's weights by now
        with _naming_state_of(callback):
            state = apply_to_collection(callback.state_dict(), Tensor, Tensor.cpu)
            if state and trainer.strategy.local_rank == 0:
                states[callback.state_key] = _Stored(state)
    return states


def _take_over(trainer: Any, states: dict[str, _Stored]) -> None:
    """Gives callbacks the state that they have in the workers, as if they had been in this process."""
    for callback in trainer.callbacks:
        if callback.state_key in states:
            with _naming_state_of(callback):
                state = states[callback.state_key].take()
                if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                    callback.dirpath = state["dirpath"]  # Lightning: else it does not take over the rest
                callback.load_state_dict(state)


@contextmanager
def _naming_state_of(callback: Callback) -> Iterator[None]:
    """Turns an error of the user's `state_dict` or `load_state_dict` after a run, which is good, into a warning."""
    try:
        yield
    except Exception as error:
        rank_zero_warn(
            f"The state of {type(callback).__name__} stays in the worker, since it can't be moved to this process:"
            f" {type(error).__name__}: {error}."
        )


def _finish_experiments(trainer: Trainer | None) -> None:
    """Flushes logs of Weights & Biases, which it does itself only when Python exits; a worker never does."""
    for logger in trainer.loggers if trainer is not None else ():
        # Lightning: WandbLogger._experiment is None if nothing was logged.
        experiment = logger._experiment if isinstance(logger, WandbLogger) else None
        if experiment is not None:
            experiment.finish()


class _Shape(NamedTuple):
    """The shape of a tensor of the workers' module."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_buffer: bool


def _make_places(module: LightningModule, shapes: dict[str, _Shape]) -> None:
    """Makes what the workers' module has and this one has not, by the hooks that may make layers; warns of the rest.

    Lightning loads the weights without a word about names that only one of the two modules has.
    """
    failure = ""
    # Lightning calls both before each run of one process, so a module has to bear it.
    for name, arguments in (("configure_model", ()), ("setup", ("fit",))):
        if shapes.keys() - module.state_dict().keys():
            try:
                getattr(module, name)(*arguments)
            except Exception as error:  # it may need what only the run has, whose other results are to be returned
                failure = f" ({name} failed here: {error!r})"
    _take_shapes(module, shapes)
    if lost := sorted(shapes.keys() - module.state_dict().keys()):
        rank_zero_warn(
            f"The processes of the run have trained a module with {', '.join(lost[:5])}{', ...' if lost[5:] else ''},"
            f" which the module of this process has not{failure}. These values are lost here, and a later run begins"
            " without them. Make layers in __init__, setup or configure_model; checkpoints of the run have all values."
        )


def _take_shapes(module: nn.Module, shapes: dict[str, _Shape]) -> None:
    """Gives parameters and buffers the shapes that they have in the workers' module: buffers may grow in training.

    Buffers that the workers have registered, or filled where there was None, are created.
    """
    owners = dict(module.named_modules())
    for name, (shape, dtype, is_buffer) in shapes.items():
        path, _, key = name.rpartition(".")
        if path not in owners:  # a layer that the workers have added
            continue
        own = vars(owners[path])
        tensor = own["_parameters"].get(key) if key in own["_parameters"] else own["_buffers"].get(key)
        if tensor is not None and not is_lazy(tensor) and tensor.shape != shape:
            tensor.data = tensor.new_empty(shape)
        elif tensor is None and is_buffer:
            own["_buffers"][key] = torch.empty(shape, dtype=dtype)


def _progress(trainer: Trainer) -> dict[str, Any]:
    """The progress from which `current_epoch` and `global_step` are read, and which a second `fit` continues."""
    epochs, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop
    return {
        "epochs": epochs.epoch_progress,
        "batches": batches.batch_progress,
        "steps": batches.automatic_optimization.optim_progress,
        "manual_steps": batches.manual_optimization.optim_step_progress,
    }


# --- generators of spawned workers
# Pickles torch.Generator for workers that are spawned.
#
# torch pickles its state as a tensor in shared memory, which is freed before the worker opens it: with a loader that
# has a `generator`, or a StatefulDataLoader with `shuffle=True`, the worker ends with "unable to resize file".


def _pickle_generators() -> None:
    """Makes multiprocessing pickle generators with their states as bytes."""
    ForkingPickler.register(torch.Generator, _reduce)


def _reduce(generator: torch.Generator) -> tuple[Callable[..., torch.Generator], tuple[str, bytes]]:
    return _rebuild, (str(generator.device), generator.get_state().numpy().tobytes())


def _rebuild(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator
