"""What is told from what: waits for slower ranks from communication, and passed events from those that are to come."""

import pytest
import torch

from polyphase.doctor.clocks import DeviceClock, HostClock, Measured, make_clock, shown_steps
from polyphase.engine.phases import PHASES


def seconds(**given):
    return {**dict.fromkeys(PHASES, 0.0), **given}


def test_the_rank_that_waits_least_in_a_step_has_not_waited_for_others():
    mine, others = seconds(compute=1.0, communication=0.5), seconds(compute=1.0, communication=0.5)
    # Each of them is slow in one of the steps; rank 2 knows of a step more.
    gathered = [(mine, [0.1, 0.4]), (others, [0.3, 0.2]), (seconds(communication=0.9), [0.3, 0.3, 0.3])]
    measured = Measured(mine, 2)
    assert measured.tell_waits(gathered, 0) == 2
    assert measured.seconds["waiting"] == pytest.approx(0.2)
    assert measured.seconds["communication"] == pytest.approx(0.3)
    assert sum(measured.seconds.values()) == pytest.approx(1.5)
    assert measured.mean_shares()["waiting"] == pytest.approx((0.2 / 1.5 + 0.2 / 1.5 + 0.3 / 0.9) / 3)


def test_no_more_is_told_than_there_was():
    mine = seconds(communication=0.1)
    Measured(mine, 1).tell_waits([(mine, [5.0]), (seconds(), [0.0])], 0)
    assert (mine["communication"], mine["waiting"]) == (0.0, 0.1)


def test_a_host_gives_each_step_its_communication():
    clock = HostClock()
    for _ in range(3):
        outer = clock.enter("communication")
        clock.enter(outer)
        clock.end_step()
    assert len(clock.by_step) == 3
    assert min(clock.by_step) > 0.0
    assert sum(clock.by_step) == pytest.approx(clock.seconds["communication"])
    measured = clock.take()
    assert measured.num_steps == 3
    assert clock.take().num_steps == 0
    clock.forget_steps(2)
    assert len(clock.by_step) == 1
    clock.forget_all_steps()
    assert clock.by_step == []


def test_steps_that_are_shown_are_the_same_on_all_ranks():
    now = iter(range(1000))
    clock = HostClock(lambda: float(next(now)))
    for length in (2, 1, 4, 1, 3):
        clock.enter("compute")
        for _ in range(length):
            clock.enter("communication")
            clock.enter("compute")
        clock.end_step()
    walls = clock.walls()
    assert walls == [5.0, 3.0, 9.0, 3.0, 7.0], "but for what is under way, which the next step has"
    others = [0.0, 0.0, 0.0, 50.0, 7.0]  # there the fourth one is the slowest by far
    median, slowest = shown_steps(clock, [walls, others], clock.by_step, last_step=25)
    assert (median["step"], median["wall_s"]) == (23, 4.5)
    assert (slowest["step"], slowest["wall_s"]) == (24, 26.5)
    shortest = [0.0, 0.0, 1.5, 0.0, 0.0]  # another rank has waited less in the third one
    (median, _) = shown_steps(clock, [walls, others], shortest, last_step=25)
    assert median == {"step": 23, "wall_s": 4.5, "compute": 5.0, "communication": 1.5, "waiting": 2.5}
    clock.forget_steps(4)
    assert (clock.walls(), clock.phases_of(0)["communication"]) == ([7.0], 3.0)
    assert shown_steps(clock, [clock.walls(), others], shortest, last_step=25) == [], "too few"


def test_the_steps_of_a_long_interval_are_not_all_kept():
    clock = HostClock()
    for _ in range(300):
        clock.end_step()
    assert len(clock.walls()) == 256
    clock.forget_steps(298)
    assert clock.walls() == []
    clock.forget_steps(2)
    clock.end_step()
    assert len(clock.walls()) == 1
    assert sum(clock.phases_of(0).values()) == clock.walls()[0] == 0.0


def test_a_cpu_has_the_hosts_clock():
    assert type(make_clock(torch.device("cpu"))) is HostClock


class Event:
    """An event of a device that is as far as the test says."""

    now, passed = 0.0, float("inf")

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self, stream=None):
        self.at = Event.now

    def query(self):
        return self.at <= Event.passed

    def elapsed_time(self, end):
        assert end.query(), "not to be asked before"
        return 1e3 * (end.at - self.at)


class Device:
    Event = Event

    @staticmethod
    def current_stream(device):
        return 0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("polyphase.doctor.clocks.module_of", lambda device: Device)
    monkeypatch.setattr(Event, "now", 0.0)
    monkeypatch.setattr(Event, "passed", float("inf"))
    return make_clock(torch.device("meta"))


def step(clock, compute_s, communication_s):
    clock.enter("compute")
    Event.now += compute_s
    clock.enter("communication")
    Event.now += communication_s
    clock.enter("engine")
    clock.end_step()


def test_a_device_is_read_as_far_as_it_is(clock):
    assert isinstance(clock, DeviceClock)
    for _ in range(3):
        step(clock, 1.0, 0.5)
    Event.passed = 3.0  # two steps
    first = clock.take()
    assert (first.num_steps, clock.by_step) == (2, [0.5, 0.5])
    assert (clock.walls(), clock.num_pending, clock.phases_of(1)["compute"]) == ([1.5, 1.5], 1, 1.0)
    assert sum(first.seconds.values()) == 3.0
    Event.passed = float("inf")
    second = clock.take()
    assert (second.num_steps, clock.by_step) == (1, [0.5, 0.5, 0.5])
    assert second.seconds["compute"] + first.seconds["compute"] == 3.0
    assert sum(second.seconds.values()) + sum(first.seconds.values()) == 4.5


def test_steps_that_the_device_has_not_done_are_forgotten_with_the_others(clock):
    for communication_s in (1.0, 2.0, 3.0):
        step(clock, 1.0, communication_s)
    Event.passed = 2.0
    clock.take()
    clock.forget_all_steps()
    step(clock, 1.0, 4.0)
    Event.passed = float("inf")
    assert clock.take().num_steps >= 3
    assert clock.by_step == [4.0]
