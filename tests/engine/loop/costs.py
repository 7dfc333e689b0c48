"""Counts what a step costs: reads of the host from tensors, collectives of every process group, calls in Python."""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset

# On a CPU `tolist` and `numpy` read memory without any operator, on a device they wait for it.
_READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__bool__}
_READING_OPS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default}


class _Calls(TorchFunctionMode):
    def __init__(self, reads: Counter) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _READS:
            self.reads[function.__name__] += 1
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, reads: Counter) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator in _READING_OPS:
            self.reads[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


class Costs(Callback):
    """What each micro-batch cost, from its start to the start of the next one; the last one to the end of its epoch.

    Args:
        folder: where each rank writes `costs-<rank>.json`; None for no file.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.reads: list[int] = []
        self.collectives: list[int] = []
        self._marks: list[tuple[int, int]] = []
        self._counted = Counter()

    def on_train_start(self, trainer, pl_module):
        self._modes = [_Calls(self._counted), _Operators(self._counted)]
        for mode in self._modes:
            mode.__enter__()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._marks.append((self._counted.total(), num_collectives()))

    def on_train_epoch_end(self, trainer, pl_module):
        self.on_train_batch_start(trainer, pl_module, None, 0)
        for before, after in zip(self._marks, self._marks[1:], strict=False):
            self.reads.append(after[0] - before[0])
            self.collectives.append(after[1] - before[1])
        self._marks.clear()

    def on_train_end(self, trainer, pl_module):
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        if self.folder is not None:
            costs = {"reads": self.reads, "collectives": self.collectives}
            (self.folder / f"costs-{trainer.global_rank}.json").write_text(json.dumps(costs))


def num_collectives() -> int:
    """Collectives that this process has started so far, in all of its groups."""
    if not dist.is_initialized():
        return 0
    groups = dist.distributed_c10d._world.pg_map  # torch: every group of the process
    return sum(group._get_sequence_number_for_group() for group in groups)


@contextmanager
def counted_calls() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Counts the functions of Python that are called meanwhile: by this thread, and by those that begin meanwhile."""
    counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()

    def counting(of_thread: Counter[str]) -> Callable[[Any, str, Any], None]:
        def count(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                of_thread[f"{frame.f_code.co_name} ({frame.f_code.co_filename})"] += 1

        return count

    threading.setprofile(counting(counts[1]))
    sys.setprofile(counting(counts[0]))
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class CallCount:
    """Counts the functions of Python that this thread calls between two steps.

    Args:
        first: the step to begin with.
        last: the step to end with.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._step = self._num_calls = 0

    def tick(self) -> None:
        """Called at the same place of each step."""
        self._step += 1
        if self._step == self.first:
            sys.setprofile(self._count)
        elif self._step == self.last:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self._num_calls += event == "call"

    @property
    def per_step(self) -> float:
        """Calls per step."""
        assert self._step >= self.last
        return self._num_calls / (self.last - self.first)


class _Counted(LightningModule):
    """Says when a step begins."""

    def __init__(self, calls: CallCount):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.calls = calls

    def training_step(self, batch, batch_idx=0):
        self.calls.tick()
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


_FIRST, _LAST = 20, 84
"""Steps: as many as the order of samples is recorded for at once."""


NUM_ROWS = 2 * (_LAST + 10)
"""Samples of a data set for `calls_of_a_step`."""


def _calls_by_hand(device: torch.device, data: Dataset) -> float:
    module = _Counted(CallCount(_FIRST, _LAST)).to(device)
    optimizer = module.configure_optimizers()
    for batch in DataLoader(data, batch_size=2):
        loss = module.training_step([tensor.to(device) for tensor in batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module.calls.per_step


def calls_of_a_step(trainer: Any, data: Dataset | None = None) -> float:
    """Calls of a step beside those that a loop by hand makes on the same device and data."""
    data = TensorDataset(torch.randn(NUM_ROWS, 4)) if data is None else data
    module = _Counted(CallCount(_FIRST, _LAST))
    trainer.fit(module, DataLoader(data, batch_size=2))
    return module.calls.per_step - _calls_by_hand(trainer.strategy.root_device, data)
