"""Averages of weights by Lightning's callbacks, under every strategy: those of a plain loop, across checkpoints."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.optim.swa_utils import SWALR, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from polyphase.engine.checkpoint import load_checkpoint
from polyphase.engine.errors import RefusedError
from polyphase.models import Digits, DigitsClassifier
from tests.engine.parity import MLP, QUIET, adamw, largest_difference, loader, suffixed
from tests.engine.parity import build as build_subject
from tests.engine.tiny import SavesIn
from tests.pairs import nightly

EPOCHS, STEPS, BATCH, ACCUMULATE = 3, 4, 8, 2
SAVED_AFTER = 6
"""Steps: in the midst of the second epoch."""
TOLERANCE = 1e-6


class Counting(MLP):
    """Has a buffer that each step changes, and that the evaluation uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx) + self.seen.sum(), sync_dist=True)

    test_step = validation_step


def build() -> Counting:
    torch.manual_seed(1)
    return Counting().train()


def rows(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(num, 64, generator=generator), torch.arange(num) % 10)


TRAINED, EVALUATED = rows(STEPS * ACCUMULATE * BATCH), rows(2 * BATCH)


class Kind(NamedTuple):
    make: Callable[[], pl.Callback]
    update: Callable[[Tensor, Tensor, int], Tensor]
    """The average after one more step, of the average, the weights, and the number of steps before."""
    has_buffers: bool = True


KINDS = {
    "EMA": Kind(lambda: EMAWeightAveraging(decay=0.5), lambda mean, now, n: 0.5 * mean + 0.5 * now),
    "mean": Kind(WeightAveraging, lambda mean, now, n: (mean * n + now) / (n + 1)),
    "EMA of a list": Kind(
        lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=False),
        lambda mean, now, n: (mean + now) / 2,
        has_buffers=False,
    ),
    "a function of the user's": Kind(
        lambda: WeightAveraging(avg_fn=lambda mean, now, n: mean + (now - mean) / (1 + now.norm())),
        lambda mean, now, n: mean + (now - mean) / (1 + now.norm()),
    ),
}


class Result(NamedTuple):
    weights: dict[str, Tensor]
    """At the end."""
    losses: list[float]
    """Of the evaluation after each epoch."""
    saved: tuple[dict[str, Tensor], dict[str, Tensor]]
    """The weights, and their average, in mid-epoch."""


def plain_loop(kind: Kind) -> Result:
    module, average, num = build(), {}, 0
    optimizer, losses, saved = adamw(module), [], None
    for _ in range(EPOCHS):
        batches = list(DataLoader(TRAINED, BATCH))
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            for batch in (first, second):
                (module.training_step(batch, 0) / 2).backward()
            module.seen += 1
            optimizer.step()
            with torch.no_grad():
                for name, now in module.state_dict().items():
                    is_first = num == 0 or (name == "seen" and not kind.has_buffers)
                    average[name] = now.clone() if is_first else kind.update(average[name], now, num)
            num += 1
            if num == SAVED_AFTER:
                saved = {name: value.clone() for name, value in module.state_dict().items()}, dict(average)
        evaluated = build().eval()
        evaluated.load_state_dict(average)
        with torch.no_grad():
            of_batches = [evaluated.training_step(batch, 0) + evaluated.seen for batch in DataLoader(EVALUATED, BATCH)]
        losses.append(float(sum(of_batches) / len(of_batches)))
    return Result(average, losses, saved)


