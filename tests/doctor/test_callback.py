"""`Doctor` in one process: phases add up, nothing is read, everything is as before when it ends."""

import copy
import json
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from polyphase.callbacks import Doctor
from polyphase.doctor import judge, read_run
from polyphase.doctor.figures import figures_of
from polyphase.engine.phases import PHASES
from tests.callbacks.runs import TinyModule, loader
from tests.engine.loop.costs import Costs
from tests.engine.tiny import Regression, Saves, StepsByHand, engine, rows
from tests.pairs import alternating

STEPS = 24
PAUSE_S = 0.02


class Edges(Callback):
    """When training began and ended, for a callback in this place."""

    def on_train_start(self, *args):
        self.began = time.perf_counter()

    def on_train_end(self, *args):
        self.ended = time.perf_counter()


class Slow(Callback):
    def on_train_batch_end(self, *args):
        time.sleep(PAUSE_S)


class Validates(Regression):
    def validation_step(self, batch, batch_idx):
        pass


def sleeps_in(method):
    """A module that sleeps in one of its methods."""
    original = getattr(Validates, method)

    def slow(*args, **kwargs):
        time.sleep(PAUSE_S)
        return original(*args, **kwargs)

    return type("Sleeps", (Validates,), {method: slow})()


class ByHand(StepsByHand, Regression):
    pass


def fit(folder, *callbacks, module=None, data=None, **flags):
    doctor, before, after = Doctor(), Edges(), Edges()
    flags = {"max_steps": STEPS, "max_epochs": -1, "log_every_n_steps": 5, "default_root_dir": folder, **flags}
    trainer = engine(callbacks=[before, *callbacks, doctor, after], **flags)
    val = rows(4) if isinstance(module, Validates) else None
    trainer.fit(module or Regression(), data or rows(4 * STEPS), val)
    return read_run(str(folder)), (before.ended - after.began, after.ended - before.began), doctor, trainer


def total(run, phase, rank=0):
    return sum(interval.seconds[phase] for interval in run.intervals[rank])


@pytest.mark.parametrize("module", [Regression, ByHand])
def test_phases_add_up_to_the_wall_time(tmp_path, module):
    run, (least_s, most_s), *_ = fit(tmp_path, Slow(), module=module())
    measured_s = sum(sum(interval.seconds.values()) for interval in run.intervals[0])
    assert 0.99 * least_s <= measured_s <= 1.01 * most_s
    assert sum(interval.wall_s for interval in run.intervals[0]) == pytest.approx(measured_s, rel=1e-4)
    assert [interval.step for interval in run.intervals[0]] == [3, 5, 10, 15, 20, 24]
    assert [interval.is_warmup for interval in run.intervals[0]] == [True, *[False] * 5]
    assert sum(interval.num_steps for interval in run.intervals[0]) == STEPS
    assert total(run, "compute") > 0
    assert total(run, "optimizer") > 0


