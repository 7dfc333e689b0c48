"""Pipelines through real runs on the CPU: what is logged, returned, predicted; modules of all kinds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from polyphase.engine import Engine
from polyphase.engine.checkpoint import is_checkpoint
from tests.engine.parity import MLP, build, largest_difference, loader
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly


def data(size: int = 20, batch_size: int = 8) -> DataLoader:
    torch.manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(size, 64), torch.arange(size) % 10), batch_size=batch_size)


class Logs(MLP):
    """Logs in all ways, and returns what hooks see."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.accuracy = MulticlassAccuracy(10)
        self.auroc = MulticlassAUROC(10)  # a state that is a list
        self.step_accuracy = MulticlassAccuracy(10)
        self.average = MeanMetric()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        logits = self.net(images)
        loss = nn.functional.cross_entropy(logits, classes)
        self.step_accuracy(logits.softmax(1), classes)
        self.log("loss", loss, prog_bar=True)
        self.log("samples", float(len(images)), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", logits.max(), reduce_fx=torch.max, on_step=False, on_epoch=True, sync_dist=True)
        self.log("accuracy", self.step_accuracy, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        images, classes = batch
        logits = self.net(images)
        self.accuracy(logits, classes)
        self.auroc.update(logits.softmax(1), classes)
        self.average.update(logits.mean(), len(images))
        self.log_dict({"val/accuracy": self.accuracy, "val/auroc": self.auroc}, batch_size=len(images))
        self.log("val/loss", nn.functional.cross_entropy(logits, classes), batch_size=len(images), sync_dist=True)
        return {"best": logits.argmax(1), "loss": logits.mean(), "name": "logits"}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([outputs["best"].tolist(), outputs["loss"].item(), outputs["name"]])

    def on_validation_epoch_end(self) -> None:
        self.log("val/average", self.average.compute(), sync_dist=True)
        self.average.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).argmax(1)


class Writer(Callback):
    """Writes what each rank knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer, pl_module):
        known = {name: float(value) for name, value in trainer.callback_metrics.items()}
        content = {"losses": self.losses, "metrics": known, "seen": pl_module.seen}
        (self.folder / f"{trainer.world_size}-{trainer.global_rank}.json").write_text(json.dumps(content))


def test_logs_metrics_and_outputs_are_those_of_one_process_on_every_rank(tmp_path):
    found = []
    for strategy, devices in (
        ("single", 1),
        ("pp_fork:microbatches=2", 2),
        ("pp+ddp_fork:pipeline_size=2,microbatches=2", 4),
    ):
        engine = Engine(
            strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, callbacks=[Writer(tmp_path)], **QUIET
        )
        size = 8 // engine.data_size
        engine.fit(Logs(), data(batch_size=size), data(21, size))
        found.append([json.loads((tmp_path / f"{devices}-{rank}.json").read_text()) for rank in range(devices)])
    [[single], pipeline, pipelines] = found
    for of_rank in pipeline:
        assert of_rank["losses"] == pytest.approx(single["losses"], abs=1e-5)
        assert of_rank["metrics"] == pytest.approx(single["metrics"], abs=1e-5)
        assert [seen[0] for seen in of_rank["seen"]] == [seen[0] for seen in single["seen"]]
        assert [seen[2] for seen in of_rank["seen"]] == ["logits"] * len(single["seen"])
    expected = {name: value for name, value in single["metrics"].items() if name != "loss"}  # that of a rank's batch
    for of_rank in pipelines:
        assert {name: of_rank["metrics"][name] for name in expected} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("strategy", "devices"), [("pp_fork", 2), ("pp+fsdp_fork:pipeline_size=2", 4)])
def test_validates_tests_and_predicts(strategy, devices):
    def run(strategy: str, devices: int) -> tuple[Any, ...]:
        engine = Engine(strategy=strategy, accelerator="cpu", devices=devices, **QUIET)
        module, size = Logs(), 8 // engine.data_size
        return (
            engine.validate(module, data(21, size), verbose=False),
            engine.test(module, data(21, size), verbose=False),
            torch.cat(engine.predict(module, data(21, size))).tolist(),
        )

    validated, tested, predicted = run(strategy, devices)
    expected = run("single", 1)
    assert validated[0] == pytest.approx(expected[0][0], abs=1e-5)
    assert tested[0] == pytest.approx(expected[1][0], abs=1e-5)
    assert predicted == expected[2]


class Distils(MLP):
    """A student and a teacher of the same blocks, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.teacher = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(2))
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        student = self.net(batch[0])
        with torch.no_grad():
            target = self.teacher(batch[0] + 0.01)
        return nn.functional.mse_loss(student, target)


