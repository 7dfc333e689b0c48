"""The phase that the loop announces while it does something: for reports of failures and for the clock."""

import torch

from ..tiny import Regression, engine, rows


class Notes(Regression):
    """Notes the phase in each of its parts."""

    def __init__(self):
        super().__init__()
        self.phases = {}

    def note(self, where):
        self.phases.setdefault(where, set()).add(self.trainer.heartbeat.phase)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.note("transfer")
        return batch

    def on_train_batch_start(self, batch, batch_idx):
        self.note("on_train_batch_start")

    def training_step(self, batch, batch_idx):
        self.note("training_step")
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda _: self.note("backward"))
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.note("on_before_optimizer_step")

    def optimizer_zero_grad(self, *args):
        self.note("zero_grad")
        super().optimizer_zero_grad(*args)

    def on_train_batch_end(self, *args):
        self.note("on_train_batch_end")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: self.note("step"))
        return optimizer


def test_each_part_of_a_step_is_announced():
    module = Notes()
    engine(accumulate_grad_batches=2).fit(module, rows(32))
    assert module.phases == {
        "transfer": {"copy"},
        "on_train_batch_start": {"batch"},
        "training_step": {"train"},
        "backward": {"train"},
        "zero_grad": {"optimizer"},
        "on_before_optimizer_step": {"optimizer"},
        "step": {"optimizer"},
        "on_train_batch_end": {"batch"},
    }
