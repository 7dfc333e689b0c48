"""Each of Lightning's own callbacks does the same under the engine: weights, stops, files, logged values."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as stock
from torch.utils.data import DataLoader

from .stock_comparison import TRAINERS, Small, exactly, files, only_names, outcome, rows, trainer_of, without

EVERY: dict[str, Any] = {"save_top_k": -1, "auto_insert_metric_name": False, "filename": "{epoch}-{step}"}


class Diverges(Small):
    """Its loss is not a number from the third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx > 1 else 1)


class Freezes(stock.BaseFinetuning):
    """Adds the backbone's parameters to the optimizer after the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, train_bn=False)


class Often(stock.WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


def monitor_module() -> Small:
    class Scheduled(Small):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]

    return Scheduled()


def checkpoints(**arguments: Any) -> Any:
    return lambda folder: stock.ModelCheckpoint(folder / "kept", **{**EVERY, **arguments})


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    # What makes the callback from the run's folder, and flags; `module`, `num_batches` and `then` are not flags.
    "EarlyStopping": (
        lambda _: stock.EarlyStopping("val_loss", min_delta=0.1, patience=2),
        {"max_epochs": 30},
    ),
    "EarlyStopping on a step's value": (
        lambda _: stock.EarlyStopping("loss_epoch", min_delta=0.5, patience=1, check_on_train_epoch_end=True),
        {"max_epochs": 30, "min_epochs": 3},
    ),
    "EarlyStopping in mid-epoch": (
        lambda _: stock.EarlyStopping("val_loss", mode="max", patience=2),
        {"val_check_interval": 1, "max_epochs": 30, "num_batches": 5},
    ),
    "EarlyStopping with min_steps": (
        lambda _: stock.EarlyStopping("val_loss", stopping_threshold=1e9),
        {"val_check_interval": 2, "max_epochs": 30, "min_steps": 6},
    ),
    "EarlyStopping on NaN": (
        lambda _: stock.EarlyStopping("loss_epoch", check_finite=True),
        {"module": Diverges, "max_epochs": 30, "nonfinite": "ignore"},
    ),
    "ModelCheckpoint": (checkpoints(), {}),
    "ModelCheckpoint every_n_train_steps": (checkpoints(every_n_train_steps=3), {}),
    "ModelCheckpoint every_n_train_steps, accumulating": (
        checkpoints(every_n_train_steps=1),
        {"accumulate_grad_batches": 2},
    ),
    "ModelCheckpoint monitor": (
        checkpoints(monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.3f}", save_last=True),
        {"max_epochs": 4},
    ),
    "ModelCheckpoint monitors a step's value": (
        checkpoints(monitor="loss_step", save_top_k=2, every_n_train_steps=2, filename="{step}-{loss_step:.3f}"),
        {"max_epochs": 3},
    ),
    "ModelCheckpoint in mid-epoch": (checkpoints(monitor="val_loss"), {"val_check_interval": 2, "num_batches": 5}),
    "ModelCheckpoint save_on_train_epoch_end": (checkpoints(save_on_train_epoch_end=True), {}),
    "ModelCheckpoint train_time_interval": (checkpoints(train_time_interval=timedelta(0)), {}),
    "LearningRateMonitor": (lambda _: stock.LearningRateMonitor(log_momentum=True), {"module": monitor_module}),
    "LearningRateMonitor step": (
        lambda _: stock.LearningRateMonitor("step"),
        {"module": monitor_module, "log_every_n_steps": 2},
    ),
    "LearningRateMonitor epoch": (lambda _: stock.LearningRateMonitor("epoch"), {"module": monitor_module}),
    "Timer": (lambda _: stock.Timer(timedelta(microseconds=1)), {}),
    "Timer by epoch": (lambda _: stock.Timer(timedelta(microseconds=1), interval="epoch"), {"max_epochs": 4}),
    "GradientAccumulationScheduler": (
        lambda _: stock.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4}),
        {"max_epochs": 4},
    ),
    "StochasticWeightAveraging": (
        lambda _: stock.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=2),
        {"max_epochs": 4},
    ),
    "SpikeDetection": (lambda _: stock.SpikeDetection(window=3, warmup=2), {"max_epochs": 1}),
    "OnExceptionCheckpoint": (lambda folder: stock.OnExceptionCheckpoint(folder / "kept"), {"then": "raise"}),
    "EMAWeightAveraging": (lambda _: stock.EMAWeightAveraging(decay=0.8), {}),
    "WeightAveraging": (lambda _: Often(), {"accumulate_grad_batches": 2}),
    "BackboneFinetuning": (
        lambda _: stock.BackboneFinetuning(unfreeze_backbone_at_epoch=1, train_bn=False),
        {"max_epochs": 4},
    ),
    "BaseFinetuning": (lambda _: Freezes(), {"max_epochs": 3}),
    "ModelPruning": (
        lambda _: stock.ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3),
        {"max_epochs": 3},
    ),
    "ModelPruning by layer": (
        lambda _: stock.ModelPruning("random_unstructured", amount=0.5, use_global_unstructured=False),
        {"max_epochs": 2},
    ),
}


def run(trainer_class: type[pl.Trainer], folder: Path, callback: pl.Callback, **flags: Any) -> dict[str, Any]:
    make, then = flags.pop("module", Small), flags.pop("then", None)
    train, module = rows(flags.pop("num_batches", 4)), make()
    if trainer_class is pl.Trainer:
        flags.pop("nonfinite", None)
    trainer = trainer_of(trainer_class, folder, callbacks=[callback], **flags)
    torch.manual_seed(1)  # some callbacks draw
    if then == "raise":
        module.on_before_zero_grad = _raise_after(5, module)
        with pytest.raises(RuntimeError, match="enough"):
            trainer.fit(module, train, rows(2))
    else:
        trainer.fit(module, train, rows(2))
    state = {key: value for key, value in callback.state_dict().items() if key != "time_elapsed"}
    return {
        **outcome(trainer, module, folder),
        "state": without(exactly(state), folder),
        "stops": trainer.should_stop,
        "stopped at": getattr(callback, "stopped_epoch", None),
        "best": without(getattr(callback, "best_model_path", None), folder),
    }


def _raise_after(num_calls: int, module: Any) -> Any:
    def on_before_zero_grad(optimizer: Any) -> None:
        if module.trainer.global_step == num_calls:
            raise RuntimeError("enough")

    return on_before_zero_grad


@pytest.fixture
def folders(tmp_path) -> list[Path]:
    return [tmp_path / "stock", tmp_path / "engine"]


# Lightning's, for its own OnExceptionCheckpoint, after which it looks for something to resume from.
@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint available")
@pytest.mark.parametrize("case", CASES)
def test_the_outcome_is_the_stock_trainers(case, folders):
    make, flags = CASES[case]
    expected, found = (run(c, f, make(f), **flags) for c, f in zip(TRAINERS, folders, strict=True))
    assert found == expected


@pytest.mark.parametrize(
    ("case", "stops_early"), [("EarlyStopping", True), ("Timer", True), ("ModelCheckpoint", False)]
)
def test_the_cases_are_what_they_say(case, stops_early, folders):
    make, flags = CASES[case]
    found = run(TRAINERS[1], folders[1], make(folders[1]), **flags)
    assert (found["batches"] + 1 < 4 * flags.get("max_epochs", 2)) is stops_early
    assert bool([path for path in found["files"] if path.endswith(".ckpt")]) is (case == "ModelCheckpoint")


class Sized(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> DataLoader:
        return rows(8, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return rows(2)


@pytest.mark.filterwarnings("ignore:.*cannot be determined automatically")
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_batch_size_finder(mode, folders):
    found = []
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        finder = stock.BatchSizeFinder(mode, steps_per_trial=2, max_trials=3)
        module, data, trainer = Small(), Sized(), trainer_of(trainer_class, folder, callbacks=[finder])
        trainer.fit(module, datamodule=data)
        found.append({**outcome(trainer, module, folder), "size": data.batch_size})
    assert found[0] == found[1]
    assert found[0]["size"] > 2


def test_learning_rate_finder(folders):
    found = []
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        finder = stock.LearningRateFinder(num_training_steps=30)
        module, trainer = Small(), trainer_of(trainer_class, folder, callbacks=[finder])
        trainer.fit(module, rows(8))
        found.append({**outcome(trainer, module, folder), "lr": module.lr, "tried": exactly(finder.optimal_lr.results)})
    assert found[0] == found[1]
    assert found[0]["lr"] != Small().lr


@pytest.mark.parametrize("case", ["DeviceStatsMonitor", "ThroughputMonitor"])
def test_monitors_of_times_and_loads_log_the_same_columns_at_the_same_steps(case, folders):
    found = []
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        monitors = {
            "DeviceStatsMonitor": lambda: stock.DeviceStatsMonitor(cpu_stats=True),
            "ThroughputMonitor": lambda: stock.ThroughputMonitor(lambda batch: batch.size(0), window_size=3),
        }
        module, callback = Small(), monitors[case]()
        module.flops_per_batch = 100
        trainer = trainer_of(trainer_class, folder, callbacks=[callback], log_every_n_steps=2, val_check_interval=2)
        trainer.fit(module, rows(4), rows(2))
        table = files(folder)["metrics.csv"]
        found.append(only_names(table, "cpu", "per_sec", "time", "memory", "percent", "device/"))
    assert found[0] == found[1]
    assert any(case.removesuffix("Monitor")[:6].lower() in name.lower() or "train" in name for name in found[0][0])


def bar_of(base: type) -> Any:
    """The progress bar, which keeps what it would show, and when."""

    class Keeps(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(refresh_rate=2)
            self.shown: list[Any] = []

        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            metrics = super().get_metrics(trainer, pl_module)
            self.shown.append((str(trainer.state.stage), trainer.fit_loop.batch_idx, exactly(metrics)))
            return metrics

    return Keeps()


@pytest.mark.parametrize("base", [stock.TQDMProgressBar, stock.RichProgressBar, stock.ProgressBar])
def test_progress_bars_show_the_same_at_the_same_batches(base, folders):
    found = []
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        bar = stock.ProgressBar() if base is stock.ProgressBar else bar_of(base)
        module = Small()
        trainer = trainer_of(trainer_class, folder, callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=1)
        trainer.fit(module, rows(5), rows(2))
        counts = bar.total_train_batches, bar.train_description, bar.trainer is trainer
        shown = [*getattr(bar, "shown", []), exactly(bar.get_metrics(trainer, module)), counts]
        found.append((shown, outcome(trainer, module, folder)))
    assert found[0] == found[1]


@pytest.mark.parametrize("summary", [stock.ModelSummary, stock.RichModelSummary])
def test_model_summaries(summary, folders, capsys, caplog):
    found = []
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        caplog.clear()
        own = {} if trainer_class is pl.Trainer else {"enable_run_summary": False}
        trainer_of(trainer_class, folder, callbacks=[summary(max_depth=2)], max_epochs=1, **own).fit(Small(), rows(1))
        found.append((capsys.readouterr().out, [r.message for r in caplog.records if "BatchNorm1d" in r.message]))
    assert found[0] == found[1]
    assert "BatchNorm1d" in str(found[0])


def test_lambda_callback(folders):
    found = []
    hooks = [name for name in dir(pl.Callback) if name.startswith("on_") and "checkpoint" not in name]
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        seen: list[Any] = []
        functions = {name: (lambda *a, n=name, s=seen, **b: s.append((n, exactly([a[2:], b])))) for name in hooks}
        trainer = trainer_of(trainer_class, folder, callbacks=[stock.LambdaCallback(**functions)])
        trainer.fit(Small(), rows(), rows(2))
        trainer.test(Small(), rows(2), verbose=False)
        found.append(seen)
    assert found[0] == found[1]
    assert len({name for name, _ in found[0]}) > 20


def test_the_batch_that_weight_averaging_adds_for_batch_norm_is_run(folders):
    numbers = []
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        callback = stock.StochasticWeightAveraging(1e-2, swa_epoch_start=1, annealing_epochs=2)
        trainer = trainer_of(trainer_class, folder, max_epochs=4, callbacks=[callback])
        trainer.fit(Small(), rows(4))
        progress = trainer.fit_loop.epoch_loop.batch_progress
        numbers.append((trainer.num_training_batches, progress.current.ready, progress.total.ready))
    assert numbers[0] == numbers[1]


def test_prediction_writer(folders):
    class Writes(stock.BasePredictionWriter):
        def write_on_batch_end(self, trainer, pl_module, prediction, indices, batch, batch_idx, dataloader_idx):
            self.written = [*getattr(self, "written", []), (exactly(prediction), indices, batch_idx, dataloader_idx)]

        def write_on_epoch_end(self, trainer, pl_module, predictions, indices):
            self.all = exactly(predictions), indices

    found = []
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        writer = Writes("batch_and_epoch")
        trainer = trainer_of(trainer_class, folder, callbacks=[writer])
        returned = trainer.predict(Small(), rows(3))
        found.append((writer.written, writer.all, exactly(returned)))
    assert found[0] == found[1]


class Calls(pl.Callback):
    """Notes the batches at which it is called."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(("start", batch_idx))
        pl_module.log("from_later", float(batch_idx))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(("step", trainer.global_step))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(("validation", batch_idx))


