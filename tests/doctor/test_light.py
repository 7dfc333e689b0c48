"""`LightDoctor`: there by a flag, silent where nothing has cost seconds, and gone afterwards."""

import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from polyphase.callbacks import Doctor, LightDoctor
from polyphase.doctor import Interval, RankInfo, Run, judge, light, read_run
from polyphase.engine.config import EngineConfig
from polyphase.engine.default_callbacks import default_doctor
from polyphase.engine.phases import PHASES
from tests.engine.loop.costs import CallCount, Costs
from tests.engine.tiny import Regression, engine, rows

STEPS = 24
PAUSE_S = 0.02


class Slow(Callback):
    def on_train_batch_end(self, *args):
        time.sleep(PAUSE_S)


class Sees(Callback):
    """The doctors that are among the callbacks while it trains."""

    def on_train_batch_end(self, trainer, *args):
        self.doctors = [c for c in trainer.callbacks if isinstance(c, Doctor)]


def fit(folder, *callbacks, module=None, steps=STEPS, **flags):
    sees = Sees()
    flags = {"logger": CSVLogger(folder), "enable_run_summary": True, "enable_doctor": True, "max_epochs": -1, **flags}
    trainer = engine(callbacks=[*callbacks, sees], max_steps=steps, default_root_dir=folder, **flags)
    trainer.fit(module or Regression(), rows(4 * steps))
    return trainer, sees.doctors


def test_it_is_there_while_it_trains(tmp_path):
    trainer, doctors = fit(tmp_path)
    assert [type(doctor) for doctor in doctors] == [LightDoctor]
    assert not any(isinstance(callback, Doctor) for callback in trainer.callbacks), "they are the user's again"
    assert trainer.heartbeat.clock is None


def test_it_is_there_by_itself(tmp_path):
    assert [type(doctor) for doctor in fit(tmp_path, enable_doctor=None)[1]] == [LightDoctor]


@pytest.mark.parametrize(
    "flags",
    [
        {"enable_doctor": False},
        {"enable_doctor": None, "logger": False, "enable_progress_bar": False},
        {"enable_doctor": None, "fast_dev_run": True},
    ],
    ids=["flag", "silent", "fast_dev_run"],
)
def test_it_is_not_there_where_it_is_not_wanted(tmp_path, flags):
    assert fit(tmp_path, **flags)[1] == []


@pytest.mark.parametrize(("flag", "is_there"), [(None, False), (True, True)])
def test_on_accelerators_it_is_there_by_the_flag_alone(flag, is_there):
    config = EngineConfig(enable_doctor=flag)
    assert (default_doctor(config, [], is_on_cpu=False) is not None) == is_there
    assert default_doctor(config, [], is_on_cpu=True) is not None


def test_it_is_not_there_beside_another_one(tmp_path):
    assert [type(doctor) for doctor in fit(tmp_path, Doctor())[1]] == [Doctor]

    class Brings(Regression):
        def configure_callbacks(self):
            return [Doctor()]

    assert [type(doctor) for doctor in fit(tmp_path, module=Brings())[1]] == [Doctor]


def test_what_it_notes(tmp_path, monkeypatch):
    monkeypatch.setattr(light, "INTERVAL_STEPS", 10)
    fit(tmp_path, Slow(), accumulate_grad_batches=2, steps=STEPS)
    run = read_run(str(tmp_path / "lightning_logs" / "version_0"))
    intervals = run.intervals[0]
    assert [interval.step for interval in intervals] == [3, 13, 23, 24]
    assert [interval.num_steps for interval in intervals] == [3, 10, 10, 1]
    assert [interval.num_batches for interval in intervals] == [6, 20, 20, 2]
    assert sum(interval.num_samples for interval in intervals) == 2 * STEPS * 4
    assert all(sum(each.seconds.values()) == pytest.approx(each.wall_s, rel=1e-4) for each in intervals)
    assert set(intervals[0].seconds) == set(PHASES)
    assert sum(each.by_hook["Slow.on_train_batch_end"] for each in intervals) >= 2 * STEPS * PAUSE_S
    assert judge(run).findings[0].cause == "slow_callback"


def test_what_has_cost_seconds_is_said_in_five_lines(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(light, "_WORTH_S", 0.1)
    fit(tmp_path, Slow())
    lines = capfd.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("doctor: a step takes"))
    assert lines[first + 1].startswith("  slow_callback: Slow.on_train_batch_end")
    assert "polyphase doctor" in lines[first + 3]
    assert len(lines) - first <= 5


def test_what_has_cost_less_is_not_said(tmp_path, capfd):
    fit(tmp_path, Slow())
    assert "doctor" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("settings", "is_written"), [({}, False), ({"_WORTH_S": 0.1}, True), ({"INTERVAL_STEPS": 10}, True)]
)
def test_short_runs_leave_no_file(tmp_path, monkeypatch, settings, is_written):
    for name, value in settings.items():
        monkeypatch.setattr(light, name, value)
    fit(tmp_path, Slow())
    files = list(tmp_path.glob("**/rank_0.jsonl"))
    assert len(files) == is_written
    if is_written:
        intervals = read_run(str(files[0].parent)).intervals[0]
        assert sum(interval.num_steps for interval in intervals) == STEPS


def test_without_a_folder_of_logs_nothing_is_written(tmp_path):
    _, doctors = fit(tmp_path, logger=False)
    assert len(doctors) == 1
    assert list(tmp_path.glob("**/rank_*")) == []


