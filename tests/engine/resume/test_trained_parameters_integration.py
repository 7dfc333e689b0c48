"""What callbacks unfreeze and add to optimizers in a run is there again in the run that resumes it, on any strategy."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ..tiny import engine

EPOCHS, BATCHES, SIZE = 5, 3, 4
SAVED_AFTER = 3


class Net(LightningModule):
    def __init__(self, normalises=True):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 6)
        self.norm = nn.BatchNorm1d(6) if normalises else nn.Identity()
        self.second = nn.Linear(6, 4)
        self.head = nn.Linear(4, 1)

    @property
    def backbone(self):
        return nn.Sequential(self.first, self.norm, self.second)

    def loss(self, inputs):
        return self.head(self.second(self.norm(self.first(inputs))).tanh()).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)


class Gradual(BaseFinetuning):
    """Unfreezes block by block, from the top; the batch normalisation is frozen as a whole."""

    def freeze_before_training(self, pl_module):
        self.freeze([pl_module.first, pl_module.norm, pl_module.second], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.second, optimizer, lr=0.05)
        if epoch == 2:
            self.unfreeze_and_add_param_group([pl_module.first, pl_module.norm], optimizer, lr=0.02)


class ByHand(Callback):
    """Does the same without Lightning's class: within a group that is there, and freezes the head in the end."""

    def setup(self, trainer, pl_module, stage):
        pl_module.second.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.second.requires_grad_(True)
            trainer.optimizers[0].param_groups[0]["params"].extend(pl_module.second.parameters())
        if trainer.current_epoch == 2:
            pl_module.head.requires_grad_(False)


class SaveAtEnd(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def data():
    return torch.randn(BATCHES * SIZE, 3, generator=torch.Generator().manual_seed(1))


def plain_loop(kind, normalises):
    net = Net(normalises)
    frozen = [net.first, net.norm, net.second] if kind is Gradual else [net.second]
    for block in frozen:
        block.requires_grad_(False)
    net.norm.track_running_stats = kind is not Gradual
    optimizer = net.configure_optimizers()
    for epoch in range(EPOCHS):
        if kind is Gradual and epoch == 1:
            net.second.requires_grad_(True)
            optimizer.add_param_group({"params": list(net.second.parameters()), "lr": 0.05})
        elif kind is Gradual and epoch == 2:
            for block in (net.first, net.norm):
                block.requires_grad_(True)
            net.norm.track_running_stats = True
            parameters = [*net.first.parameters(), *net.norm.parameters()]
            optimizer.add_param_group({"params": parameters, "lr": 0.02})
        elif kind is ByHand and epoch == 1:
            net.second.requires_grad_(True)
            optimizer.param_groups[0]["params"].extend(net.second.parameters())
        elif kind is ByHand and epoch == 2:
            net.head.requires_grad_(False)
        for inputs in data().split(SIZE):
            optimizer.zero_grad()
            net.loss(inputs).backward()
            optimizer.step()
    return net.state_dict()


ONE, DDP, FSDP = ("single", 1), ("ddp_fork", 2), ("fsdp_fork", 2)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [(Gradual, ONE, ONE), (ByHand, ONE, ONE), (Gradual, DDP, FSDP), (ByHand, FSDP, DDP), (Gradual, FSDP, ONE)],
)
def test_a_resumed_run_has_what_was_unfrozen_and_added(kind, before, after, tmp_path):
    path, normalises = tmp_path / "saved.ckpt", before == after  # a rank's half of a batch has other statistics
    for epochs, resumed, (strategy, devices) in [(SAVED_AFTER, None, before), (EPOCHS, path, after)]:
        net = Net(normalises)
        trainer = engine(
            strategy=strategy,
            devices=devices,
            max_epochs=epochs,
            callbacks=[kind(), SaveAtEnd(path)],
            default_root_dir=tmp_path,
        )
        trainer.fit(net, DataLoader(TensorDataset(data()), batch_size=SIZE // devices), ckpt_path=resumed)
    expected = plain_loop(kind, normalises)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value.float(), expected[name].float(), atol=1e-5, rtol=0, msg=name)


def test_what_the_new_script_itself_freezes_stays_frozen(tmp_path):
    """Only what has changed in the run is changed again: the first run has frozen nothing."""
    path = tmp_path / "saved.ckpt"
    engine(callbacks=[SaveAtEnd(path)]).fit(Net(), DataLoader(TensorDataset(data()), batch_size=SIZE))
    net = Net()
    net.second.requires_grad_(False)
    net.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    engine(max_epochs=2).fit(net, DataLoader(TensorDataset(data()), batch_size=SIZE), ckpt_path=path)
    assert torch.equal(net.second.weight, torch.load(path, weights_only=True)["state_dict"]["second.weight"])


class Validated(Net):
    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch[0]))


def test_an_average_is_the_current_weights_until_it_begins(tmp_path):
    """Lightning's averages the weights from step 5 on; the first validation and checkpoint come after step 3."""
    saved, losses = [], []

    class Notes(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            losses.append(float(trainer.callback_metrics["loss"]))
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
            saved.append(torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"])

    average = EMAWeightAveraging(decay=0.5, update_starting_at_step=4)
    loader = DataLoader(TensorDataset(data()), batch_size=SIZE)
    validation = DataLoader(TensorDataset(data()), batch_size=BATCHES * SIZE)
    trainer = engine(max_epochs=2, callbacks=[average, Notes()], num_sanity_val_steps=1)
    trainer.fit(Validated(), loader, validation)

    net = Net()
    optimizer, mean = net.configure_optimizers(), None
    for epoch in range(2):
        for i, inputs in enumerate(data().split(SIZE)):
            optimizer.zero_grad()
            net.loss(inputs).backward()
            optimizer.step()
            if epoch * BATCHES + i >= 4:
                now = {name: value.clone() for name, value in net.state_dict().items()}
                mean = (
                    now
                    if mean is None
                    else {n: v if v.dtype == torch.long else (v + now[n]) / 2 for n, v in mean.items()}
                )
        expected = mean or net.state_dict()
        evaluated = Net().eval()
        evaluated.load_state_dict(expected)
        assert losses[epoch] == pytest.approx(float(evaluated.loss(data()).detach()), abs=1e-6)
        for name, parameter in evaluated.named_parameters():
            torch.testing.assert_close(saved[epoch][name], parameter.detach(), atol=1e-6, rtol=0)


def test_an_average_that_never_begins_leaves_the_weights_as_they_are():
    trained = []
    for callbacks in ([], [EMAWeightAveraging(update_starting_at_step=10**6)]):
        net = Net()
        engine(callbacks=callbacks).fit(net, DataLoader(TensorDataset(data()), batch_size=SIZE))
        trained.append(net.state_dict())
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name])


def test_lightnings_callback_raises_its_learning_rate_after_a_resumption_as_without(tmp_path):
    ends = []
    for parts in ((EPOCHS,), (SAVED_AFTER, EPOCHS)):
        path = None
        for epochs in parts:
            net = Net(normalises=False)
            tuning = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01)
            saves = SaveAtEnd(tmp_path / f"{len(parts)}.ckpt")
            trainer = engine(max_epochs=epochs, callbacks=[tuning, saves])
            trainer.fit(net, DataLoader(TensorDataset(data()), batch_size=SIZE), ckpt_path=path)
            path = saves.path
        ends.append(net.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(value, ends[1][name], atol=1e-6, rtol=0, msg=name)
