"""What all multi-process strategies share: which launcher starts them, and what comes back from spawned workers."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

# Imported before any process group exists: it binds the default group into function defaults, which would otherwise
# outlive `destroy_process_group` and abort the process at exit under gloo.
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Trainer

# Lightning: the two private launchers are the ones its own DDPStrategy uses.
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing import ProcessExitedException

from ..environment import is_started_again
from ..flags import LAUNCHERS, Layout
from .failure import announce
from .meeting import name_of_start

__all__ = ["LayoutStrategy", "end_group_at_exit"]

_STOPPED = 128 + signal.SIGTERM
"""Exit code of a process that was asked to stop, as shells have it."""


def end_group_at_exit() -> None:
    """Has this process end its process group before it exits.

    Gloo's threads may otherwise outlive the interpreter, and end a successful run by SIGABRT ("terminate called without
    an active exception"). Lightning does so for NCCL only.
    """
    atexit.register(_end_group)


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # FSDP leaves cycles that hold finished collectives; freed any later, they end in SIGABRT


class LayoutStrategy:
    """Mixin of a Lightning `ParallelStrategy` that has a `Layout` and is started by the launcher of its flag's suffix.

    The layout is derived when Lightning has told the strategy its devices, that is in the engine's constructor: sizes
    that don't fit are an error before any process starts.
    """

    layout: Layout
    launcher_suffix: str = ""

    def __repr__(self) -> str:  # as a flag, in Lightning's messages
        suffix = f"_{self.launcher_suffix}" if self.launcher_suffix else ""
        return repr(f"{type(self).__name__.lower()}{suffix}")

    def meet(self) -> None:
        """Starts the process group of a job that torchrun may start again; of others Lightning starts it."""
        if not is_started_again() or dist.is_initialized():
            return
        strategy: Any = self
        strategy.accelerator.setup_device(strategy.root_device)
        strategy.set_world_ranks()
        environment, timeout = strategy.cluster_environment, strategy._timeout
        store = dist.TCPStore(environment.main_address, environment.main_port, is_master=False, timeout=timeout)
        name = name_of_start(store, strategy.global_rank, strategy.world_size, timeout)
        dist.init_process_group(
            strategy._get_process_group_backend(),  # Lightning: DDPStrategy and ModelParallelStrategy have it
            store=dist.PrefixStore(name, store),
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            timeout=timeout,
            device_id=strategy.root_device if strategy.root_device.type != "cpu" else None,
        )
        rank_zero_info(f"Starting with {strategy.world_size} processes")

    def derive_layout(self, world_size: int) -> Layout:
        """The layout of `world_size` processes.

        Raises:
            ValueError: the flag's sizes don't multiply to `world_size`.
        """
        raise NotImplementedError

    def _configure_launcher(self) -> None:  # Lightning: Strategy._configure_launcher, called by its constructor
        num_processes, num_nodes = self.num_processes, self.num_nodes  # type: ignore[attr-defined]
        self.layout = self.derive_layout(num_processes * num_nodes)
        environment = self.cluster_environment  # type: ignore[attr-defined]
        start_method = LAUNCHERS[self.launcher_suffix]
        # Under torchrun or SLURM the processes are there already: the same script, suffix and all, runs in them.
        if start_method == "popen" or environment.creates_processes_externally:
            self._launcher: Any = _SubprocessScriptLauncher(environment, num_processes, num_nodes)
        elif start_method not in mp.get_all_start_methods():
            raise ValueError(
                f"strategy {self!r}: process forking is not supported on this platform; choose the suffix _spawn, or"
                " none."
            )
        else:
            self._launcher = _WorkerLauncher(self, start_method=start_method)  # type: ignore[arg-type]


class _Stored:
    """Results of a worker in a file: a queue would lend them out of the memory of a process that has ended."""

    def __init__(self, results: Any) -> None:
        self.path = os.path.join(tempfile.mkdtemp(), "results.pt")
        torch.save(results, self.path)

    def take(self) -> Any:
        try:
            # Any objects: a worker of ours has just written them, to a folder of this user's alone.
            return torch.load(self.path, weights_only=False)
        finally:
            shutil.rmtree(os.path.dirname(self.path))


class _WorkerLauncher(_MultiProcessingLauncher):
    """Starts workers by spawn or fork; a failed one is announced, and whole weights come back, sharded or not."""

    returns_predictions = True
    """What Lightning's own launchers of workers refuse to do."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        try:
            results = super().launch(function, *args, trainer=trainer, **kwargs)
            return results.take() if isinstance(results, _Stored) else results
        except ProcessExitedException as ended:
            if ended.exit_code == _STOPPED:
                raise SIGTERMException(_STOPPED) from None
            raise

    # Lightning: _MultiProcessingLauncher._wrapping_function runs in each worker, outside of the trainer's own handling
    # of exceptions, so callbacks don't see them there.
    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except SIGTERMException:
            sys.exit(_STOPPED)  # with its own code of 0, the parent would wait for a result
        except BaseException as exception:
            announce(exception, print_traceback=False)  # the parent raises it, with this worker's traceback
            raise

    # Lightning: _MultiProcessingLauncher._collect_rank_zero_results asks the module itself for its weights, which would
    # be rank 0's shards; the strategy gathers them.
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> Any:
        if trainer.state.fn == TrainerFn.PREDICTING and results is not None and self._strategy.local_rank == 0:
            results = _Stored(results)
        state_dict = self._strategy.lightning_module_state_dict()
        module = trainer.lightning_module
        module.state_dict = lambda *args, **kwargs: state_dict  # type: ignore[method-assign, assignment]
        try:
            return super()._collect_rank_zero_results(trainer, results)
        finally:
            del module.state_dict