class SlowRows(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        time.sleep(PAUSE_S)
        return torch.ones(4)


PHASE_OF = {
    "loader": "data_wait",
    "training_step": "compute",
    "backward": "compute",
    "optimizer_zero_grad": "optimizer",
    "on_after_batch_transfer": "copy",
    "on_train_batch_end": "callbacks",
}


@pytest.mark.parametrize(("method", "profiler"), alternating(PHASE_OF, [None, "simple"]))
def test_time_is_in_the_phase_in_which_it_was_spent(tmp_path, method, profiler):
    """Also where a profiler times all hooks by their names."""
    phase = PHASE_OF[method]
    if method == "loader":
        slow = {"data": torch.utils.data.DataLoader(SlowRows(), batch_size=1)}
    else:
        slow = {"module": sleeps_in(method)}
    run, *_ = fit(tmp_path, profiler=profiler, **slow)
    slept_s = STEPS * PAUSE_S
    assert total(run, phase) >= slept_s
    others = {other: total(run, other) for other in PHASES if other != phase}
    assert max(others.values()) < slept_s / 2, others


def test_validation_and_saves(tmp_path):
    module = sleeps_in("validation_step")
    saves = [Saves(tmp_path / f"{step}.ckpt", step) for step in (4, 8, 12)]
    run, *_ = fit(tmp_path, *saves, module=module, val_check_interval=6, num_sanity_val_steps=0)
    assert total(run, "validation") >= 4 * PAUSE_S
    assert sum(interval.num_saves for interval in run.intervals[0]) == 3
    assert total(run, "checkpoint") > 0
    hooks = [interval.by_hook.get("Saves.on_train_batch_end", 0.0) for interval in run.intervals[0]]
    assert sum(hooks) < total(run, "checkpoint"), "a save is not its callback's time"


def test_a_slow_callback_is_the_verdict(tmp_path):
    run, _, doctor, _ = fit(tmp_path, Slow())
    finding = judge(run).findings[0]
    assert finding.cause == "slow_callback"
    assert "Slow.on_train_batch_end" in finding.evidence
    assert 1e3 * PAUSE_S <= finding.numbers["step_ms"] < 10e3 * PAUSE_S
    assert "slow_callback: Slow.on_train_batch_end" in doctor.summary()[1]
    assert doctor.last["doctor/callbacks"] > 0.5


def test_the_summary_at_the_end_of_a_run_has_the_verdict(tmp_path, capfd):
    fit(tmp_path, Slow(), enable_run_summary=True)
    said = capfd.readouterr().out
    assert "doctor: a step takes" in said
    assert "  slow_callback: Slow.on_train_batch_end" in said


def test_nothing_is_read_between_two_intervals(tmp_path):
    """A device would be waited for; the attention mask is counted without that."""
    costs = Costs()
    masks = [{"x": torch.ones(2, 4), "attention_mask": torch.tensor([[1, 1, 0, 0]])} for _ in range(STEPS)]
    run, *_ = fit(tmp_path, costs, module=TinyModule(), data=loader(masks), max_steps=-1, max_epochs=1)
    ends = {interval.step - 1 for interval in run.intervals[0]}
    assert len(costs.reads) == STEPS
    quiet = [reads for batch, reads in enumerate(costs.reads) if batch not in ends and batch % 5]
    assert quiet == [0] * len(quiet), costs.reads
    assert run.intervals[0][-2].padding in (0.5, None)
    assert [each.padding for each in run.intervals[0] if each.padding is not None] == [0.5, 0.5]


class ManySteps(Regression):
    """Computes with many operators that have next to nothing to do."""

    num_operators = 2000

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for _ in range(self.num_operators):
            loss = loss * 1.0
        return loss


def test_operators_are_counted_and_their_calls_are_found(tmp_path):
    run, *_ = fit(tmp_path, module=ManySteps())
    assert run.ranks[0].operator_s > 0.0
    for interval in run.intervals[0][1:]:
        # Each is one in forward, and one in backward.
        assert (
            2 * ManySteps.num_operators <= interval.num_operators / interval.num_batches < 3 * ManySteps.num_operators
        )
    # A machine's speed may double between the measurement and the steps: a share of one half, for the rule.
    steady = figures_of(run).totals[0]
    run.ranks[0].operator_s = steady.seconds["compute"] / (2 * steady.num_operators)
    assert "host_bound" in [finding.cause for finding in judge(run).findings]


def test_everything_is_as_before_when_it_ends(tmp_path):
    wait = dist.Work.wait
    _, _, doctor, trainer = fit(tmp_path)
    assert dist.Work.wait is wait
    assert trainer.heartbeat.clock is None
    assert not {"start", "stop"} & vars(trainer.profiler).keys()
    assert vars(copy.deepcopy(doctor)).keys() <= vars(doctor).keys()


def test_everything_is_as_before_when_it_fails(tmp_path):
    class Fails(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 7:
                raise RuntimeError("by intention")
            return super().training_step(batch, batch_idx)

    doctor = Doctor()
    trainer = engine(callbacks=[doctor], log_every_n_steps=5, default_root_dir=tmp_path)
    with pytest.raises(RuntimeError, match="by intention"):
        trainer.fit(Fails(), rows(64))
    assert trainer.heartbeat.clock is None
    assert doctor.summary() == []
    assert [interval.step for interval in read_run(str(tmp_path)).intervals[0]] == [3, 5]


def test_a_second_run_keeps_the_notes_of_the_first(tmp_path):
    fit(tmp_path)
    before = (tmp_path / "doctor" / "rank_0.jsonl").read_text()
    fit(tmp_path)
    assert (tmp_path / "doctor" / "rank_0.jsonl.before").read_text() == before


def test_a_fast_dev_run_writes_nothing(tmp_path):
    engine(callbacks=[Doctor()], fast_dev_run=2, default_root_dir=tmp_path).fit(Regression(), rows())
    assert not (tmp_path / "doctor").exists()


def test_a_folder_that_can_not_be_written_to_is_an_error_before_it_begins(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ValueError, match="default_root_dir="):
        engine(callbacks=[Doctor()], default_root_dir=tmp_path / "file" / "logs").fit(Regression(), rows())


def test_weights_are_those_of_a_run_without_it(tmp_path):
    weights = []
    for callbacks in ([], [Doctor()]):
        module: LightningModule = Regression()
        engine(callbacks=callbacks, default_root_dir=tmp_path).fit(module, rows(64))
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(*weights)


def test_a_trainer_of_lightnings_is_refused(tmp_path):
    trainer = Trainer(callbacks=[Doctor()], logger=False, enable_checkpointing=False, accelerator="cpu", max_steps=1)
    with pytest.raises(Exception, match="Doctor listens to the loops of a polyphase Engine, but the trainer is a Trai"):
        trainer.fit(Regression(), rows())


def test_steps_of_an_interval_are_a_number():
    with pytest.raises(ValueError, match="every_n_steps must be a whole number of at least 1"):
        Doctor(every_n_steps=0)


def test_the_first_line_says_how_the_rank_runs(tmp_path):
    fit(tmp_path)
    line = json.loads((tmp_path / "doctor" / "rank_0.jsonl").read_text().splitlines()[0])
    assert (line["kind"], line["rank"], line["world_size"], line["device"]) == ("rank", 0, 1, "cpu")
    assert line["num_workers"] == 0
    assert line["num_threads"] == torch.get_num_threads()


def test_the_line_of_a_slow_hook_is_known(tmp_path):
    run, *_ = fit(tmp_path, Slow())
    line = Slow.on_train_batch_end.__code__.co_firstlineno
    assert run.ranks[0].hooks["Slow.on_train_batch_end"] == f"test_callback.py:{line}"
    assert not [name for name in run.ranks[0].hooks if name.startswith("Doctor.")]
    (finding,) = [finding for finding in judge(run).findings if finding.cause == "slow_callback"]
    assert finding.evidence.startswith(f"Slow.on_train_batch_end (test_callback.py:{line}) takes ")
