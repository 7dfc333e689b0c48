"""Precision by flag means the same on every device."""

import pickle

import pytest
import torch

from polyphase.engine.precision import OF_BLOCKS
from polyphase.engine.precision.plugins import PRECISIONS, canonical_precision, make_precision

from ..tiny import Regression, engine, rows

PRODUCTS = {"64-true": torch.float64, "32-true": torch.float32} | {
    f"{name}-{kind}": dtype
    for kind in ("true", "mixed")
    for name, dtype in (("16", torch.float16), ("bf16", torch.bfloat16))
}
"""Dtype of matrix products by the name of the precision."""

WEIGHTS = {**PRODUCTS, "16-mixed": torch.float32, "bf16-mixed": torch.float32}


class Watched(Regression):
    """Notes the dtypes and the loss scale that it is trained with."""

    def training_step(self, batch, batch_idx):
        self.product = self.net[0](batch).dtype
        self.weight = self.net[0].weight.dtype
        return super().training_step(batch, batch_idx).float() * 1e-2  # scaled gradients fit into float16


def test_the_tables_of_this_test_and_of_the_flag_have_the_same_names():
    assert set(PRODUCTS) | set(OF_BLOCKS) == set(PRECISIONS)


@pytest.mark.parametrize("name", list(PRECISIONS))
def test_a_full_name_is_itself(name):
    assert canonical_precision(name) == name


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        (None, "32-true"),
        (32, "32-true"),
        ("32", "32-true"),
        (64, "64-true"),
        ("64", "64-true"),
        (16, "16-mixed"),
        ("16", "16-mixed"),
        ("bf16", "bf16-mixed"),
    ],
)
def test_lightnings_short_names(flag, name):
    assert canonical_precision(flag) == name


@pytest.mark.parametrize(
    ("flag", "near"), [("bf16-mixd", "bf16-mixed"), ("BF16-MIXED", "bf16-mixed"), ("32-ture", "32-true")]
)
def test_another_name_is_answered_with_the_closest(flag, near):
    with pytest.raises(
        ValueError, match=rf"^Precision '{flag}' is invalid\. Did you mean '{near}'\? Allowed: 16-mixed, "
    ):
        canonical_precision(flag)


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_a_plugin_knows_its_name(name):
    assert make_precision(name, "cpu").precision == name


@pytest.mark.parametrize("name", list(PRODUCTS))
def test_weights_and_products_have_the_dtype_that_the_flag_names(name):
    module = Watched()
    run = engine(precision=name)
    run.fit(module, rows())
    assert run.precision == name
    assert (module.weight, module.product) == (WEIGHTS[name], PRODUCTS[name])
    assert run.global_step == 4


def test_fp16_on_the_cpu_scales_its_loss():
    scales = []

    class Scaled(Watched):
        def on_before_backward(self, loss):
            scales.append(float(loss.detach()) / float(self.loss))

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.loss = loss.detach()
            return loss

    run = engine(precision="16-mixed")
    run.fit(Scaled(), rows())
    scaler = run.precision_plugin.scaler
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert set(scales) == {scaler.get_scale()}
    assert scaler.get_scale() > 1


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "16-mixed"])
def test_nothing_else_scales_its_loss(name):
    assert getattr(make_precision(name, "cpu"), "scaler", None) is None


def test_an_overflow_under_fp16_skips_the_step_and_lowers_the_scale():
    class Overflows(Watched):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 else loss

        def on_train_batch_start(self, batch, batch_idx):
            self.before = [p.detach().clone() for p in self.parameters()]

        def on_train_batch_end(self, outputs, batch, batch_idx):
            pairs = zip(self.parameters(), self.before, strict=True)
            self.moved = [*getattr(self, "moved", []), any(not torch.equal(p, q) for p, q in pairs)]

    module = Overflows()
    run = engine(precision="16-mixed", nonfinite="ignore")
    run.fit(module, rows())
    assert module.moved == [True, False, True, True]
    assert run.precision_plugin.scaler.get_scale() == torch.amp.GradScaler("cpu").get_scale() / 2
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_plugin_can_be_sent_to_a_spawned_process(name):
    plugin = make_precision(name, "cpu")
    assert type(pickle.loads(pickle.dumps(plugin))) is type(plugin)  # noqa: S301
