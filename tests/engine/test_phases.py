"""The clock divides time without a rest: whatever is entered, announced, sealed or nested."""

import random
import threading
from collections import Counter

import pytest

from polyphase.engine.phases import (
    PHASES,
    PhaseClock,
    counts_as_communication,
    exposed_s,
    listening,
    phase_of_action,
    tell_wait,
    waits_are,
)


class Time:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def clock(time):
    return PhaseClock(time)


def spent(clock):
    return {phase: seconds for phase, seconds in clock.read().items() if seconds}


def test_phases_add_up_to_the_time_that_passed(clock, time):
    for number, phase in enumerate(PHASES, start=1):
        clock.enter(phase)
        time.now += number
    assert spent(clock) == {phase: float(number) for number, phase in enumerate(PHASES, start=1)}
    assert sum(clock.read().values()) == time.now


@pytest.mark.parametrize(
    ("announced", "phase"),
    [
        ("fetch", "data_wait"),
        ("copy", "copy"),
        ("train", "compute"),
        ("optimizer", "optimizer"),
        ("log", "logging"),
        ("batch", "engine"),
        ("setup", "engine"),
    ],
)
def test_a_loops_words(clock, time, announced, phase):
    clock.enter(announced)
    time.now += 2
    assert spent(clock) == {phase: 2.0}


def test_all_within_validation_is_validation_but_a_save(clock, time):
    with clock.sealed("validate"):
        time.now += 1
        clock.enter("fetch")
        time.now += 1
        with clock.sealed("save"):
            clock.enter("communication")
            time.now += 5
        assert clock.enter("Mine.on_validation_end") == "validate"
        time.now += 1
    time.now += 7
    assert spent(clock) == {"validation": 3.0, "checkpoint": 5.0, "engine": 7.0}
    assert clock.num_saves == 1


def test_a_hooks_time_is_without_the_save_and_the_wait_in_it(clock, time):
    outer = clock.enter("Mine.on_train_batch_end")
    time.now += 1
    with clock.sealed("save"):
        time.now += 10
    inner = clock.enter("communication")
    time.now += 20
    clock.enter(inner)
    clock.enter(outer)
    assert clock.by_hook == {"Mine.on_train_batch_end": 1.0}
    assert spent(clock) == {"callbacks": 1.0, "checkpoint": 10.0, "communication": 20.0}
    assert clock.phase == "engine"


def test_waits_are_told_to_the_innermost_clock_in_its_thread_only(clock, time):
    @counts_as_communication
    def wait(seconds):
        time.now += seconds
        return seconds

    assert wait(1) == 1
    outside = PhaseClock(time)
    with listening(outside), listening(clock):
        assert wait(2) == 2
        other = threading.Thread(target=wait, args=(4,))
        other.start()
        other.join()
    wait(8)
    assert clock.read()["communication"] == 2.0
    assert outside.read()["communication"] == 0.0


def test_waits_are_what_the_caller_says(clock, time):
    @counts_as_communication
    def wait(seconds):
        time.now += seconds

    with listening(clock):
        with waits_are("bubble"):
            wait(1)
            with waits_are("communication"):
                wait(2)
            wait(4)
        wait(8)
    assert spent(clock) == {"bubble": 5.0, "communication": 10.0}


@pytest.mark.parametrize(
    ("waited_s", "told"),
    [
        (0.0, {"bubble": 3.0, "communication": 2.0, "waiting": 1.0}),
        (2.0, {"bubble": 1.0, "communication": 2.0, "waiting": 3.0}),
        (4.0, {"bubble": 0.0, "communication": 1.0, "waiting": 5.0}),
        (9.0, {"bubble": 0.0, "communication": 0.0, "waiting": 6.0}),
    ],
)
def test_waits_for_slower_ranks_are_told_from_the_bubble_first(waited_s, told):
    seconds = {"bubble": 3.0, "communication": 2.0, "waiting": 1.0}
    assert exposed_s(seconds) == 5.0
    assert tell_wait(seconds, waited_s) == told
    assert seconds["bubble"] == 3.0


@pytest.mark.parametrize("first", ["fetch", "data_wait", "elsewhere"])
def test_steps_that_are_alike_and_others_are_summed_up_alike(first):
    rng = random.Random(0)
    usual, now, expected = [first, "batch", "train", "optimizer", "batch", "A.b"], [0.0], Counter()
    clock = PhaseClock(lambda: now[0])
    for _ in range(200):
        activities = usual if rng.random() < 0.8 else rng.choices([*usual, "log"], k=rng.randint(1, 9))
        for activity in activities:
            clock.enter(activity)
            seconds = rng.randint(1, 9)
            now[0] += seconds
            expected[activity] += seconds
        if rng.random() < 0.1:
            clock.read()
    clock.enter("engine")
    assert clock.sums() == expected | {"engine": 0.0}


def test_what_nobody_reads_does_not_pile_up(clock, time):
    for _ in range(20_000):
        clock.enter("fetch")
        time.now += 1
        clock.enter("train")
        time.now += 2
    assert len(clock._notes) <= 20_000
    assert spent(clock) == {"data_wait": 20_000.0, "compute": 40_000.0}


@pytest.mark.parametrize(
    ("action", "phase"),
    [
        ("[_TrainingEpochLoop].train_dataloader_next", "data_wait"),
        ("[Strategy]DDP.batch_to_device", "copy"),
        ("[Strategy]DDP.training_step", "compute"),
        ("[Strategy]DDP.backward", "compute"),
        ("[Strategy]DDP.validation_step", None),
        ("optimizer_step", "optimizer"),
        ("[LightningModule]GAN.optimizer_step", "optimizer"),
        ("[LightningModule]GAN.on_train_batch_end", "callbacks"),
        ("[LightningModule]GAN.on_after_batch_transfer", "copy"),
        ("[LightningModule]GAN.configure_optimizers", None),
        ("[Callback]EarlyStopping{'monitor': 'a.b'}.on_train_epoch_end", "callbacks"),
        ("run_training_batch", None),
    ],
)
def test_the_actions_of_lightnings_profiler(action, phase):
    assert phase_of_action(action) == phase
