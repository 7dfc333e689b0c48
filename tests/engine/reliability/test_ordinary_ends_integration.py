"""Runs of several ranks that are ended on purpose leave no failure report."""

import contextlib
import sys

import pytest
from lightning.pytorch import Callback

from tests.distributed import run_ranks
from tests.engine.tiny import Regression, as_rank, engine, rows


def requeue():
    """As submitit's handler of signals ends a job."""
    sys.exit(-1)


def fail():
    raise ValueError("no ordinary end")


ENDS = {"exit": sys.exit, "requeued": requeue, "failed": fail}


class Ends(Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2:
            ENDS[self.how]()


def end(rank, folder, how):
    as_rank(rank)
    trainer = engine(strategy="ddp", devices=2, default_root_dir=folder, callbacks=[Ends(how)])
    with contextlib.suppress(BaseException):
        trainer.fit(Regression(), rows(64))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ENDS)
def test_only_failures_are_reported(tmp_path, how):
    run_ranks(end, 2, tmp_path, how, timeout_s=80, start_method="fork")
    assert len([*tmp_path.glob("failures/*.json")]) == (how == "failed")