def test_nothing_is_read_between_two_intervals(tmp_path):
    costs = Costs()
    fit(tmp_path, costs, log_every_n_steps=0, nonfinite="ignore")
    assert costs.reads == [0] * len(costs.reads)


def test_weights_are_those_of_a_run_without_it(tmp_path):
    weights = []
    for wanted in (False, True):
        module = Regression()
        fit(tmp_path, module=module, enable_doctor=wanted)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


class PausesSeen(Callback):
    """The batches after which the clock pauses, and those whose hooks it times."""

    def __init__(self, slow_from=None, pause_s=0.005):
        self.paused = []
        self.slow_from, self.pause_s = slow_from, pause_s

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        is_slow = self.slow_from is not None and batch_idx >= self.slow_from
        time.sleep(self.pause_s * (30 if is_slow else 1))  # a busy machine makes a few steps ten times as long

    def on_before_zero_grad(self, trainer, *args):
        if trainer.heartbeat.clock is None:
            self.paused.append(trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1)


def intervals_of(folder):
    return read_run(str(folder / "lightning_logs" / "version_0")).intervals[0]


def in_short_intervals(monkeypatch):
    monkeypatch.setattr(light, "INTERVAL_STEPS", 12)
    monkeypatch.setattr(light, "MEASURED_STEPS", 4)
    monkeypatch.setattr(light, "_UNEVEN", 3.0)  # a few short steps are less even than 512


def test_of_an_even_interval_the_first_steps_are_measured(tmp_path, monkeypatch):
    in_short_intervals(monkeypatch)
    seen = PausesSeen(pause_s=0.01)
    fit(tmp_path, seen, steps=3 + 2 * 12 + 6)
    # The warm-up has steps 0 to 2. The interval of 3 to 14 is measured as a whole, and finds the steps even.
    assert seen.paused == [*range(19, 27), 31, 32]
    for interval in intervals_of(tmp_path):
        assert sum(interval.seconds.values()) == pytest.approx(interval.wall_s, rel=1e-4)
        hook_s = interval.by_hook["PausesSeen.on_train_batch_end"]
        # Of steps in a pause the others' share is taken, which on a busy machine are not quite like them.
        assert 0.008 * interval.num_steps <= hook_s <= interval.seconds["callbacks"] + 1e-5


def test_an_interval_after_an_uneven_one_is_measured_as_a_whole(tmp_path, monkeypatch):
    in_short_intervals(monkeypatch)
    seen = PausesSeen(slow_from=3 + 12 + 6)
    fit(tmp_path, seen, steps=3 + 4 * 12)
    # Batch 21, in the pause of the second interval, begins to be slow; the third one finds all of its steps slow.
    assert seen.paused == [*range(19, 27), *range(43, 51)]


def test_validations_and_saves_are_measured_in_a_pause_too(tmp_path, monkeypatch):
    in_short_intervals(monkeypatch)

    class Validates(Regression):
        def validation_step(self, batch, batch_idx):
            time.sleep(0.05)

    module, steps = Validates(), 3 + 2 * 12
    seen = PausesSeen()
    trainer = engine(
        callbacks=[seen], max_steps=steps, max_epochs=-1, default_root_dir=tmp_path, logger=CSVLogger(tmp_path),
        enable_doctor=True, val_check_interval=steps - 2, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, rows(4 * steps), rows(8))
    assert steps - 3 in seen.paused, "the validation after that batch is in a pause"
    validated_s = [interval.seconds["validation"] for interval in intervals_of(tmp_path)]
    assert validated_s[:2] == [0.0, 0.0]
    assert 0.1 <= validated_s[2] < 0.2


def test_a_pause_calls_nothing_in_a_step_but_its_own_hook(tmp_path, monkeypatch):
    monkeypatch.setattr(light, "INTERVAL_STEPS", 40)
    monkeypatch.setattr(light, "MEASURED_STEPS", 4)

    class Counts(Callback):
        def on_train_batch_end(self, trainer, *args):
            counted.tick()

    calls = {}
    for wanted in (False, True):
        counted = CallCount(3 + 40 + 8, 3 + 40 + 38)  # in the pause of the second interval
        monkeypatch.setattr(light, "_UNEVEN", 1e9)
        fit(tmp_path, Counts(), steps=3 + 80, enable_doctor=wanted)
        calls[wanted] = counted.per_step
    assert calls[True] - calls[False] == 1


def told(communication, **given):
    seconds = {"compute": 1.0, "communication": communication}
    return Interval(step=20, num_steps=20, wall_s=sum(seconds.values()), seconds=seconds, **given)


@pytest.mark.parametrize("waits_are_told", [True, False])
def test_waits_are_told_by_interval_where_they_were_not_by_step(waits_are_told):
    infos = {rank: RankInfo(rank=rank, world_size=2, host="h", waits_are_told=waits_are_told) for rank in range(2)}
    run = Run(infos, {0: [told(0.5)], 1: [told(0.2)]})
    waits = [run.intervals[rank][0].seconds.get("waiting", 0.0) for rank in range(2)]
    assert waits == pytest.approx([0.0, 0.0] if waits_are_told else [0.3, 0.0])
    again = Run(infos, run.intervals)
    assert [again.intervals[rank][0].seconds for rank in range(2)] == [
        pytest.approx(run.intervals[rank][0].seconds) for rank in range(2)
    ]