def swa_by_hand() -> Result:
    """Averages the weights at the start of each epoch from the second on; its rate takes two epochs to come to 0.01."""
    module, average, saved, losses = build(), [], None, []
    optimizer = adamw(module)
    schedule, num = None, 0
    for epoch in range(EPOCHS):
        if epoch == 1:
            for group in optimizer.param_groups:
                group["initial_lr"] = 0.01
            schedule = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2, anneal_strategy="cos", last_epoch=EPOCHS)
        if epoch >= 1:
            average.append({name: p.detach().clone() for name, p in module.named_parameters()})
        batches = list(DataLoader(TRAINED, BATCH))
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            for batch in (first, second):
                (module.training_step(batch, 0) / 2).backward()
            module.seen += 1
            optimizer.step()
            num += 1
            if num == SAVED_AFTER:
                saved = {name: value.clone() for name, value in module.state_dict().items()}, average[0]
        if schedule is not None:
            schedule.step()
        module.eval()
        with torch.no_grad():
            of_batches = [module.training_step(batch, 0) + module.seen for batch in DataLoader(EVALUATED, BATCH)]
        module.train()
        losses.append(float(sum(of_batches) / len(of_batches)))
    mean = {name: sum(epoch[name] for epoch in average) / len(average) for name in average[0]}
    return Result({**module.state_dict(), **mean}, losses, saved)


KINDS["SWA"] = Kind(
    lambda: StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=2), lambda mean, now, n: now
)
EXPECTED: dict[str, Result] = {}


def expected(name: str) -> Result:
    if name not in EXPECTED:
        EXPECTED[name] = swa_by_hand() if name == "SWA" else plain_loop(KINDS[name])
    return EXPECTED[name]


