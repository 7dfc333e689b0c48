"""The same global batch under every strategy and number of processes, compared with a plain loop in one process."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from polyphase.engine import Engine
from tests.pairs import alternating, nightly, paired

from .parity import TOLERANCE, adamw, largest_difference, suffixed
from .tiny import QUIET, Saves

BATCH = 32
SIZE = 311  # a prime: ten steps an epoch, the last one of 23 samples
EPOCHS = 2
STEPS = 20


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that say which they are."""

    def __init__(self, size: int) -> None:
        self.inputs = torch.randn(size, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.inputs[index], self.inputs[index].sum().sin()


class Fits(LightningModule):
    """Writes down which samples each step had on this rank."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.folder = folder
        self.seen: dict[int, list[int]] = defaultdict(list)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        numbers, inputs, targets = batch
        if self.folder is not None and self.trainer._data_connector.sizes.samples(batch_idx).local:
            self.seen[self.trainer.global_step] += numbers.tolist()
        return (self.net(inputs).squeeze(1) - targets).square().mean()

    def on_train_end(self) -> None:
        if self.folder is not None:
            (self.folder / f"{self.trainer.global_rank}.json").write_text(json.dumps(self.seen))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def plain_loop(module: Fits, order: list[list[int]]) -> dict[str, Tensor]:
    """One process, torch alone: a step for each list of samples."""
    data, optimizer = Numbered(SIZE), adamw(module)
    for samples in order:
        optimizer.zero_grad()
        inputs, targets = (torch.stack([data[i][part] for i in samples]) for part in (1, 2))
        (module.net(inputs).squeeze(1) - targets).square().mean().backward()
        optimizer.step()
    return module.state_dict()


def run(folder: Path, flag: str, devices: int, loader: DataLoader, **flags: object) -> tuple[Fits, list[list[int]]]:
    """The module, and the samples of each step."""
    module = Fits(folder)
    engine = Engine(
        strategy=suffixed(flag, "fork"), devices=devices, max_epochs=EPOCHS, global_batch_size=BATCH, **QUIET, **flags
    )
    engine.fit(module, loader)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(devices)]
    return module, [sorted(i for seen in ranks for i in seen.get(str(step), [])) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("flag", "devices", "micro"),
    [
        *paired(["ddp", "fsdp"], [1, 2, 3], [None, 5]),
        *nightly(*((flag, 4, micro) for flag in ("ddp", "fsdp") for micro in (None, 5))),
    ],
)
def test_same_samples_and_same_weights_as_one_process(flag, devices, micro, tmp_path):
    in_order = [list(range(SIZE))[at : at + BATCH] for at in range(0, SIZE, BATCH)] * EPOCHS
    expected = plain_loop(Fits(), in_order)
    module, steps = run(tmp_path, flag, devices, DataLoader(Numbered(SIZE), batch_size=16), micro_batch_size=micro)
    assert steps == in_order
    assert largest_difference(module.state_dict(), expected) <= TOLERANCE


@pytest.mark.parametrize("flag", ["ddp", "fsdp"])
def test_another_number_of_processes_goes_on_with_the_same_batches(flag, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    path, steps, module = None, [], Fits()
    # Two of them stop in the first epoch, three go on into the second one, one does the rest.
    for devices, until in ((2, 4), (3, 13), (1, STEPS)):
        folder = tmp_path / str(devices)
        folder.mkdir()
        module = Fits(folder)
        engine = Engine(
            strategy=suffixed(flag if devices > 1 else "single", "fork"), devices=devices, max_steps=until,
            max_epochs=EPOCHS, global_batch_size=BATCH, micro_batch_size=devices + 3,
            callbacks=[Saves(folder / "saved", until)], **QUIET,
        )  # fmt: skip
        engine.fit(module, DataLoader(Numbered(SIZE), batch_size=16, shuffle=True), ckpt_path=path)
        path = folder / "saved"
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(devices)]
        steps += [sorted(i for seen in ranks for i in seen.get(str(k), [])) for k in range(len(steps), until)]
    (tmp_path / "whole").mkdir()
    expected, whole = run(tmp_path / "whole", "single", 1, DataLoader(Numbered(SIZE), batch_size=16, shuffle=True))
    assert steps == whole
    assert largest_difference(module.state_dict(), expected.state_dict()) <= TOLERANCE


@pytest.mark.parametrize("flag", ["ddp", "fsdp"])
def test_a_shuffled_order_is_the_same_for_all(flag, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    found = []
    for devices in (1, 2, 3):
        folder = tmp_path / str(devices)
        folder.mkdir()
        name = flag if devices > 1 else "single"
        module, steps = run(folder, name, devices, DataLoader(Numbered(SIZE), batch_size=16, shuffle=True))
        found.append((module.state_dict(), steps))
    assert len({tuple(step) for step in found[0][1]}) == STEPS  # a new order each epoch
    for state, steps in found[1:]:
        assert steps == found[0][1]
        assert largest_difference(state, found[0][0]) <= TOLERANCE


@pytest.mark.parametrize(("flag", "devices"), [("single", 1), ("ddp", 3), ("fsdp", 2)])
def test_without_the_flag_samples_of_short_batches_count_equally_too(flag, devices, tmp_path):
    size = 16 * devices * 2
    expected = plain_loop(Fits(), [list(range(SIZE))[at : at + size] for at in range(0, SIZE, size)])
    module = Fits()
    Engine(strategy=suffixed(flag, "fork"), devices=devices, max_epochs=1, accumulate_grad_batches=2, **QUIET).fit(
        module, DataLoader(Numbered(SIZE), batch_size=16)
    )
    assert largest_difference(module.state_dict(), expected) <= TOLERANCE


class Sentences(Dataset[Tensor]):
    """Of 1 to 12 tokens."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, 13, (size,), generator=generator)
        self.tokens = [torch.randint(1, 20, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


def padded(sentences: list[Tensor]) -> Tensor:
    return pad_sequence(sentences, batch_first=True)


class Tokens(LightningModule):
    """Guesses each token from itself; notes the first step's gradient."""

    def __init__(self, weighs: bool = True, folder: Path | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
        self.weighs = weighs
        self.folder = folder

    def mean_loss(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(tokens).transpose(1, 2), tokens, ignore_index=0)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor] | Tensor:
        loss = self.mean_loss(batch)
        return {"loss": loss, "weight": (batch != 0).sum()} if self.weighs else loss

    def pipeline_stages(self) -> list[list[nn.Module]]:
        return [[self.net[0]], [self.net[1]]]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def first_gradient(
    module: Tokens, flag: str, devices: int, shares: int | None = None, size: int = 24, **flags: object
) -> dict[str, Tensor]:
    """What one step of SGD with a learning rate of one takes away; `shares` of the devices have their own samples."""
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    loader = DataLoader(Sentences(size), batch_size=24 // (shares or devices) // 3, collate_fn=padded)
    engine = Engine(strategy=suffixed(flag, "fork"), devices=devices, max_steps=1, **{**QUIET, **flags})
    engine.fit(module, loader)
    return {name: before[name] - tensor for name, tensor in module.state_dict().items()}


SHARES = [
    ("single", 1, 1),
    ("ddp", 2, 2),
    ("zero1", 2, 2),
    ("fsdp", 2, 2),
    ("hsdp:replicate=2", 4, 4),
    ("tp", 2, 1),
    ("pp", 2, 1),
    ("pp+fsdp:pipeline_size=2", 4, 2),
    ("ps", 2, 2),
]
MORE_SHARES = [
    ("ddp", 4, 4),
    ("fsdp:no_sync=false", 2, 2),
    ("fsdp+tp:tp=2", 4, 2),
    ("pp:schedule=zero-bubble", 2, 1),
    ("pp+ddp:pipeline_size=2", 4, 2),
]
"""Composed of those, or with an option."""
WINDOWS = [{"accumulate_grad_batches": 3}, {"global_batch_size": 24, "micro_batch_size": 5}]


@pytest.mark.parametrize(
    ("flag", "devices", "shares", "flags"),
    [*alternating(SHARES, WINDOWS), *nightly(*((*ranks, flags) for ranks in MORE_SHARES for flags in WINDOWS))],
)
@pytest.mark.filterwarnings("ignore:the loss of .* samples:UserWarning")  # the run that does not weigh
@pytest.mark.filterwarnings("ignore:the first 1 step.* are not those of one process:UserWarning")
@pytest.mark.filterwarnings("ignore:a step of .* on a batch is not the mean:UserWarning")
def test_gradients_are_those_of_the_mean_over_all_tokens(flag, devices, shares, flags):
    module = Tokens()
    module.mean_loss(padded([Sentences(24)[i] for i in range(24)])).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    found = first_gradient(Tokens(), flag, devices, shares, **flags)
    assert largest_difference(found, expected) <= 1e-6
    if devices > 1 or "accumulate_grad_batches" in flags:  # the mean of means is another one
        unweighed = first_gradient(Tokens(weighs=False), flag, devices, shares, **flags)
        assert largest_difference(unweighed, expected) > 1e-3


@pytest.mark.parametrize(
    ("flag", "devices"), [("ddp", 2), ("pp+ddp:pipeline_size=2", 4), ("pp+fsdp:pipeline_size=2", 4)]
)
def test_tokens_of_a_batch_that_only_keeps_a_rank_in_step_do_not_count(flag, devices):
    module = Tokens()
    module.mean_loss(Sentences(1)[0][None]).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    found = first_gradient(Tokens(), flag, devices, size=1, global_batch_size=24, micro_batch_size=2)
    assert largest_difference(found, expected) <= 1e-6


@pytest.mark.parametrize("flags", [{"precision": "bf16-mixed"}, {"precision": "16-mixed"}, {"compression": "bf16"}])
def test_so_they_are_in_16_bit_to_its_precision(flags):
    module = Tokens()
    module.mean_loss(padded([Sentences(24)[i] for i in range(24)])).backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    found = first_gradient(Tokens(), "ddp", 2, accumulate_grad_batches=3, **flags)
    assert largest_difference(found, expected) <= 2e-3  # 2^-9 of the largest gradient, 0.2, in each of a few sums


@pytest.mark.parametrize(("devices", "micro"), [(1, 5), (2, None), (3, 2)])
def test_flags_that_count_batches_count_global_ones(devices, micro, tmp_path):
    class Validates(Fits):
        def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
            pass

        def on_validation_start(self) -> None:
            self.seen[-1].append(self.trainer.global_step)

    module = Validates(tmp_path)
    engine = Engine(
        strategy=suffixed("ddp" if devices > 1 else "single", "fork"), devices=devices, max_epochs=2,
        global_batch_size=BATCH, micro_batch_size=micro, limit_train_batches=6, val_check_interval=2,
        num_sanity_val_steps=0, **QUIET,
    )  # fmt: skip
    engine.fit(module, DataLoader(Numbered(SIZE), batch_size=16), DataLoader(Numbered(5)))
    assert json.loads((tmp_path / "0.json").read_text())["-1"] == [2, 4, 6, 8, 10, 12]