@pytest.mark.parametrize(
    "where", ["on_train_batch_end", "on_train_epoch_start", "on_validation_epoch_end", "on_fit_start"]
)
@pytest.mark.parametrize("goes", [False, True])
def test_callbacks_that_come_and_go_in_mid_fit_are_called_from_the_next_step_on(where, goes, folders):
    found = []
    for trainer_class, folder in zip(TRAINERS, folders, strict=True):
        later = Calls()

        def change(trainer, *_, later=later, **__):
            if goes and later in trainer.callbacks:
                trainer.callbacks.remove(later)
            elif not goes and later not in trainer.callbacks:
                trainer.callbacks.append(later)

        first = type("Changes", (pl.Callback,), {where: lambda self, *a, f=change, **b: f(*a, **b)})()
        callbacks = [first, later] if goes else [first]
        trainer, module = trainer_of(trainer_class, folder, callbacks=callbacks, val_check_interval=2), Small()
        trainer.fit(module, rows(), rows(2))
        found.append((later.seen, outcome(trainer, module, folder)))
    assert found[0] == found[1]


def test_every_callback_of_lightning_is_here():
    source = Path(__file__).read_text()
    abstract = {"Callback", "Checkpoint"}
    assert [name for name in stock.__all__ if name not in abstract and f"stock.{name}" not in source] == []
