"""`dp`: on one device it is `single`; what several copies of the module return and log becomes one."""

import logging
import threading
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torchmetrics import MeanMetric

from polyphase.engine import Engine
from polyphase.engine.precision.plugins import make_precision
from polyphase.engine.select import _say_once
from polyphase.engine.strategies.dp import DP, _merged_logs, _merged_outputs, _Step, make_dp
from tests.engine.parity import build, largest_difference, loader
from tests.engine.tiny import QUIET, Regression, engine, rows

CPU = torch.device("cpu")


def test_on_one_device_it_is_single():
    ours, plain = build("mlp"), build("mlp")
    for module, strategy in ((ours, "dp"), (plain, "single")):
        run = Engine(**QUIET, strategy=strategy, max_epochs=1)
        assert type(run.strategy) is SingleDeviceStrategy
        run.fit(module, loader("mlp", 1))
    assert largest_difference(ours.state_dict(), plain.state_dict()) == 0


def test_that_ddp_is_faster_is_said_once(caplog):
    _say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        engine(strategy="dp")
        engine(strategy="dp")
        engine(strategy="single")
    notes = [record.message for record in caplog.records if "'dp'" in record.message]
    assert len(notes) == 1
    assert "Engine(strategy='ddp', devices=N)" in notes[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"devices": 2}, r"several GPUs of one machine, .* 1 node\(s\) x 2 device\(s\) of type 'cpu'"),
        ({"num_nodes": 2}, r"2 node\(s\) x 1 device\(s\) of type 'cpu'"),
        ({"compression": "bf16"}, "strategy 'dp' can't do compression 'bf16': one process sends no gradients"),
        ({"strategy": "dp_spawn"}, r"unknown strategy 'dp_spawn'. Did you mean 'dp'\?"),
        ({"strategy": "dp:devices=2"}, "unknown option of strategy 'dp' 'devices'"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_an_error_when_the_engine_is_built(flags, message):
    with pytest.raises(ValueError, match=message):
        engine(**{"strategy": "dp", **flags})


# --- the mathematics, without GPUs


class Logs(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"largest": batch.max(), "size": len(batch)}, reduce_fx="max")
        return {"loss": loss, "rows": batch, "ends": batch.sum(), "note": len(batch)}


def parts(sizes: list[int]) -> tuple[list[dict], list[list[dict]], list[int], Tensor]:
    """What copies return for parts of a batch."""
    batch = rows(sum(sizes)).dataset[:]
    found = [each for part in batch.split(sizes) for each in _Step(Logs(), nullcontext)(part, 0)]
    outputs, logs, counts = (list(each) for each in zip(*found, strict=True))
    return outputs, logs, counts, batch


@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 2], [5]])
def test_parts_of_a_batch_make_the_loss_and_the_gradients_of_the_whole(sizes):
    outputs, logs, counts, batch = parts(sizes)
    whole = Regression()
    expected = whole.training_step(batch, 0)
    expected.backward()
    assert counts == sizes
    merged = _merged_outputs(outputs, counts, CPU)
    torch.testing.assert_close(merged["loss"], expected)
    assert torch.equal(merged["rows"], batch)
    assert merged["ends"].shape == (len(sizes),)
    assert merged["note"] == sizes
    merged_loss, largest, size = _merged_logs(logs, counts, CPU)
    torch.testing.assert_close(merged_loss["value"], expected)
    assert merged_loss["name"] == "loss"
    assert merged_loss["prog_bar"] is True
    assert largest["value"] == batch.max()
    assert size["value"] == max(sizes)