class Saves(pl.Callback):
    """Saves in mid-epoch, and ends the run there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SAVED_AFTER:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def fit(flag: str, devices: int, callbacks: list[Any], path: Path | None = None, **flags: Any) -> tuple[Any, Engine]:
    module = build()
    engine = Engine(
        strategy=suffixed(flag, "fork"),
        accelerator="cpu",
        devices=devices,
        accumulate_grad_batches=ACCUMULATE,
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **{"max_epochs": EPOCHS, **QUIET, **flags},
    )
    size = BATCH // engine.data_size
    engine.fit(module, DataLoader(TRAINED, size), DataLoader(EVALUATED, size), ckpt_path=path)
    return module, engine


STRATEGIES = {
    "single": 1,
    "fsdp": 2,
    "ddp": 2,
    "pp:microbatches=4": 2,
    "zero1": 2,
    "tp": 2,
    "ps:staleness=0": 2,
    "hsdp:replicate=2,shard=2": 4,
    "pp+fsdp:pipeline_size=2,microbatches=2": 4,
    "fsdp+tp:tp=2": 4,
    "pp+ddp:pipeline_size=2,microbatches=2": 4,
}
"""World size by flag; a run goes on under the next one."""
FLAGS = list(STRATEGIES)
NEXT = dict(zip(FLAGS, [*FLAGS[1:], FLAGS[0]], strict=True))


USUAL = (
    *(("single", "a function of the user's"), ("fsdp", "EMA"), ("pp:microbatches=4", "SWA"), ("tp", "EMA of a list")),
    *(("zero1", "mean"), ("hsdp:replicate=2,shard=2", "EMA")),
)


@pytest.mark.parametrize(
    ("flag", "name"), [*USUAL, *nightly(*(cell for cell in product(FLAGS, KINDS) if cell not in USUAL))]
)
def test_a_run_that_goes_on_under_another_strategy_has_the_average_of_a_plain_loop(tmp_path, flag, name):
    kind, saved, plain = KINDS[name], tmp_path / "saved.ckpt", expected(name)
    fit(flag, STRATEGIES[flag], [kind.make(), Saves(saved)])
    content = load_checkpoint(saved)
    current, average = content.get("current_model_state", content["state_dict"]), content["state_dict"]
    if name == "SWA":
        average = content["callbacks"]["StochasticWeightAveraging"]["average_model_state"]
        average = {key: average[key] for key in plain.saved[1]}
    assert largest_difference(dict(current), plain.saved[0]) <= TOLERANCE
    assert largest_difference(dict(average), plain.saved[1]) <= TOLERANCE
    module, engine = fit(NEXT[flag], STRATEGIES[NEXT[flag]], [kind.make()], saved)
    assert largest_difference(module.state_dict(), plain.weights) <= TOLERANCE
    assert float(engine.callback_metrics["loss"]) == pytest.approx(plain.losses[-1], abs=1e-5)


@pytest.mark.parametrize(("flag", "devices"), [("cp", 2), *nightly(("fsdp+cp", 4))])
def test_where_sequences_are_split_it_is_that_of_a_plain_loop(flag, devices):
    subject, update = "gpt, tied", KINDS["EMA"].update
    module = build_subject(subject)
    flags = {"strategy": suffixed(flag, "fork"), "accelerator": "cpu", "devices": devices, "max_epochs": 1}
    engine = Engine(callbacks=[KINDS["EMA"].make()], **flags, **QUIET)
    engine.fit(module, loader(subject, 1, engine.data_size, STEPS))
    reference = build_subject(subject)
    optimizer, average = adamw(reference), None
    for num, batch in enumerate(loader(subject, 1, num_steps=STEPS)):
        optimizer.zero_grad()
        reference.training_step(batch, 0).backward()
        optimizer.step()
        now = {name: value.clone() for name, value in reference.state_dict().items()}
        average = now if average is None else {name: update(average[name], now[name], num) for name in now}
    assert largest_difference(now, average) > 1e-4
    assert largest_difference(module.state_dict(), average) <= TOLERANCE


def test_under_local_sgd_it_is_the_average_of_the_mean_of_all_ranks():
    """Steps 4 and 8, before validations, are no exchanges; the last step is one, after which the averages differ."""
    kind, ranks = KINDS["EMA"], [build(), build()]
    optimizers, average, num = [adamw(module) for module in ranks], {}, 0
    for _ in range(EPOCHS):
        batches = list(DataLoader(TRAINED, BATCH))
        for window in zip(batches[::2], batches[1::2], strict=True):
            for rank, (module, optimizer) in enumerate(zip(ranks, optimizers, strict=True)):
                optimizer.zero_grad()
                for batch in window:
                    (module.training_step([part[rank::2] for part in batch], 0) / 2).backward()
                module.seen += 1
                optimizer.step()
            mean = {name: (value + ranks[1].state_dict()[name]) / 2 for name, value in ranks[0].state_dict().items()}
            average = mean if num == 0 else {name: kind.update(average[name], mean[name], num) for name in mean}
            num += 1
            if num % 3 == 0:
                for module in ranks:
                    module.load_state_dict(mean)
        evaluated = build().eval()
        evaluated.load_state_dict(average)
    with torch.no_grad():
        losses = [float(evaluated.training_step(batch, 0) + evaluated.seen) for batch in DataLoader(EVALUATED, BATCH)]
    module, engine = fit("local_sgd:sync_every=3", 2, [kind.make()])
    assert largest_difference(module.state_dict(), average) <= TOLERANCE
    assert float(engine.callback_metrics["loss"]) == pytest.approx(sum(losses) / len(losses), abs=1e-5)


class Watches(pl.Callback):
    """Notes what is sent while the callbacks between its two ends run, and how many values this rank averages."""

    def __init__(self, average: Any) -> None:
        self.average, self.mode = average, CommDebugMode()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with self.mode:
            self.average.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        assert self.mode.get_total_counts() == 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        whole = sum(p.numel() for p in MLP().parameters())
        tensors = self.average._average_model.module.parameters()
        held = sum(
            (t.to_local() if isinstance(t, DTensor) else t).numel()
            for t in tensors
            if trainer.engine_strategy.keeps_state_of(t)
        )
        assert self.average._average_model.n_averaged == EPOCHS * STEPS
        assert held < 0.7 * whole  # about a half: neither layers nor a dim of 10 are cut evenly


@pytest.mark.parametrize("flag", ["fsdp", "pp:microbatches=4"])
def test_a_rank_holds_its_part_of_an_average_and_sends_nothing_for_an_update(flag):
    average = EMAWeightAveraging(decay=0.5)
    fit(flag, 2, [Watches(average), average])


def test_a_checkpoint_that_is_saved_in_a_validation_has_the_weights_in_their_place(tmp_path):
    """Lightning's has the average in the place of the weights, from which a resumed run would go on."""
    path, plain = tmp_path / "saved.ckpt", expected("EMA")
    fit("single", 1, [EMAWeightAveraging(decay=0.5), SavesIn("on_validation_batch_start", 2, path)])
    module, _ = fit("single", 1, [EMAWeightAveraging(decay=0.5)], path)
    assert largest_difference(module.state_dict(), plain.weights) <= TOLERANCE


