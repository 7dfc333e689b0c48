"""Torch's labels of a step are in a profile from when it begins; without one they are not opened."""

import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.autograd.profiler import record_function
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from .loop.test_shortcuts import Net
from .tiny import engine

NUM_BATCHES = 6
BEGINS_AT = 2
LOADER = "enumerate(DataLoader)#_{}ProcessDataLoaderIter.__next__"
OF_STEP = ("Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad")
OF_DDP = "DistributedDataParallel.forward"


def data(num_workers=0):
    return DataLoader(TensorDataset(torch.randn(2 * NUM_BATCHES, 4)), batch_size=2, num_workers=num_workers)


class Begin(Callback):
    """Begins a profile at the start of batch `BEGINS_AT`."""

    def __init__(self, profile):
        self.profile = profile

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == BEGINS_AT:
            self.profile.start()


@pytest.fixture
def group_of_one():
    """For a run of `ddp` in this process, which leaves its group there, where later tests would find it."""
    yield
    dist.destroy_process_group()


def in_profile(**flags):
    profile = torch.profiler.profile()
    engine(callbacks=[Begin(profile)], **flags).fit(Net(), data())
    profile.stop()
    return {event.key: event.count for event in profile.key_averages()}


def test_a_profile_has_the_labels_from_when_it_begins():
    counts = in_profile()
    assert [counts[label] for label in OF_STEP] == [NUM_BATCHES - BEGINS_AT] * 2
    assert counts[LOADER.format("Single")] == NUM_BATCHES - BEGINS_AT - 1  # the batch was fetched before it began


@pytest.mark.usefixtures("group_of_one")
def test_a_profile_of_ddp_has_its_label_too():
    counts = in_profile(strategy="ddp")
    assert [counts[label] for label in (*OF_STEP, OF_DDP)] == [NUM_BATCHES - BEGINS_AT] * 3


def opened_by(run):
    """Counts the labels that are opened while `run` is called."""
    opened = Counter()

    def note(frame, event, argument):
        if event == "call" and frame.f_code is record_function.__init__.__code__:
            opened[frame.f_locals["name"]] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return opened


def by_hand():
    module = Net()
    optimizer = module.configure_optimizers()
    for batch in data():
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()


def test_without_a_profile_no_label_of_a_step_is_opened():
    labels = {*OF_STEP, LOADER.format("Single")}
    assert labels <= set(opened_by(by_hand)), "torch opens them"
    assert not labels & set(opened_by(lambda: engine().fit(Net(), data())))


def test_without_a_profile_no_label_of_workers_batches_is_opened():
    label = LOADER.format("MultiProcessing").replace("ProcessingProcess", "Processing")
    assert label in opened_by(lambda: list(data(num_workers=1)))
    assert label not in opened_by(lambda: engine().fit(Net(), data(num_workers=1)))


@pytest.mark.usefixtures("group_of_one")
def test_without_a_profile_no_label_of_ddp_is_opened():
    assert OF_DDP not in opened_by(lambda: engine(strategy="ddp").fit(Net(), data()))


def test_labels_are_opened_where_a_profiler_from_outside_hooks_all_steps():
    handle = register_optimizer_step_post_hook(lambda *_: None)
    try:
        opened = opened_by(lambda: engine().fit(Net(), data()))
    finally:
        handle.remove()
    assert [opened[label] for label in OF_STEP] == [NUM_BATCHES] * 2