def test_a_student_is_cut_and_its_teacher_is_not():
    weights = []
    for flag, number in (("single", 1), ("pp_fork", 2)):
        module = Distils()
        Engine(strategy=flag, accelerator="cpu", devices=number, max_epochs=1, **QUIET).fit(module, data(24))
        weights.append(module.state_dict())
    assert largest_difference(*weights) <= 1e-5


class Unfreezes(MLP):
    """Trains a weight that is tied between stages, and a layer, from the third batch on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.net[3].weight = self.net[0].weight
        self._train_late(False)

    def _train_late(self, trains: bool) -> None:
        self.net[0].weight.requires_grad_(trains)
        self.net[1].requires_grad_(trains)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._train_late(batch_idx >= 2)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("pp_fork", 2), ("pp+fsdp_fork:pipeline_size=2", 4), *nightly(("pp+ddp_fork:pipeline_size=2", 4))],
)
def test_parameters_may_be_frozen_at_first(strategy, devices):
    weights = []
    for flag, number in (("single", 1), (strategy, devices)):
        module = Unfreezes()
        engine = Engine(strategy=flag, accelerator="cpu", devices=number, max_epochs=1, gradient_clip_val=0.1, **QUIET)
        engine.fit(module, data(40, 8 // engine.data_size))
        weights.append(module.state_dict())
    assert largest_difference(*weights) <= 1e-5


def test_a_parameter_of_several_stages_that_is_used_late_is_named():
    class Late(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))  # around the blocks: on the first and the last stage
            self.net = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = self.net[1](self.net[0](batch[0]))
            return nn.functional.cross_entropy(x * self.scale if batch_idx else x, batch[1])

    engine = Engine(strategy="pp_fork", accelerator="cpu", devices=2, max_epochs=1, **QUIET)
    with pytest.raises(Exception, match=r"had no gradient in the first step .*, and have one now: scale\. Use"):
        engine.fit(Late(), data())


def test_what_a_later_stage_holds_may_have_several_names():
    weights = []
    for strategy, devices in (("single", 1), ("pp_fork:microbatches=1,schedule=gpipe", 2)):
        torch.manual_seed(1)
        module = MLP()
        module.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)))
        module.net[3][0].weight = module.net[2][0].weight
        module.tail = module.net[3]
        Engine(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, **QUIET).fit(module, data(24))
        weights.append(module.state_dict())
    assert largest_difference(*weights) <= 1e-5


class Crops(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = batch[0].unflatten(1, (8, 8))[:, : 4 if batch_idx else 8]
        return self.net(rows).square().mean()


def test_a_size_that_changes_in_the_step_is_refused():
    module = Crops()
    module.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    engine = Engine(strategy="pp_fork:microbatches=2", accelerator="cpu", devices=2, max_epochs=1, **QUIET)
    message = r"in training_step: .* gives 'net.1' tensors \[4, 4, 8\] of torch.float32, but gave it \[4, 8, 8\]"
    with pytest.raises(Exception, match=message):
        engine.fit(module, data())


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_short_last_batch_is_cut_into_as_many_equal_parts_as_it_has(schedule):
    weights = []
    for strategy, devices in (("single", 1), (f"pp_fork:microbatches=8,schedule={schedule}", 2)):
        module = build("mlp")
        Engine(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, **QUIET).fit(module, data(13))
        weights.append(module.state_dict())
    assert largest_difference(*weights) <= 1e-5


class GathersAndRefusesWhatIsRandom(MLP):
    """Trial runs with random values end early on one rank of a stage, after the gathering."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0] * 1e-3).square().mean()
        total = self.all_gather(loss.detach()).sum()
        if self.global_rank == 3 and loss > 0.05:
            raise ValueError("too large")
        return loss + 0 * total


