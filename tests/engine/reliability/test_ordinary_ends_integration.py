"""Runs of several ranks that are ended on purpose leave no failure report."""

import contextlib
import sys
import types

import pytest
from lightning.pytorch import Callback

from tests.distributed import run_ranks
from tests.engine.tiny import Regression, as_rank, engine, rows


class TrialPruned(Exception):  # noqa: N818 - Optuna's name
    """Called as Optuna's is."""


def requeue():
    sys.exit(-1)


# As submitit's own handler of signals, by its module, ends a job.
SUBMITITS = types.FunctionType(requeue.__code__, {"sys": sys, "__name__": "submitit.core.job_environment"})


def prune():
    raise TrialPruned


def fail():
    raise ValueError("no ordinary end")


ENDS = {"pruned": prune, "exit": sys.exit, "requeued": SUBMITITS, "failed": fail}


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