def test_weights_whose_average_has_not_begun_stay_as_they_are():
    """Lightning's gives the module the weights before training, if the number of epochs is not known."""
    swa = StochasticWeightAveraging(0.01, swa_epoch_start=9)
    module, _ = fit("single", 1, [swa], max_epochs=-1, max_steps=STEPS)
    without, _ = fit("single", 1, [], max_epochs=-1, max_steps=STEPS)
    assert largest_difference(module.state_dict(), without.state_dict()) == 0


@pytest.mark.filterwarnings("ignore:.*loading a checkpoint outside the 'fit' stage")
@pytest.mark.parametrize(
    ("flag", "kind"),
    [("single", "EMA"), ("single", "SWA"), ("fsdp", "SWA"), ("tp", "SWA"), ("pp:microbatches=4", "SWA")],
)
def test_the_average_of_a_fit_is_not_evaluated_in_the_place_of_other_weights(flag, kind, tmp_path):
    """Lightning's validates it for each checkpoint and each module, and can't test what a strategy has split."""
    early, loader = tmp_path / "early.ckpt", DataLoader(EVALUATED, BATCH)
    _, engine = fit(flag, STRATEGIES[flag], [KINDS[kind].make(), SavesIn("on_train_epoch_end", 1, early)])
    fresh = Engine(accelerator="cpu", callbacks=[KINDS[kind].make()], **QUIET)
    for module, path in ((build(), early), (Counting(), None)):
        (plain,) = fresh.validate(module, loader, path, verbose=False)
        assert engine.validate(module, loader, path, verbose=False) == [pytest.approx(plain, rel=1e-5)]
        assert engine.test(module, loader, path, verbose=False) == [pytest.approx(plain, rel=1e-5)]


class MadeLater(Counting):
    def setup(self, stage: str) -> None:
        self.later = torch.nn.Linear(2, 2)


def test_what_can_not_be_averaged_is_refused_by_name():
    with pytest.raises(RefusedError, match="EMAWeightAveraging and WeightAveraging would each swap"):
        fit("single", 1, [EMAWeightAveraging(), WeightAveraging()])
    with pytest.raises(ValueError, match=r"WeightAveraging has copied the module before it had later\.weight"):
        Engine(accelerator="cpu", max_steps=1, callbacks=[EMAWeightAveraging()], **QUIET).fit(
            MadeLater(), DataLoader(TRAINED, BATCH)
        )


def test_an_average_by_one_number_of_all_parameters_is_refused_where_a_stage_has_some():
    def average(means: list[Tensor], weights: list[Tensor], num: int) -> None:
        step = 1 / (1 + torch.stack([weight.norm() for weight in weights]).norm())
        for mean, weight in zip(means, weights, strict=True):
            mean.lerp_(weight, step)

    with pytest.raises(
        ProcessRaisedException, match=r"the multi_avg_fn of WeightAveraging .* give the callback an avg_fn"
    ):
        fit("pp:microbatches=4", 2, [WeightAveraging(multi_avg_fn=average)])


def test_statistics_that_need_a_pass_over_the_data_of_all_ranks_are_refused_before_the_first_step():
    module = DigitsClassifier(width=2)
    swa = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    engine = Engine(strategy="ddp_fork", accelerator="cpu", devices=2, max_epochs=2, callbacks=[swa], **QUIET)
    with pytest.raises(ProcessRaisedException, match="StochasticWeightAveraging computes the statistics of BatchNorm"):
        engine.fit(module, datamodule=Digits())
    assert engine.global_step == 0