def test_ranks_that_gather_may_try_out_steps_and_batches_different_numbers_of_times():
    weights = []
    for strategy, devices in (("single", 1), ("pp+ddp_fork:pipeline_size=2,microbatches=1,schedule=gpipe", 4)):
        torch.manual_seed(1)
        module = GathersAndRefusesWhatIsRandom()
        module.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        engine = Engine(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, **QUIET)
        engine.fit(
            module, data(23, 8 // engine.data_size)
        )  # the last batch has 4 samples on one rank, and 3 on another
        weights.append(module.state_dict())
    assert largest_difference(*weights) <= 1e-5


class Hooks(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def on_before_zero_grad(self, optimizer):
        self.called.append("zero")

    def on_before_backward(self, loss):
        self.called.append(f"before {loss.item():.4f}")

    def on_after_backward(self):
        own = [p for p in self.parameters() if self.trainer.engine_strategy.keeps_state_of(p)]
        self.called.append(f"after {all(p.grad is not None for p in own)}")

    def on_before_optimizer_step(self, optimizer):
        self.called.append("step")

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


class HookWriter(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        trainer.strategy.barrier()  # rank 0 may still remove a checkpoint
        own = [p for p in pl_module.parameters() if trainer.engine_strategy.keeps_state_of(p)]
        state = [v for s in trainer.optimizers[0].state.values() for v in s.values() if v.dim()]
        content = {
            "called": pl_module.called,
            "norm": float(trainer.grad_norm),
            "held": sum(getattr(p, "_local_tensor", p).numel() for p in own),
            "state": sum(getattr(v, "_local_tensor", v).numel() for v in state),
            "sent": [[*sent, size] for wire in trainer.strategy.wires for sent, size in wire.sent.items()]
            if trainer.world_size > 1
            else [],
            "best": str(trainer.checkpoint_callback.best_model_path) != "",
            "kept": sum(map(is_checkpoint, (self.folder / "best").iterdir())),
        }
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("strategy", "devices"), [("pp_fork", 2), ("pp+fsdp_fork:pipeline_size=2", 4)])
def test_hooks_norm_memory_and_the_best_checkpoint(strategy, devices, tmp_path):
    def run(strategy: str, devices: int, folder: Path) -> list[dict[str, Any]]:
        folder.mkdir()
        best = ModelCheckpoint(folder / "best", monitor="val/loss", save_top_k=1)
        engine = Engine(
            strategy=strategy,
            accelerator="cpu",
            devices=devices,
            max_epochs=2,
            gradient_clip_val=0.1,
            callbacks=[best, HookWriter(folder)],
            **QUIET | {"enable_checkpointing": True},
        )
        torch.manual_seed(1)
        size = 8 // engine.data_size
        engine.fit(Hooks(), data(16, size), data(16, size))
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(devices)]

    [expected] = run("single", 1, tmp_path / "one")
    ranks = run(strategy, devices, tmp_path / "many")
    assert [rank["norm"] for rank in ranks] == pytest.approx([expected["norm"]] * devices, rel=1e-5)
    for rank in ranks:
        assert [call.split()[0] for call in rank["called"]] == ["zero", "before", "after", "step"] * 4
        assert rank["called"][2] == "after True"
        assert rank["best"]
        assert rank["kept"] == expected["kept"] == 1
    if devices == 2:  # 4 batches of 8 samples to train on and 6 to validate on, 32 values each
        assert ranks[0]["sent"] == [["send_activations", 0, (4 + 6) * 8 * 32 * 4]]
        assert ranks[1]["sent"] == [["send_gradients", 1, 4 * 8 * 32 * 4]]
    held = [rank["held"] for rank in ranks]
    assert sum(held) == pytest.approx(expected["held"], rel=0.02)  # shards are filled up to equal sizes
    assert max(held) < 0.7 * expected["held"]
    assert [rank["state"] for rank in ranks] == [2 * numel for numel in held]


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_precisions_are_those_of_one_process(precision):
    weights = []
    for strategy, devices in (("single", 1), ("pp_fork:microbatches=1,schedule=gpipe", 2)):
        module = build("mlp")
        Engine(strategy=strategy, accelerator="cpu", devices=devices, max_steps=3, precision=precision, **QUIET).fit(
            module, data(32)
        )
        weights.append(module.state_dict())
    assert largest_difference(*weights) <= 1e-6


def test_one_stage_is_one_process():
    weights = []
    for strategy in ("single", "pp_fork"):
        module = build("gpt, tied")
        engine = Engine(strategy=strategy, accelerator="cpu", devices=1, max_steps=3, **QUIET)
        engine.fit(module, loader("gpt, tied", 1))
        weights.append(module.state_dict())
    assert largest_difference(*weights) <= 1e-6
