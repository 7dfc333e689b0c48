"""`compile=`: the module's steps, or its units, compiled by `torch.compile`, under every strategy.

A step is compiled inside of DistributedDataParallel, whose buckets split the graph so that gradients are still sent
while backward runs (https://docs.pytorch.org/docs/stable/notes/ddp.html). If a strategy shards units, each unit's
forward is compiled instead, inside of its sharding hooks: all units of one class share one graph.

The processes of a node share inductor's cache on disk. The first process of a node compiles each graph before the
others read it from the cache. A graph break is reported once, with the line of the user's code.
"""

import functools
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import sized_len
from torch import Tensor

from .._compat.torch import tree_leaves
from ..flags import CompileMode, Layout
from ..strategies import EngineStrategy
from ..strategies.units import any_number_of_rows, mark_rows
from .hooks import bound, overridden

__all__ = ["CompileSteps", "check_cuda_graphs"]

_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""The modes that record CUDA graphs on a GPU."""
LOG_BREAK_REASON = "self.log stays outside of the graph"
"""The reason of the graph break at the engine's only function that is never compiled."""

_LOADERS = {
    "training_step": "train_dataloader",
    "validation_step": "val_dataloaders",
    "test_step": "test_dataloaders",
    "predict_step": "predict_dataloaders",
}
"""The steps, and the trainer's attributes with their loaders."""
_TIMEOUT_S = 300.0
"""The seconds that a process waits for the first process of its node to compile the same graph."""

_run_numbers = itertools.count()  # the same in all processes of a job

log = logging.getLogger("polyphase.engine")


def check_cuda_graphs(mode: CompileMode | None, layout: Layout, *, offloads: bool) -> None:
    """Checks that a mode's CUDA graphs can be replayed in each step.

    Raises:
        ValueError: the layout, or the offloading of activations, uses different memory in each step.
    """
    why_not = "offload='activations' brings back what they keep in other memory" if offloads else None
    if layout.shard > 1:
        why_not = f"a layout of {layout} gathers its parameters into other memory in each step"
    if layout.pp > 1:
        why_not = f"a layout of {layout} has several micro-batches on their way at once"
    if mode in _CUDA_GRAPH_MODES and why_not is not None:
        raise ValueError(
            f"compile={mode!r} records CUDA graphs, which read and write the same memory each time, and {why_not}:"
            " choose compile=True, or leave out the other."
        )


class CompileSteps(Callback):
    """Compiles the module's steps while a trainer runs.

    Args:
        mode: of `torch.compile`.
    """

    def __init__(self, mode: CompileMode) -> None:
        self.mode = mode
        self._copies: dict[Tensor, Tensor] = {}  # of gradients, by parameter

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replaces the module's steps by compiled ones; a strategy with units compiles the units instead."""
        strategy: EngineStrategy = trainer.engine_strategy  # type: ignore[attr-defined]
        backend = _Backend(self.mode, dist.is_initialized() and trainer.world_size > 1, trainer, strategy)
        strategy.compile = functools.partial(torch.compile, backend=backend)
        for name in _LOADERS:
            step = overridden(pl_module, LightningModule, name)
            if step is not None and name not in pl_module.__dict__:
                pl_module.__dict__[name] = _Compiled(pl_module, step, backend, strategy, trainer)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copies gradients out of the memory of a CUDA graph, if the next micro-batch adds to them.

        When the graph runs again, it overwrites them, which torch reports as an error. Later micro-batches add to the
        copies in place, so one copy per window is enough.
        """
        is_added_to = trainer.fit_loop._should_accumulate()
        if is_added_to and self.mode in _CUDA_GRAPH_MODES and pl_module.automatic_optimization:
            for parameter in pl_module.parameters():
                gradient = parameter.grad
                if gradient is not None and gradient is not self._copies.get(parameter):
                    self._copies[parameter] = parameter.grad = gradient.clone()
        else:
            self._copies.clear()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the module's own steps, and forgets CUDA graphs."""
        for name in _LOADERS:
            if isinstance(pl_module.__dict__.get(name), _Compiled):
                del pl_module.__dict__[name]
        self._copies.clear()
        vars(trainer.engine_strategy).pop("compile", None)  # type: ignore[attr-defined]
        if self.mode in _CUDA_GRAPH_MODES:
            # torch: a graph that returns a parameter returns the one it was recorded with, which is on the host by
            # then, and it is replayed for another module of this class whose parameters happen to have its addresses.
            torch.compiler.reset()


