"""Each pattern runs twice: with the stock trainer, and with the engine in its place."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from polyphase.engine import Engine

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


@pytest.fixture(params=[Trainer, Engine], ids=["Trainer", "Engine"])
def trainer_class(request):
    return request.param


@pytest.fixture
def make(trainer_class, tmp_path):
    """Makes a trainer of either class, quiet unless the flags say otherwise."""
    return lambda **flags: trainer_class(**{**QUIET, "default_root_dir": tmp_path, **flags})


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # What Lightning advises of such small runs is not the matter here.
            item.add_marker(pytest.mark.filterwarnings("default"))
