"""Loggers of a run that is stopped, and started again: one curve each."""

import sys

import pytest

from ..distributed import ROOT, run_command

SCRIPT = """
import sys
from pathlib import Path
from tests.chaos.logged import LOGGERS, WHOLE, draw_stops, judge, run

folder = Path(sys.argv[1])
calm, stopped = folder / "calm", folder / "stopped"
run(calm, [WHOLE])
print("endings", run(stopped, [*draw_stops(4, seed=1), WHOLE]))
for name in LOGGERS:
    print(name, judge(name, stopped, calm, 5).is_one_curve, judge(name, stopped, calm, 5))
metadata = stopped.glob("mlruns/*/*/meta.yaml")
print("mlflow's status:", [path.read_text().partition("status: ")[2][:1] for path in metadata])
"""


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_one_curve_through_sigterm_and_sigkill(tmp_path):
    finished = run_command([sys.executable, "-c", SCRIPT, str(tmp_path)], timeout_s=360, cwd=ROOT)
    assert finished.returncode == 0, finished.output
    assert "endings [143, -9, 143, -9, 0]" in finished.output
    for name in ("csv", "mlflow", "tensorboard", "wandb"):
        assert f"\n{name} True" in finished.output, finished.output[-3000:]
    assert "mlflow's status: ['3']" in finished.output  # FINISHED


ENDS = """
import sys
from pathlib import Path
from tests.chaos.logged import LOGGERS, judge, run

folder = Path(sys.argv[1])
calm, ended = folder / "calm", folder / "ended"
{run}
for name in LOGGERS:
    print(name, judge(name, ended, calm, 5).is_one_curve, judge(name, ended, calm, 5))
"""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "starts",
    [
        # Step 12, the first epoch's last, has a snapshot from before the epoch's mean values were logged.
        pytest.param(
            [{"max_epochs": 1}, {"max_epochs": 1}, {"max_epochs": 2}], marks=pytest.mark.nightly, id="after an epoch"
        ),
        # With no snapshot of the step before the end; with one, too.
        pytest.param([{"max_steps": 7}, {"max_steps": 24}], id="in mid-epoch"),
        pytest.param(
            [{"max_steps": 7}, {"max_steps": 7}, {"max_steps": 9}, {"max_steps": 24}],
            marks=pytest.mark.nightly,
            id="in mid-epoch, again",
        ),
    ],
)
def test_one_curve_of_a_run_that_ended_and_goes_on(tmp_path, starts):
    script = ENDS.format(run=f"run(calm, {starts[-1:]})\nassert not any(run(ended, {starts}))")
    finished = run_command([sys.executable, "-c", script, str(tmp_path)], timeout_s=360, cwd=ROOT)
    assert finished.returncode == 0, finished.output
    for name in ("csv", "mlflow", "tensorboard", "wandb"):
        assert f"\n{name} True" in finished.output, finished.output[-3000:]


MAX_TIME = {"max_time": {"seconds": 1}, "max_epochs": -1}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ends", "last_step"),
    # Step 9 has a snapshot from before the mean values of the epoch that it cuts short were logged; step 10 has none.
    [(MAX_TIME, 9), (MAX_TIME, 10), ({"max_steps": 9}, 9)],
)
@pytest.mark.nightly
def test_a_run_that_ended_in_mid_epoch_keeps_its_points_when_it_is_started_again(tmp_path, ends, last_step):
    script = ENDS.format(
        run=f"""
import shutil, time
from tests.chaos.logged import Curves

class Slow(Curves):
    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == {last_step} - 1:
            time.sleep(1)

sys.modules["tests.chaos.logged"].Curves = Slow
flags = [{ends}]
assert run(ended, flags) == [0]
shutil.copytree(ended, calm)
assert run(ended, flags) == [0]
"""
    )
    finished = run_command([sys.executable, "-c", script, str(tmp_path)], timeout_s=360, cwd=ROOT)
    assert finished.returncode == 0, finished.output
    assert f"snapshots/step={last_step} " in finished.output
    for name in ("csv", "mlflow", "tensorboard", "wandb"):
        assert f"\n{name} True" in finished.output, finished.output[-3000:]