class _Compiled:
    """A compiled step; it calls the original one if the strategy compiles units."""

    def __init__(
        self,
        module: LightningModule,
        step: Callable[..., Any],
        backend: "_Backend",
        strategy: EngineStrategy,
        trainer: Trainer,
    ) -> None:
        functools.update_wrapper(self, step)
        self._module, self._trainer = module, trainer
        self._step = step
        self._compiled = torch.compile(step, backend=backend)
        self._backend = backend
        self._strategy = strategy
        self._loaders: Any = None
        self._is_short = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # another step calls this one
            return self._step(*args, **kwargs)
        self._backend.pending_breaks.clear()  # a break at the end of the last step has split no graph
        with any_number_of_rows(self._has_short_batches):
            if self._strategy.compiles_units:  # known only once the strategy has set up the module
                return self._step(*args, **kwargs)
            mark_rows((args, kwargs))
            return self._compiled(*args, **kwargs)

    @property
    def _has_short_batches(self) -> bool:
        """Whether the last batch of an epoch has fewer rows than the others: one graph is compiled for both."""
        loaders = getattr(self._trainer, _LOADERS[self._step.__name__])
        if loaders is not self._loaders:  # not in each step
            self._loaders, self._is_short = loaders, any(map(_has_short_batch, tree_leaves(loaders)))
        return self._is_short

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled module gets its original step.
        return bound, (getattr(self._step, "__func__", self._step), self._module)


def _has_short_batch(loader: Any) -> bool:
    batches = getattr(loader, "batch_sampler", None)
    num_rows, size = sized_len(getattr(batches, "sampler", None)), getattr(batches, "batch_size", None)
    if not num_rows or not isinstance(size, int) or getattr(batches, "drop_last", False):
        return False
    return num_rows > size and num_rows % size != 0


class _Backend(torch._TorchCompileInductorWrapper):  # torch: `torch.compile(mode=...)` uses it for "inductor"
    """Inductor, which compiles first in one process of a node, and reports graph breaks."""

    def __init__(self, mode: str, is_shared: bool, trainer: Trainer, strategy: EngineStrategy) -> None:
        super().__init__(mode, None, None)
        self._strategy = strategy
        self._num_graphs = 0
        self._is_first = trainer.local_rank == 0
        self._reports = trainer.is_global_zero
        self._reported: set[str] = set()
        self.pending_breaks: list[str] = []  # breaks at `self.log`, reported only if another graph follows
        # torch: the store of the default process group, which has no public name.
        store = dist.distributed_c10d._get_default_store() if is_shared else None
        prefix = f"polyphase/compile/{next(_run_numbers)}/{trainer.node_rank}"
        self._store = None if store is None else dist.PrefixStore(prefix, store)

    def __call__(self, model_: Any, inputs_: Any, **kwargs: Any) -> Any:
        self._report(model_)
        self._strategy.check_graph(model_)
        key = str(self._num_graphs)
        self._num_graphs += 1
        if self._store is not None and not self._is_first:
            self._wait(self._store, key)
        try:
            # Compile the backward graph together with the forward graph, so that the first process compiles both.
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                return self._compile_graph(model_, inputs_, **kwargs)
        finally:  # a graph that fails is run without the compiler, by all ranks together
            if self._store is not None and self._is_first:
                self._store.set(key, "1")

    def _compile_graph(self, graph: Any, inputs: Any, **kwargs: Any) -> Any:
        return super().__call__(graph, inputs, **kwargs)

    def _wait(self, store: dist.Store, key: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not store.check([key]):
            if time.monotonic() > deadline:
                log.warning("this node's first process has no graph %s; compiling it here", key)
                return
            time.sleep(0.02)

    def _report(self, graph: Any) -> None:
        """Reports the graph break before this graph, and the one that ends it."""
        # torch: an attribute that dynamo sets on each graph, for `torch._dynamo.explain`.
        pending_breaks, self.pending_breaks = self.pending_breaks, []
        reason = getattr(graph, "compile_subgraph_reason", None)
        # A break of DDPOptimizer is intended: it splits the graph for its buckets.
        if reason is not None and reason.graph_break and "DDPOptimizer" not in reason.reason:
            frame = reason.user_stack[-1] if reason.user_stack else None
            location = "" if frame is None else f' at {frame.filename}:{frame.lineno} in {frame.name}: "{frame.line}"'
            if LOG_BREAK_REASON in reason.reason:  # free at the end of a step, its usual place
                self.pending_breaks.append(f"self.log{location}; log after the computation, and the step is one graph")
            else:
                pending_breaks.append(f"{reason.reason.splitlines()[0]}{location}")
        for text in pending_breaks:
            if self._reports and text not in self._reported:
                self._reported.add(text)
                log.warning("compile: the graph of a step is split by %s", text)
