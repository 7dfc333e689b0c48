"""Flags that change how a loop runs mean what they mean to the stock trainer."""

import pytest

from .stock_comparison import Notes


@pytest.mark.parametrize(
    "flags",
    [
        {"fast_dev_run": True},
        {"fast_dev_run": 3},
        {"overfit_batches": 2, "max_epochs": 3},
        {"overfit_batches": 0.5},
        {"barebones": True},
        {"max_epochs": 0},
        {"max_steps": 0},
        {"limit_train_batches": 0},
        {"limit_val_batches": 0},
        {"limit_train_batches": 0.5, "limit_val_batches": 1},
        {"max_time": {"seconds": 0}, "max_epochs": 9},
        {"min_steps": 6, "max_steps": 6, "max_epochs": 1},
        {"check_val_every_n_epoch": None, "val_check_interval": 3, "max_epochs": 3},
        {"val_check_interval": "00:00:00:00"},
        {"inference_mode": False},
        {"detect_anomaly": True},
        {"deterministic": True},
        {"reload_dataloaders_every_n_epochs": 1},
        {"use_distributed_sampler": False},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"precision": "bf16-true"},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"log_every_n_steps": 0},
        {"logger": False},
    ],
    ids=str,
)
# Lightning's: of what `barebones` and `overfit_batches` leave out, and of bf16 in CSV files.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_flags(same, flags):
    same(Notes, **flags)
