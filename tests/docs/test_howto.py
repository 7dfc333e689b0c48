"""The code of the pages under docs/howto, each in one process and, by fork, on two ranks."""

import json
import re
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from safetensors.torch import load_file, save_file

from polyphase.engine import Engine
from polyphase.engine.checkpoint import load_checkpoint
from polyphase.models import Digits, DigitsClassifier
from tests.docs.pages import HOWTO, Page, blocks
from tests.pairs import nightly

SINGLE, DDP = ("single", 1), ("ddp_fork", 2)
# Each page in both ways: one of them in `make test`, of half of the pages the first, of the others the second.
in_one_process = pytest.mark.parametrize(("strategy", "devices"), [SINGLE, *nightly(DDP)])
on_two_ranks = pytest.mark.parametrize(("strategy", "devices"), [DDP, *nightly(SINGLE)])
WAYS_TO_EQUAL = [SINGLE, DDP, ("fsdp_fork", 2)]
BY_DDP = [DDP, *nightly(SINGLE, WAYS_TO_EQUAL[2])]


def weights_of(path):
    """The weights of a checkpoint, of either kind."""
    is_file = path.is_file()
    return (torch.load(path, weights_only=False) if is_file else load_checkpoint(path))["state_dict"]


def largest_difference(one, other):
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_index_has_every_page():
    pages = {path.stem for path in HOWTO.glob("*.md")} - {"README"}
    assert set(re.findall(r"\]\(([a-z0-9-]+)\.md\)", (HOWTO / "README.md").read_text())) == pages


@pytest.mark.parametrize("page", sorted(path.stem for path in HOWTO.glob("*.md")))
def test_pages_are_short(page):
    assert len((HOWTO / f"{page}.md").read_text().splitlines()) < 100
    assert page == "README" or blocks(page)


def test_learning_rate_finder(monkeypatch, capfd):
    found = Page("learning-rate-finder").run_here("train.py", monkeypatch)
    assert found["model"].lr == found["finder"].suggestion() != 5e-3
    assert len(found["finder"].results["lr"]) == 40
    assert found["engine"].global_step == 3 * 34, "and the run that follows trains all of its epochs"
    assert "suggested learning rate" in capfd.readouterr().out


def test_learning_rate_finder_is_refused_where_workers_would_keep_what_they_find(monkeypatch):
    with pytest.raises(ValueError, match="Tuner can't read what worker processes have found"):
        Page("learning-rate-finder").run_here("train.py", monkeypatch, strategy="ddp_fork", devices=2)


