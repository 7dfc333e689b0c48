"""Which parts are gathered as one: blocks, and large layers that nothing but their own forward needs."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from polyphase.engine.strategies.fsdp.unit_plan import ANY, describe_units, plan_units, weights_used_in
from tests.engine.parity import WideVocabulary

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def names(module: nn.Module, **options: bool) -> list[str]:
    return [unit.name for unit in plan_units(module, **options)]


def test_a_large_embedding_and_output_layer_are_units_and_the_last_one_is_kept():
    plan = plan_units(WideVocabulary())
    assert [unit.name for unit in plan] == ["embed", *BLOCKS, "head"]
    assert [unit.name for unit in plan if unit.is_kept] == ["head"]
    assert [unit.name for unit in plan if unit.is_block] == BLOCKS
    assert describe_units(WideVocabulary()) == (
        "Units of fsdp and hsdp:\n"
        "  embed: 8,192 values, freed after its forward\n"
        "  blocks.0 to blocks.2 (3): 1,056 values each, freed after its forward\n"
        "  head: 8,192 values, kept until its backward\n"
        "  all else: 64 values, whole throughout a step"
    )


def test_without_them_the_last_block_is_kept():
    plan = plan_units(WideVocabulary(), takes_layers=False)
    assert [unit.name for unit in plan] == BLOCKS
    assert [unit.name for unit in plan if unit.is_kept] == ["blocks.2"]


def tied(module: WideVocabulary) -> None:
    module.head.weight = module.embed.weight


def small(module: WideVocabulary) -> None:
    module.embed, module.head = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)


def biased(module: WideVocabulary) -> None:  # its output is a view
    module.head = nn.Linear(32, 256)


def renormalised(module: WideVocabulary) -> None:  # its forward writes
    module.embed = nn.Embedding(256, 32, max_norm=1.0)


def of_torch(module: WideVocabulary) -> None:  # which takes the weights of its layers
    module.head = nn.TransformerDecoderLayer(32, 1, 256, bias=False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (tied, BLOCKS),
        (small, BLOCKS),
        (biased, ["embed", *BLOCKS]),
        (renormalised, [*BLOCKS, "head"]),
        (of_torch, ["embed", *BLOCKS]),
    ],
)
def test_layers_that_are_left_with_all_else(change, expected):
    module = WideVocabulary()
    change(module)
    assert names(module) == expected


class Says(WideVocabulary):
    def shard_units(self):
        return self.blocks[:2]


class ByWeight(WideVocabulary):
    """Computes logits with the embedding's weight."""

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.embed.weight.T

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.logits(self.embed(batch)).mean()


def projected(layer: nn.Module, x: Tensor) -> Tensor:
    return functional.linear(x, layer.weight)


class ByAFunction(WideVocabulary):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return projected(self.head, self.embed(batch)).mean()


class ByName(WideVocabulary):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return functional.linear(self.embed(batch), getattr(self.head, "weight")).mean()  # noqa: B009


class OnlyItsDevice(WideVocabulary):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch.to(self.embed.weight.device), batch_idx)


@pytest.mark.parametrize(
    ("module", "used", "expected"),
    [
        (Says, set(), BLOCKS[:2]),
        (ByWeight, {"embed"}, [*BLOCKS, "head"]),
        (ByAFunction, {ANY}, BLOCKS),
        (ByName, {ANY}, BLOCKS),
        (OnlyItsDevice, set(), ["embed", *BLOCKS, "head"]),
    ],
)
def test_code_that_takes_the_weight_of_a_layer(module, used, expected):
    assert weights_used_in(module()) == used
    assert names(module()) == expected


def test_code_that_can_not_be_read_may_do_anything():
    written = {"nn": nn, "torch": torch, "WideVocabulary": WideVocabulary}
    exec("class Written(WideVocabulary):\n    def forward(self, x):\n        return self.embed(x)", written)  # noqa: S102
    assert weights_used_in(written["Written"]()) == {ANY}
