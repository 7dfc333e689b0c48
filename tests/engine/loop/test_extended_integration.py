"""A run that has ended, and is told to go on for longer, ends where one does that was told so at once."""

import time

import pytest
import torch
from lightning.pytorch import Callback

from tests.distributed import run_ranks
from tests.engine.tiny import Regression, as_rank, engine, rows
from tests.pairs import nightly


class Slow(Callback):
    def on_train_batch_end(self, *_):
        time.sleep(0.03)


WAYS = {
    "max_steps": ({"max_steps": 5}, {"max_steps": 21}),
    "max_epochs": ({"max_epochs": 1}, {"max_epochs": 3}),
    "limit_train_batches": (
        {"max_epochs": 2, "limit_train_batches": 3},
        {"max_epochs": 4, "limit_train_batches": 3},
    ),
    "max_steps, at the end of an epoch": ({"max_steps": 8}, {"max_steps": 21}),
    "max_steps, with accumulation": (
        {"max_steps": 3, "accumulate_grad_batches": 3},
        {"max_steps": 7, "accumulate_grad_batches": 3},
    ),
}


def weights_after(folder, starts, **flags):
    for start in starts:
        torch.manual_seed(7)
        module = Regression()
        each = {"max_epochs": -1, "default_root_dir": folder, "resume": "auto", **flags, **start}
        engine(**each).fit(module, rows(8 * 2 * each["devices"], batch_size=2, shuffle=True))
    return module.state_dict()


def check_all(rank, folder, num_ranks, ways):
    if num_ranks > 1:
        as_rank(rank)
    flags = {"devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto"}
    for name in ways:
        first, longer = WAYS[name]
        expected = weights_after(folder / f"{name} at once", [longer], **flags)
        found = weights_after(folder / name, [first, longer], **flags)
        for key, value in expected.items():
            assert torch.equal(found[key], value), (name, key)


def test_one_process(tmp_path):
    check_all(0, tmp_path, 1, WAYS)


FEW_WAYS = ["limit_train_batches", "max_steps, with accumulation"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("num_ranks", "ways"), [(2, FEW_WAYS), *nightly((2, list(WAYS)), (4, list(WAYS)))], ids=str)
def test_ranks(tmp_path, num_ranks, ways):
    run_ranks(check_all, num_ranks, tmp_path, num_ranks, ways, timeout_s=100, start_method="fork")


def test_max_time(tmp_path):
    expected = weights_after(tmp_path / "at once", [{"max_steps": 21}], devices=1)
    short, longer = {"max_time": {"seconds": 0.2}}, {"max_time": {"hours": 1}, "max_steps": 21}
    found = weights_after(tmp_path / "extended", [{**short, "callbacks": [Slow()]}, longer], devices=1)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