@in_one_process
def test_early_stopping(monkeypatch, capfd, strategy, devices):
    found = Page("early-stopping").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    epochs = int(re.search(r"stopped after (\d+) of 30 epochs", capfd.readouterr().out)[1])
    assert 3 <= epochs < 30
    assert found["engine"].global_step == epochs * (34 // devices)


@on_two_ranks
def test_several_optimizers(monkeypatch, capfd, strategy, devices):
    found = Page("several-optimizers").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    assert f"{34 // devices} steps" in capfd.readouterr().out
    assert found["engine"].global_step == 34 // devices


@on_two_ranks
def test_averages(monkeypatch, capfd, strategy, devices):
    found = Page("averages").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    assert f"{68 // devices} steps" in capfd.readouterr().out
    assert found["engine"].global_step == 68 // devices


@pytest.mark.parametrize(("strategy", "devices"), [("fsdp_fork", 2), *nightly(SINGLE, DDP)])
def test_adapters(monkeypatch, capfd, strategy, devices):
    page = Page("adapters")
    page.run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    assert "20 steps" in capfd.readouterr().out
    page.run_here("read.py", monkeypatch)
    assert float(re.findall(r"largest difference (\S+)", capfd.readouterr().out)[0]) < 1e-5
    assert (page.folder / "adapters" / "adapter_config.json").exists()


@pytest.mark.parametrize(("strategy", "devices"), [("cp_fork", 2), *nightly(SINGLE)])
def test_long_sequences(monkeypatch, capfd, strategy, devices):
    found = Page("long-sequences").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    assert "2 steps" in capfd.readouterr().out
    assert found["engine"].global_step == 2


def test_rare_exchange(monkeypatch, capfd):
    page = Page("rare-exchange")
    script = page.folder / "train.py"
    script.write_text(script.read_text().replace("local_sgd_spawn", "local_sgd_fork"))  # without two imports
    found = page.run_here("train.py", monkeypatch)
    steps, accuracy = re.search(r"(\d+) steps, accuracy (\S+)", capfd.readouterr().out).groups()
    assert int(steps) == found["engine"].global_step == 8 * 17
    assert float(accuracy) > 0.9


@on_two_ranks
def test_float8(monkeypatch, capfd, strategy, devices):
    found = Page("float8").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    assert "3 steps" in capfd.readouterr().out
    assert found["engine"].global_step == 3


@on_two_ranks
def test_best_checkpoint_and_plain_torch(monkeypatch, capfd, strategy, devices):
    page = Page("best-checkpoint")
    found = page.run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    best = found["checkpoint"]
    assert best.best_model_score > 0.8
    assert "test/accuracy" in capfd.readouterr().out
    net = page.run_here("use.py", monkeypatch)["net"]
    assert capfd.readouterr().out.startswith("classes [")
    expected = DigitsClassifier.load_from_checkpoint(best.best_model_path, weights_only=False).net.state_dict()
    assert largest_difference(expected, net.state_dict()) == 0


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_other_process_counts(monkeypatch, capfd):
    page = Page("other-process-counts")
    page.run_here("train.py", monkeypatch, "10", strategy="ddp_fork", devices=2)
    page.run_here("train.py", monkeypatch, "20", strategy="fsdp_fork", devices=3)
    found = page.run_here("train.py", monkeypatch, "30")
    shown = "".join(capfd.readouterr())
    assert re.findall(r"continues from .*step=(\d+)", shown) == ["10", "20"]
    ranks = re.findall(r"global batch 64(?: =|, at most) (\d) x", shown)
    assert ranks == ["2", "3", "1"]
    assert found["engine"].global_step == 30


def test_lost_process(monkeypatch, capfd):
    page = Page("lost-process")
    script = page.folder / "train.py"
    script.write_text(script.read_text().replace("ddp_spawn", "ddp_fork"))  # without the seconds of three imports
    found = page.run_here("train.py", monkeypatch)
    lines = re.findall(r"rank (\d) of 2: rank 0 lost after step 40, 2 left: went on after", capfd.readouterr().out)
    assert sorted(lines) == ["0", "1"]
    assert found["engine"].global_step == 100


@in_one_process
def test_csv(monkeypatch, capfd, strategy, devices):
    Page("loggers").run_here("csv_file.py", monkeypatch, strategy=strategy, devices=devices)
    path = re.search(r"metrics are in (\S+)", capfd.readouterr().out)[1]
    lines = Path(path).read_text().splitlines()
    assert "train/loss" in lines[0]
    assert len(lines) >= 4


@pytest.mark.nightly  # tests/chaos/test_logged_integration.py has its curve
def test_weights_and_biases_offline(tmp_path):
    finished = Page("loggers").run("python", "weights_and_biases.py", strategy="ddp_fork", devices=2)
    assert finished.returncode == 0, finished.output
    (run,) = tmp_path.glob("**/offline-run-*/*.wandb")
    logged = run.read_bytes()
    assert b"train/loss" in logged
    assert b"val/accuracy" in logged


@pytest.mark.nightly
def test_mlflow_in_a_file(tmp_path):
    finished = Page("loggers").run("python", "ml_flow.py", strategy="ddp_fork", devices=2)
    assert finished.returncode == 0, finished.output
    logged = (tmp_path / "mlflow.db").read_bytes()
    assert b"train/loss" in logged
    assert b"val/accuracy" in logged


@on_two_ranks
def test_simple_profiler(monkeypatch, capfd, strategy, devices):
    Page("profilers").run_here("simple.py", monkeypatch, strategy=strategy, devices=devices)
    shown = "".join(capfd.readouterr())
    assert shown.count("Profiler Report") == 1, "rank 0 alone prints"
    assert "run_training_batch" in shown


@in_one_process
@pytest.mark.filterwarnings("ignore:.*profiler:UserWarning")
def test_traces_of_each_rank(monkeypatch, tmp_path, strategy, devices):
    Page("profilers").run_here("traces.py", monkeypatch, strategy=strategy, devices=devices)
    traces = list((tmp_path / "traces").glob("*.pt.trace.json"))
    assert len(traces) == devices
    assert any("aten::conv2d" in event["name"] for event in json.loads(traces[0].read_text())["traceEvents"])
    assert len(list((tmp_path / "traces").glob("*.txt"))) == devices


@pytest.mark.parametrize(("strategy", "devices"), BY_DDP)
@pytest.mark.filterwarnings("ignore:You requested to overfit but enabled train dataloader shuffling")
def test_overfitting_a_batch(monkeypatch, capfd, strategy, devices):
    Page("overfit-a-batch").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    loss, steps = re.search(r"loss ([\d.]+) after (\d+) steps", capfd.readouterr().out).groups()
    assert float(loss) < 0.1
    assert int(steps) == 40


@pytest.mark.filterwarnings("default")  # Optuna's, of features that it calls experimental
@on_two_ranks
def test_sweep(monkeypatch, capfd, strategy, devices):
    Page("hyperparameter-sweep").run_here("sweep.py", monkeypatch, strategy=strategy, devices=devices)
    shown = capfd.readouterr().out
    assert "best lr 5.0e-03: ['COMPLETE', 'PRUNED'" in shown


@pytest.mark.parametrize(("strategy", "devices"), BY_DDP)
def test_weights_leave_for_plain_torch(monkeypatch, tmp_path, strategy, devices):
    found = Page("export").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    module = found["engine"].lightning_module
    for weights in (load_file("digits.safetensors"), torch.load("digits.pt")):
        assert weights.keys() == module.state_dict().keys()
        assert largest_difference(weights, module.state_dict()) == 0
    assert (tmp_path / "digits.safetensors").stat().st_mode & 0o444 == (tmp_path / "digits.pt").stat().st_mode & 0o444
    assert not list(tmp_path.glob(".exporting*"))
    with pytest.raises(ValueError, match="is there already"):
        found["engine"].export("digits.pt")


def test_export_says_what_it_can_write(tmp_path):
    engine = Engine(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"unknown ending '\.onnx'"):
        engine.export("x.onnx")
    with pytest.raises(ValueError, match="no weights to write: call fit"):
        engine.export("x.pt")


def test_onnx(monkeypatch, capfd):
    page = Page("export")
    torch.manual_seed(0)
    save_file(DigitsClassifier().state_dict(), "digits.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.onnx's own, of parts of torch
        page.run_here("to_onnx.py", monkeypatch)
    assert float(re.search(r"largest difference (\S+)", capfd.readouterr().out)[1]) < 1e-5
    assert onnx.load("digits.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param, "any batch size"


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_fine_tuning_has_the_same_result_on_any_number_of_ranks(monkeypatch, tmp_path):
    page, weights = Page("fine-tuning"), {}
    for strategy, devices in [*WAYS_TO_EQUAL, ("zero1_fork", 2)]:
        found = page.run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
        weights[strategy] = weights_of(tmp_path / "end.ckpt")
        page.clear("end.ckpt")
    assert largest_difference({"w": found["before"]}, {"w": weights["single"]["backbone.1.weight"]}) > 1e-3
    for others in weights.values():
        assert largest_difference(weights["single"], others) < 1e-6


@in_one_process
def test_accumulation_schedule(monkeypatch, capfd, strategy, devices):
    Page("accumulation-schedules").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    num_steps = 34 + 9 if devices == 1 else 17 + 5
    assert f"{num_steps} steps" in capfd.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp_fork", 2)])
def test_memory(monkeypatch, strategy, devices):
    page, weights = Page("memory"), []
    for kind in ("full", "none"):
        script = page.folder / "train.py"
        script.write_text(script.read_text().replace('"full"', f'"{kind}"'))
        found = page.run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
        weights.append(found["module"].state_dict())
        assert found["engine"].flags["activation_checkpointing"] == kind
    assert largest_difference(*weights) == 0


def test_accumulation_schedule_contradicts_a_global_batch_size():
    schedule = GradientAccumulationScheduler({0: 1, 1: 4})
    engine = Engine(accelerator="cpu", devices=1, max_epochs=1, global_batch_size=64, callbacks=[schedule])
    with pytest.raises(ValueError, match="which global_batch_size=64 decides: leave one of them out"):
        engine.fit(DigitsClassifier(), datamodule=Digits())

    class Brings(DigitsClassifier):
        def configure_callbacks(self):
            return [GradientAccumulationScheduler({0: 1, 1: 4})]

    engine = Engine(accelerator="cpu", devices=1, max_epochs=1, global_batch_size=64)
    with pytest.raises(ValueError, match="which global_batch_size=64 decides: leave one of them out"):
        engine.fit(Brings(), datamodule=Digits())


@pytest.mark.parametrize(("strategy", "devices"), BY_DDP)
def test_own_callback(monkeypatch, capfd, strategy, devices):
    Page("own-callback").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    assert len(re.findall(r"largest loss of epoch [01]: \d", capfd.readouterr().out)) == 2, "rank 0 alone prints"


@on_two_ranks
def test_own_logger(monkeypatch, tmp_path, strategy, devices):
    Page("own-logger").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    run, module, *lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert run["hyper_parameters"]["polyphase/max_epochs"] == 1
    assert module["hyper_parameters"]["width"] == 32
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(4, 34 // devices, 5))


@pytest.mark.parametrize("folder", ["/proc/runs", "train.py/runs"])
def test_folder_that_cannot_be_written_to(monkeypatch, folder):
    with pytest.raises(ValueError, match=rf"default_root_dir='.*{folder}' can't be written to: .*Give a folder"):
        Page("read-only-folder").run_here("train.py", monkeypatch, folder)


@on_two_ranks
def test_sequences_of_many_lengths(monkeypatch, capfd, strategy, devices):
    Page("sequences-of-many-lengths").run_here("train.py", monkeypatch, strategy=strategy, devices=devices)
    loss, steps = re.search(r"loss ([\d.]+) after (\d+) steps", capfd.readouterr().out).groups()
    assert float(loss) < 4, "of 5.5 before training"
    assert int(steps) > 20


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_streams_with_shards(monkeypatch, capfd):
    page = Page("streams-with-shards")
    page.run_here("train.py", monkeypatch, "10", "0", strategy="ddp_fork", devices=2)
    found = page.run_here("train.py", monkeypatch, "30", "2")
    assert re.findall(r"continues from .*step=(\d+)", "".join(capfd.readouterr())) == ["10"]
    # 240 samples make 15 steps of 16: also in the epoch that the two runs share.
    assert found["engine"].global_step == 30
    assert found["engine"].current_epoch == 2