def test_gradients_come_through_the_mean():
    module = Regression()
    batch = rows(7).dataset[:]
    losses = [module.training_step(part, 0) for part in batch.split([4, 3])]
    _merged_outputs(losses, [4, 3], CPU).backward()
    whole = Regression()
    whole.training_step(batch, 0).backward()
    for found, expected in zip(module.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_weights_that_the_copies_return_count():
    outputs = [{"loss": torch.tensor(2.0), "weight": 1}, {"loss": torch.tensor(5.0), "weight": torch.tensor(3)}]
    merged = _merged_outputs(outputs, [8, 8], CPU)
    assert merged["loss"] == (2 + 15) / 4
    assert merged["weight"] == 4


def test_batch_sizes_that_are_logged_add_up():
    calls = [[{"name": "a", "value": value, "batch_size": size}] for value, size in ((1.0, 2), (4, 4))]
    (merged,) = _merged_logs(calls, [1, 2], CPU)
    assert merged == {"name": "a", "value": 3.0, "batch_size": 6}
    (summed,) = _merged_logs([[{"name": "n", "value": 2, "reduce_fx": "sum"}]] * 3, [1, 1, 1], CPU)
    assert summed["value"] == 6


def test_what_cant_be_one_is_refused():
    with pytest.raises(ValueError, match="copies of the module logged different names"):
        _merged_logs([[{"name": "a", "value": 1}], []], [1, 1], CPU)
    with pytest.raises(ValueError, match=r"logs 'm' on copies of the module: it must be a number"):
        _merged_logs([[{"name": "m", "value": MeanMetric()}]], [1], CPU)
    with pytest.raises(ValueError, match="one of mean, sum, min, max"):
        _merged_logs([[{"name": "m", "value": 1, "reduce_fx": torch.median}]], [1], CPU)
    with pytest.raises(ValueError, match="returned a loss on some copies of the module only"):
        _merged_outputs([torch.ones(()), None], [1, 1], CPU)
    assert _merged_outputs([None, None], [1, 1], CPU) is None


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_a_thread_computes_in_the_dtype_of_the_precision(precision):
    class Dtypes(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> list[torch.dtype]:
            return [self.net(batch).dtype, torch.zeros(()).dtype]

    found = []
    context = make_precision(precision, "cpu").train_step_context
    with context():  # as around all threads
        module = Dtypes().to(torch.zeros(()).dtype)
        step, batch = _Step(module, context), rows(4).dataset[:].to(module.net[0].weight.dtype)
        thread = threading.Thread(target=lambda: found.extend(step(batch, 0)))
        thread.start()
        thread.join()
    ((dtypes, _, _),) = found
    expected = [torch.bfloat16, torch.float32] if precision == "bf16-mixed" else [torch.float64] * 2
    assert dtypes == expected
    assert torch.zeros(()).dtype == torch.float32


# --- the strategy itself, for which a CPU is one device


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_that_of_single(accumulate, tmp_path):
    runs = {}
    for strategy in (DP(), "single"):
        module = Logs()
        run = engine(
            strategy=strategy, logger=True, default_root_dir=tmp_path, log_every_n_steps=1,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        run.fit(module, rows(14))
        runs[str(type(strategy))] = module.state_dict(), run.callback_metrics
        assert "log" not in module.__dict__
    (ours, logged), (plain, expected) = runs.values()
    assert largest_difference(ours, plain) == 0
    assert {name: float(value) for name, value in logged.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}
    )


class ByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Updates(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.mean.update(batch)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ByHand, "can't run a module with automatic_optimization=False"),
        (Updates, "updates a metric in several threads"),
    ],
)
def test_a_module_that_copies_cant_run_is_refused(module, message):
    with pytest.raises(ValueError, match=message):
        engine(strategy=DP()).fit(module(), rows())


def test_a_compiled_step_is_refused():
    with pytest.raises(ValueError, match="is an attribute of the module, as compile=True makes"):
        engine(strategy=DP(), compile=True).fit(Regression(), rows())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("cuda", 2, 2, False), r"2 node\(s\) x 2 device"), (("cuda", 2, 1, True), "'dp' can't do sync_batchnorm=True")],
)
def test_several_devices_that_it_cant_use_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_dp(*arguments)
    assert type(make_dp("cuda", 2, 1, False)) is DP
