"""Buffers that the first batch does not write: the stage that has written one has its value, or the run says so."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.model import Model
from tests.zoo.plain import Block, rows
from tests.zoo.run import run
from tests.zoo.unusual import Blocks

ALONE = "pp:microbatches=1,schedule=gpipe"
"""As in one process, but for who has what."""


class KeepsALateLoss(Blocks):
    """The buffer belongs to the first stage, and the last one has the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last_loss", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.last_loss.copy_(loss.detach())
        return loss


class KeepsItInData(KeepsALateLoss):
    """A write that no version of the tensor shows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = Blocks.training_step(self, batch, batch_idx)
        if batch_idx == 2:
            self.last_loss.data.copy_(loss.detach())
        return loss


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros(()))
        self.counter, self.is_late = [self], False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_late:
            self.counter[0].large += (x.detach().abs() > 1).sum()
        return super().forward(x)


class CountsLate(Blocks):
    """Each block has its own counter."""

    block = Counts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:
            block.is_late = batch_idx > 0
        return super().training_step(batch, batch_idx)


class CountsTogether(CountsLate):
    """All blocks have the counter of the first one."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.counter = [self.blocks[0]]


@pytest.mark.filterwarnings("ignore:the step writes into the buffer 'last_loss' on one stage")
@pytest.mark.parametrize("make", [KeepsALateLoss, KeepsItInData, CountsLate])
def test_the_stage_that_wrote_it_has_the_value(make):
    assert run(Model(make, rows()), ALONE).kind == "equal"


def test_that_other_stages_have_not_seen_it_is_said():
    found = run(Model(KeepsALateLoss, rows()), ALONE)
    assert "into the buffer 'last_loss' on one stage of a pipeline only" in found.detail


def test_that_it_was_written_for_each_micro_batch_is_said():
    found = run(Model(CountsLate, rows()), "pp")
    assert "writes into the buffer 'blocks.0.large'" in found.detail
    assert "in a pipeline 4 times a batch" in found.detail


def test_that_several_stages_wrote_it_is_an_error():
    found = run(Model(CountsTogether, rows()), ALONE)
    assert found.kind == "refused", found
    assert "'blocks.0.large' of Counts is written by a step on pipeline stage 0 and a step on" in found.detail
