from cProfile import Profile

import pytest
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric

from polyphase.engine.strategies.pipeline.log import StepLog, idle_text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("1f1b", 2, 4, 32, 1, 0.31),
            "pipeline (1f1b): the 2 ranks were idle for 31% of the time of a full batch of 4 micro-batches; 20% is what"
            " that number of them costs. microbatches=16 would make it 6%.",
        ),
        (
            ("gpipe", 4, 1, 8, 1, 0.8),
            "pipeline (gpipe): the 4 ranks were idle for 80% of the time of a full batch of 1 micro-batch; 75% is what"
            " that number of them costs. To make it 10%, give a rank batches that divide by microbatches=27 or more.",
        ),
        (
            ("interleaved", 2, 4, 12, 2, 0.2),
            "pipeline (interleaved): the 2 ranks were idle for 20% of the time of a full batch of 4 micro-batches; 11%"
            " is what that number of them costs. microbatches=6 would make it 8%.",
        ),
        (
            ("1f1b", 2, 9, 9, 1, 0.5),
            "pipeline (1f1b): the 2 ranks were idle for 50% of the time of a full batch of 9 micro-batches; 10% is what"
            " that number of them costs. The rest comes from stages that are not equally expensive, and from sending.",
        ),
        (
            ("zero-bubble", 1, 2, 4, 1, 0.0),
            "pipeline (zero-bubble): the one rank was idle for 0% of the time of a full batch of 2 micro-batches.",
        ),
    ],
)
def test_idle_time_in_words(arguments, expected):
    assert idle_text(*arguments) == expected


def calls_of_a_batch(number: int) -> int:
    """In which as many torchmetrics objects are logged by each of two micro-batches."""
    module = LightningModule()
    module.metrics = nn.ModuleList(MeanMetric() for _ in range(number))
    log = StepLog(module)
    with log.attached(), Profile(subcalls=False, builtins=False) as profile:
        for _ in range(2):
            log.begin_micro_batch(is_last_stage=True)
            for index, metric in enumerate(module.metrics):
                module.log(str(index), metric)
    return sum(entry.callcount for entry in profile.getstats())


def test_twice_as_many_metrics_take_twice_as_many_calls():
    assert calls_of_a_batch(100) <= 2.2 * calls_of_a_batch(50)
