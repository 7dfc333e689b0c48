"""Carries out a plan under a trainer and records all that the plan's module, callbacks and logger get to see."""

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers import Logger

# Lightning: each keeps what it has warned of in this process, which the run under the other trainer must not find.
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result
from lightning.pytorch.utilities import data as data_utilities
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection

from .plans import METRIC_VALUES, METRICS, Entry, Hook, Plan

_CACHES = [Closure, data_connector, logger_connector, result, data_utilities]
_REDUCTIONS: dict[str, Any] = {"builtin_max": max, "builtin_min": min}
BATCH_SIZE = 2


@dataclass
class Trace:
    """What was seen, in Python's own types: two traces are equal or not."""

    events: list[tuple]
    end: dict[str, Any]


def replay(trainer_class: type[pl.Trainer], plan: Plan) -> Trace:
    """Runs `plan` in this process."""
    for cache in _CACHES:
        cache.warning_cache.clear()
    player = _Player(plan)
    module = _module_class(plan)(player)
    logger = _Recorder(player)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = logger.trainer = _trainer(trainer_class, plan, player, logger)
        outcome = _run(trainer, module, plan)
    # Where a warning is from differs; that it comes once or at each step is up to its filter.
    texts = {f"{w.category.__name__}: {w.message}" for w in said if "treespec, LeafSpec" not in str(w.message)}
    end = {
        "outcome": outcome,
        "weights": {key: describe(value) for key, value in module.state_dict().items()},
        "progress": describe(_progress(trainer)),
        "warnings": sorted(texts),
        **{name: describe(getattr(trainer, name)) for name in METRICS},
    }
    return Trace(player.events, end)


