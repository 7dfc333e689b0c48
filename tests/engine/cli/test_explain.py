"""`polyphase strategies --explain`: units and plan of a model, built without memory."""

import pytest
import torch
from lightning.pytorch import LightningModule

from polyphase.engine.cli.strategies import explained
from polyphase.models import ByteGPT


class Big(ByteGPT):
    """Would take 400 GB."""

    def __init__(self):
        super().__init__(num_layers=2, num_heads=64, dim=65536)


class Late(LightningModule):
    def configure_model(self):
        self.net = ByteGPT().net


class Single(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)


class Samples(ByteGPT):
    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            self.print(self(torch.zeros(1, 8, dtype=torch.int64)))


class Needs(LightningModule):
    def __init__(self, size):
        super().__init__()


def test_it_names_units_plan_and_the_sizes_that_divide():
    text = explained("ByteGPT")
    assert "  net.blocks.0 to net.blocks.2 (3): 198,272 values each, freed after its forward\n" in text
    assert "  net.blocks.3: 198,272 values, kept until its backward\n" in text
    assert "  all else: 49,408 values, whole throughout a step\n" in text
    assert "net.blocks.*.attention         qkv by columns, out by rows: 2 of 4 heads" in text
    assert text.endswith("tp can be 2, 4 (of up to 64).")


@pytest.mark.parametrize("name", ["Big", "Late"])
def test_a_class_goes_by_its_import_path_and_takes_no_memory(name):
    assert "attention" in explained(f"{__name__}.{name}")


def test_a_hook_that_calls_the_model_is_found_before_a_run():
    line = Samples.on_validation_epoch_end.__code__.co_firstlineno + 2
    where = f"No pipeline: the model is called in on_validation_epoch_end (test_explain.py:{line}); call it in a step"
    assert where in explained(f"{__name__}.Samples")
    assert "No pipeline" not in explained("ByteGPT")


def test_it_says_why_nothing_is_split():
    text = explained(f"{__name__}.Single")
    assert text.startswith("Units of fsdp and hsdp:\n  all else: 6 values, whole throughout a step\n")
    assert "No tensor parallelism: no layer of Single is known to be safe to split" in text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ByteGBT", r"unknown model 'ByteGBT'\. Did you mean 'ByteGPT'"),
        ("nowhere.Model", "can't import 'nowhere', where 'Model' should be"),
        (f"{__name__}.Needs", "can't be built without arguments"),
    ],
)
def test_a_model_that_is_not_there_or_needs_arguments(name, message):
    with pytest.raises(ValueError, match=message):
        explained(name)
