"""Faults of training that are put into runs: the doctor finds each of them, and nothing in a healthy one."""

import pytest
import torch

from polyphase.callbacks import Doctor
from polyphase.doctor import judge, read_run
from tests.engine.tiny import Regression, StepsByHand, engine, rows

STEPS = 44
HEALTH = {"gradient_spikes", "loss_scale_falls", "dead_parameters", "lr_stands_still", "replicas_differ"}


class Scheduled(Regression):
    """A healthy one, with a schedule by steps."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.001)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Dead(Scheduled):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)


class Spikes(Scheduled):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1e4 if batch_idx == 29 else 1.0)


class Overflows(Scheduled):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("inf") if batch_idx > 20 else 1.0)


class NeverSteps(StepsByHand, Scheduled):
    """It never calls `step` of its scheduler."""


@pytest.mark.parametrize(
    ("module", "causes", "says", "flags"),
    [
        (Scheduled, set(), "", {}),
        (Dead, {"dead_parameters"}, "unused.weight, unused.bias had no gradient", {}),
        (Spikes, {"gradient_spikes"}, "by step 30", {}),
        (NeverSteps, {"lr_stands_still"}, "not stepped for", {}),
        (Overflows, {"loss_scale_falls"}, "the loss scale fell from", {"precision": "16-mixed"}),
    ],
)
def test_health(tmp_path, module, causes, says, flags):
    trainer = engine(
        callbacks=[Doctor(every_n_steps=5)], max_steps=STEPS, max_epochs=-1, nonfinite="ignore",
        default_root_dir=tmp_path, **flags,
    )  # fmt: skip
    trainer.fit(module(), rows(4 * STEPS))
    run = read_run(str(tmp_path))
    findings = [finding for finding in judge(run).findings if finding.cause in HEALTH]
    assert {finding.cause for finding in findings} == causes, run.intervals[0]
    assert all(says in finding.evidence for finding in findings)
    assert run.intervals[0][-1].checksum is None, "a single rank has nothing to compare"


def test_what_steps_in_many_kernels_is_noted(tmp_path):
    seen = {}
    for name, options in {"default": {}, "loop": {"foreach": False}, "fused": {"fused": True}}.items():

        class WithAdamW(Regression):
            def configure_optimizers(self, options=options):
                return torch.optim.AdamW(self.parameters(), **options)

        engine(callbacks=[Doctor()], max_steps=4, default_root_dir=tmp_path / name).fit(WithAdamW(), rows(16))
        seen[name] = read_run(str(tmp_path / name)).ranks[0].unfused_optimizer
    assert seen == {"default": "AdamW by foreach", "loop": "AdamW by a loop over its parameters", "fused": None}