def describe(value: Any, most: int = 4) -> Any:
    """`value` in numbers and strings; a tensor by all that two could differ in, beyond `most` numbers by their sum."""
    if isinstance(value, Tensor):
        shown = value.detach().flatten()
        numbers = [repr(number) for number in (shown if len(shown) <= most else shown.sum()[None]).tolist()]
        return f"{value.dtype}{list(value.shape)}{' with graph' * value.requires_grad} {' '.join(numbers)}"
    if isinstance(value, dict):
        return {key: describe(item, most) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [describe(item, most) for item in value]
    if isinstance(value, float):
        return repr(value)  # NaN equals itself then
    if value is None or isinstance(value, int | str | bool):
        return value
    return "closure" if callable(value) else type(value).__name__


def _run(trainer: pl.Trainer, module: "_Module", plan: Plan) -> list[Any]:
    train = _loader(plan, plan.windows * plan.accumulate + plan.surplus)
    val = [_loader(plan, size) for size in plan.val_batches]
    outcomes = [_outcome(trainer.fit, module, train, val or None)]
    if plan.then in ("fit", "other module"):  # also after a run that raised
        trainer.fit_loop.max_epochs += 1
        trainer.fit_loop.epoch_loop.max_steps = -1
        trainer.should_stop = False
        next_module = module if plan.then == "fit" else type(module)(module.player)
        outcomes.append(_outcome(trainer.fit, next_module, train, val or None))
    elif plan.then is not None and val:
        outcomes.append(_outcome(getattr(trainer, plan.then), module, val, verbose=False))
    return outcomes


def _outcome(function: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return describe(function(*arguments, **named))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _trainer(trainer_class: type[pl.Trainer], plan: Plan, player: "_Player", logger: Logger) -> pl.Trainer:
    return trainer_class(
        accelerator="cpu",
        devices=1,
        max_epochs=plan.max_epochs,
        min_epochs=plan.min_epochs,
        max_steps=plan.max_steps,
        accumulate_grad_batches=plan.accumulate,
        limit_train_batches=plan.windows * plan.accumulate if plan.surplus else None,
        val_check_interval=plan.val_check_interval,
        check_val_every_n_epoch=plan.check_val_every_n_epoch,
        num_sanity_val_steps=plan.num_sanity_val_steps,
        log_every_n_steps=plan.log_every_n_steps,
        gradient_clip_val=plan.clip,
        gradient_clip_algorithm=plan.clip_algorithm,
        precision=plan.precision,
        logger=logger if plan.logger else False,
        callbacks=[_callback(f"callback {i}", hooks, player) for i, hooks in enumerate(plan.callbacks)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class _Player:
    """Does what the plan's hooks do."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.events: list[tuple] = []
        self.loss = torch.tensor(0.25)
        self._calls: Counter = Counter()
        self._numbers = itertools.count()

    def visit(self, owner: str, hook: Hook, trainer: Any, module: Any, *arguments: Any) -> None:
        """Records the call of a hook and does what is planned for it."""
        call = self._calls[owner, hook.name]
        self._calls[owner, hook.name] += 1
        self._note(f"{owner}.{hook.name}", trainer, describe(arguments))
        for entry in hook.entries:
            if call >= entry.first and (call - entry.first) % entry.every == 0:
                self._log(module, hook.name, entry)
        for name in hook.reads:
            self.events.append((f"    {name}", describe(self._read(trainer, name))))
        if hook.does and call == hook.at:
            if hook.does == "raise":
                raise RuntimeError(f"{owner} raised in {hook.name}")
            trainer.should_stop = True

    def _note(self, what: str, trainer: Any, arguments: Any) -> None:
        fit = trainer.fit_loop
        where = {"batch": fit.batch_idx, "step": trainer.global_step, "epoch": trainer.current_epoch}
        stage = trainer.state.stage and trainer.state.stage.value
        self.events.append((what, where, stage, trainer.is_last_batch, arguments))

    def _read(self, trainer: Any, name: str) -> Any:
        if name == "progress":
            return _progress(trainer)
        if name == "lr":
            return [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        return getattr(trainer, name)

    def _log(self, module: Any, hook: str, entry: Entry) -> None:
        value = self._value(module, hook, entry)
        arguments = {name: getattr(entry, name) for name in _LOG_ARGUMENTS}
        arguments["reduce_fx"] = _REDUCTIONS.get(entry.reduce_fx, entry.reduce_fx)
        if entry.in_dict or entry.value == "collection":
            module.log_dict(value if entry.value == "collection" else {entry.name: value}, **arguments)
        else:
            module.log(entry.name, value, **arguments)
        if entry.spoiled and isinstance(value, Tensor) and entry.value not in ("loss", "view"):
            value.fill_(77)

    def _value(self, module: Any, hook: str, entry: Entry) -> Any:
        count = next(self._numbers)
        number = count * 7 % 11 / 8 - 0.5  # up and down, and exact in every dtype
        if entry.value in METRIC_VALUES:
            metric = module.metrics[metric_key(hook, entry)]
            metric.update(number) if entry.value == "updated metric" else metric(number)
            return metric
        return _VALUES[entry.value](number, self, module)


_LOG_ARGUMENTS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "batch_size",
    "sync_dist",
    "rank_zero_only",
)
_VALUES: dict[str, Any] = {
    "float": lambda number, player, module: number,
    "int": lambda number, player, module: int(8 * number),
    "bool": lambda number, player, module: number > 0,
    "tensor": lambda number, player, module: torch.tensor(number, dtype=torch.float32),
    "loss": lambda number, player, module: player.loss,
    "view": lambda number, player, module: module.layer.bias[0],  # which the optimizer changes in place
    "float64": lambda number, player, module: torch.tensor(number / 3, dtype=torch.float64),
    "bfloat16": lambda number, player, module: torch.tensor(number, dtype=torch.bfloat16),
    "int64": lambda number, player, module: torch.tensor(int(8 * number)),
    "vector": lambda number, player, module: torch.tensor([number], dtype=torch.float32),
    "numpy": lambda number, player, module: np.float64(number),
    "nan": lambda number, player, module: float("nan") if number > 0 else float("inf"),
}


def metric_key(hook: str, entry: Entry) -> str:
    """A metric is reset where a stage ends, so each stage has its own."""
    stage = "val" if "validation" in hook else "test" if "test" in hook else "train"
    return f"{stage} {entry.name} {entry.value}"


class _Module(pl.LightningModule):
    """Linear, with the hooks of its plan."""

    def __init__(self, player: _Player) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.player = player
        self.layer = nn.Linear(4, 1)
        self.metrics = nn.ModuleDict()
        for hook in itertools.chain(player.plan.module, *player.plan.callbacks):
            for entry in hook.entries:
                if entry.value in METRIC_VALUES:
                    self.metrics[metric_key(hook.name, entry)] = _metric(entry)

    def on_any_step(self, name: str, batch: Any, *indices: Any) -> None:
        if name in self.hooks:
            self.player.visit("module", self.hooks[name], self.trainer, self, batch, *indices)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plan = self.player.plan
        loss = self._loss(batch)
        self.player.loss = loss
        self.on_any_step("training_step", batch, batch_idx)
        if plan.monitor == "watched":
            self.log("watched", loss)
        if batch_idx == plan.none_at:
            return None
        return loss if plan.returns == "tensor" else {"loss": loss, "extra": batch_idx, "more": loss.detach()}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.player.loss = self._loss(batch)
        self.on_any_step("validation_step", batch, batch_idx, dataloader_idx)
        return self.player.loss if self.player.plan.returns == "tensor" else None

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.player.loss = self._loss(batch)
        self.log("tested", self.player.loss, on_step=True, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        plan, lr = self.player.plan, 0.1
        optimizers = {
            "sgd": lambda: torch.optim.SGD(self.layer.parameters(), lr),
            "momentum": lambda: torch.optim.SGD(self.layer.parameters(), lr, momentum=0.9),
            "adam": lambda: torch.optim.Adam(self.layer.parameters(), lr),
        }
        optimizer = optimizers[plan.optimizer]()
        if plan.scheduler is None:
            return optimizer
        *plateau, interval = plan.scheduler.split()
        schedules = torch.optim.lr_scheduler
        scheduler = schedules.ReduceLROnPlateau(optimizer, patience=0) if plateau else schedules.StepLR(optimizer, 2)
        settings = {"scheduler": scheduler, "interval": interval, "frequency": plan.frequency, "monitor": plan.monitor}
        return {"optimizer": optimizer, "lr_scheduler": settings}

    def _loss(self, batch: Any) -> Tensor:
        rows = batch["rows"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
        return (self.layer(rows) - rows.sum(1, keepdim=True)).square().mean()


def _metric(entry: Entry) -> Any:
    if entry.value == "collection":
        return MetricCollection([MeanMetric(), MaxMetric()], prefix=entry.name)
    return MeanMetric()


def _module_class(plan: Plan) -> type[_Module]:
    hooks = {hook.name: hook for hook in plan.module}
    if plan.cancel_at is not None:
        hooks.setdefault("on_train_batch_start", Hook(name="on_train_batch_start"))
    steps = ("training_step", "validation_step")
    methods = {name: _module_hook(hook) for name, hook in hooks.items() if name not in steps}
    return type("Planned", (_Module,), {"hooks": hooks, **methods})


def _module_hook(hook: Hook) -> Any:
    base = getattr(_Module, hook.name)

    def method(self: _Module, *arguments: Any, **named: Any) -> Any:
        usual = base(self, *arguments, **named) if hook.late else None
        self.player.visit("module", hook, self.trainer, self, *arguments, *named.values())
        if hook.name == "on_train_batch_start" and arguments[1] == self.player.plan.cancel_at:
            return -1
        return usual if hook.late else base(self, *arguments, **named)

    def evaluation_batch(self: _Module, *arguments: Any, dataloader_idx: int = 0) -> None:
        method(self, *arguments)  # Lightning wants to see the argument's name

    return evaluation_batch if hook.name.startswith(("on_validation_batch", "on_test_batch")) else method


def _callback(owner: str, hooks: tuple[Hook, ...], player: _Player) -> pl.Callback:
    def method(hook: Hook) -> Any:
        return lambda self, trainer, module, *arguments: player.visit(owner, hook, trainer, module, *arguments)

    return type("Planned", (pl.Callback,), {hook.name: method(hook) for hook in hooks})()


class _Recorder(Logger):
    """Keeps what it is given among the events."""

    name = "recorder"
    version = 0

    def __init__(self, player: _Player) -> None:
        super().__init__()
        self._events = player.events
        self._reads = player.plan.logger == "reads"
        self.trainer: Any = None

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._events.append(("logger", step, describe(metrics)))
        if self._reads:
            self._events.append(("    logged_metrics", describe(self.trainer.logged_metrics)))

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None: ...

    def save(self) -> None:
        self._events.append(("logger saves",))


class _Rows(Dataset[Any]):
    def __init__(self, plan: Plan, size: int) -> None:
        self.plan = plan
        self.rows = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        return {"dict": {"rows": row, "index": index}, "list": [row, index]}.get(self.plan.batch, row)


class _Stream(IterableDataset[Any]):
    def __init__(self, rows: _Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[i] for i in range(len(self.rows)))


def _loader(plan: Plan, num_batches: int) -> DataLoader:
    rows = _Rows(plan, num_batches * BATCH_SIZE - (plan.batch == "ragged"))
    return DataLoader(rows if plan.sized else _Stream(rows), batch_size=BATCH_SIZE)


def _progress(trainer: Any) -> dict[str, Any]:
    """The state of the loops, without that of loaders: the engine's know their place, Lightning's do not."""
    state = trainer.fit_loop.state_dict()
    state["state_dict"] = {key: value for key, value in state["state_dict"].items() if key != "combined_loader"}
    return state
