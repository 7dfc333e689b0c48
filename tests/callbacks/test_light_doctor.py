"""`LightDoctor`: there by a flag, silent where nothing has cost seconds, and gone afterwards."""

import time

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from polyphase.callbacks import Doctor, LightDoctor, light_doctor
from polyphase.engine.doctor import Interval, RankInfo, Run, judge, read_run
from polyphase.engine.phases import PHASES
from tests.engine.loop.costs import Costs
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


def test_it_is_not_there_where_it_is_not_wanted(tmp_path):
    assert fit(tmp_path, enable_doctor=False)[1] == []


def test_it_is_not_there_beside_another_one(tmp_path):
    assert [type(doctor) for doctor in fit(tmp_path, Doctor())[1]] == [Doctor]

    class Brings(Regression):
        def configure_callbacks(self):
            return [Doctor()]

    assert [type(doctor) for doctor in fit(tmp_path, module=Brings())[1]] == [Doctor]


def test_what_it_notes(tmp_path, monkeypatch):
    monkeypatch.setattr(light_doctor, "_INTERVAL_STEPS", 10)
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
    monkeypatch.setattr(light_doctor, "_WORTH_S", 0.1)
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
    ("settings", "is_written"), [({}, False), ({"_WORTH_S": 0.1}, True), ({"_INTERVAL_STEPS": 10}, True)]
)
def test_short_runs_leave_no_file(tmp_path, monkeypatch, settings, is_written):
    for name, value in settings.items():
        monkeypatch.setattr(light_doctor, name, value)
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
