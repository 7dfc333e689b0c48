"""What hooks and optimizers see of state, gradients and types where a rank has a part: as in a plain loop, or an error.

The hooks set the learning rate by all that they see, so that a part gives other weights.
"""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ..parity import largest_difference
from ..tiny import engine

NUM_BATCHES, SIZE, DIM = 8, 4, 6


class Net(LightningModule):
    """The last bias, of one value, is empty on a rank of several that split it."""

    def __init__(self, make_optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.make_optimizer = make_optimizer
        blocks = (nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(4))
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(DIM, 1)

    def training_step(self, batch, batch_idx):
        return (self.head(self.blocks(batch[0])) - batch[1]).square().mean()

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, eps=1e-4)  # a near-zero gradient


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(NUM_BATCHES * SIZE, size, generator=generator) for size in (DIM, 1)))


def plain_loop(make_optimizer, **hooks):
    module = Net(make_optimizer)
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(DataLoader(data(), SIZE)):
        for name in ("on_train_batch_start", "on_train_batch_end"):
            if name == "on_train_batch_end":
                loss = module.training_step(batch, index)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if name in hooks:
                hooks[name](module, optimizer)
    return module.state_dict()


class Hook(Callback):
    def __init__(self, name, function):
        self.function = function
        setattr(self, name, self.call)

    def call(self, trainer, module, *unused):
        self.function(module, trainer.optimizers[0])


def fitted(strategy, make_optimizer=adamw, callbacks=(), kind=Net, devices=2):
    module = kind(make_optimizer)
    size = SIZE if strategy in ("tp", "pp") else SIZE // devices
    trainer = engine(strategy=f"{strategy}_fork", devices=devices, callbacks=list(callbacks), check_first_steps=False)
    trainer.fit(module, DataLoader(data(), size))
    return module.state_dict()


def set_rate(optimizer, rate):
    optimizer.param_groups[0]["lr"] = rate


# --- weights


def rate_by_norms(module, optimizer):
    set_rate(optimizer, 0.4 / sum(p.norm(dim=0).sum().item() for p in module.parameters()))


def rate_by_truths(module, optimizer):
    set_rate(optimizer, 0.4 / sum((p > -1).any(0).sum().item() for p in module.parameters()))


def rate_by_losses(module, optimizer):
    losses = [functional.mse_loss(p, torch.zeros(p.shape)) for p in module.parameters() if p.numel() > 1]
    set_rate(optimizer, 0.02 / (1 + float(torch.stack(losses).detach().sum())))


def rate_by_text(module, optimizer):
    set_rate(optimizer, 0.4 / sum(float(f"{p.norm():.6f}") for p in module.parameters()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reads", [rate_by_norms, rate_by_truths, rate_by_losses, rate_by_text])
@pytest.mark.parametrize(("strategy", "devices"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4), ("tp", 2)])
def test_hooks_see_the_values_of_whole_parameters(strategy, devices, reads):
    callback = Hook("on_train_batch_end", reads)
    expected = plain_loop(adamw, on_train_batch_end=reads)
    assert largest_difference(fitted(strategy, callbacks=[callback], devices=devices), expected) <= 1e-5


# --- state


def halve_moments(module, optimizer):
    for index, values in enumerate(optimizer.state.values()):
        if index % 3:
            values["exp_avg"].mul_(0.5)


def rate_by_number(module, optimizer):
    set_rate(optimizer, 0.4 / len(optimizer.state))


def rate_by_members(module, optimizer):
    set_rate(optimizer, 0.4 / sum(p in optimizer.state for p in module.parameters()))


def rate_by_sizes(module, optimizer):
    set_rate(optimizer, 2 / sum(values["exp_avg"].numel() for values in optimizer.state.values()))


def rate_by_steps(module, optimizer):
    set_rate(optimizer, 0.4 / sum(float(values["step"]) for values in optimizer.state.values()))


def rate_by_moments(module, optimizer):
    squares = sum(float(values["exp_avg"].square().sum()) for values in optimizer.state.values())
    set_rate(optimizer, 0.02 / (1 + 100 * squares))


def averages(module, optimizer):
    """Reads a copy."""
    moments = [values["exp_avg"] for values in optimizer.state_dict()["state"].values()]
    set_rate(optimizer, 0.02 / (1 + float(torch.stack([moment.norm() for moment in moments]).norm())))


class ByClipping(Net):
    def configure_gradient_clipping(self, optimizer, *unused, **flags):
        set_rate(optimizer, 0.4 / (1 + len(optimizer.state)))


class ByStep(Net):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        set_rate(optimizer, 0.4 / (1 + len(optimizer.state)))
        super().optimizer_step(epoch, batch_idx, optimizer, closure)


class InTheStep(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / (1 + len(self.optimizers().state))


def rate_by_number_before(module, optimizer):
    set_rate(optimizer, 0.4 / (1 + len(optimizer.state)))


READERS = (halve_moments, rate_by_number, rate_by_members, rate_by_sizes, rate_by_steps, rate_by_moments, averages)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:strategy 'zero1_fork'.* reads the state of an optimizer")
@pytest.mark.parametrize("reads", READERS)
@pytest.mark.parametrize("strategy", ["zero1", "pp"])
def test_hooks_see_the_state_of_all_parameters(strategy, reads):
    callback = Hook("on_train_batch_end", reads)
    if strategy == "pp" and reads in (rate_by_moments, averages):
        message = r"in .*: .* needs the values of '(blocks|head)\..*', which another pipeline stage has"
        with pytest.raises(ProcessRaisedException, match=message):
            fitted(strategy, callbacks=[callback])
        return
    expected = plain_loop(adamw, on_train_batch_end=reads)
    assert largest_difference(fitted(strategy, callbacks=[callback]), expected) <= 1e-5


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:strategy 'zero1_fork'.* reads the state of an optimizer")
@pytest.mark.parametrize("kind", [ByClipping, ByStep])
@pytest.mark.parametrize("strategy", ["zero1", "pp"])
def test_so_do_the_modules_own_step_and_clipping(strategy, kind):
    expected = plain_loop(adamw, on_train_batch_start=rate_by_number_before)
    assert largest_difference(fitted(strategy, kind=kind), expected) <= 1e-5


@pytest.mark.timeout(60)
def test_a_step_of_stages_that_reads_it_is_refused():
    with pytest.raises(ProcessRaisedException, match=r"in training_step: .* in the step reads the state"):
        fitted("pp", kind=InTheStep)


@pytest.mark.timeout(60)
def test_it_is_said_that_an_optimizer_whose_state_is_read_is_not_divided():
    message = r"in rate_by_number: .*reads the state of an optimizer, .* So each rank takes its whole step"
    with pytest.raises(ProcessRaisedException, match=message):
        fitted("zero1", callbacks=[Hook("on_train_batch_end", rate_by_number)])


def of_head_alone(parameters):
    *_, weight, bias = parameters
    return adamw([weight, bias])


def row_by_row(parameters):
    return torch.optim.Adafactor(parameters, lr=0.02)


class Schedule(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [0.4 / (1 + len(self.optimizer.state)) for _ in self.base_lrs]


def scheduled(parameters):
    optimizer = adamw(parameters)
    return [optimizer], [{"scheduler": Schedule(optimizer), "interval": "step"}]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (of_head_alone, "which trains no parameter of this pipeline stage"),
        (row_by_row, "has a part on another pipeline stage, in a shape that is not its own"),
        (scheduled, r"in get_lr: .* reads the state of an optimizer, of which a pipeline stage has its own part"),
    ],
)
def test_a_stage_names_what_it_can_not_show(make_optimizer, message):
    with pytest.raises(ProcessRaisedException, match=message):
        fitted("pp", make_optimizer, [Hook("on_train_batch_end", rate_by_number)])


# --- gradients


def rate_by_gradients(module, optimizer):
    set_rate(optimizer, 0.02 / (1 + sum(p.grad is not None for p in module.parameters())))


def drop_and_count(module, optimizer):
    """Drops some, for which others stand in the count."""
    for p in [*module.parameters()][::4]:
        p.grad = None
    rate_by_gradients(module, optimizer)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("counts", [rate_by_gradients, drop_and_count])
def test_a_stage_has_gradients_of_others_when_it_has_its_own(place, counts):
    found = fitted("pp", callbacks=[Hook(place, counts)])
    assert largest_difference(found, plain_loop(adamw, **{place: counts})) <= 1e-5


class KeepsHalf(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.02)

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


def keeps_half_of(parameters):
    """As the class, by an attribute of the optimizer."""
    optimizer = torch.optim.SGD(parameters, lr=0.02)
    optimizer.zero_grad = lambda set_to_none=True: KeepsHalf.zero_grad(optimizer)
    return optimizer


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make_optimizer", [KeepsHalf, keeps_half_of])
@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "tp", "pp"])
def test_optimizers_that_zero_in_their_own_way(strategy, make_optimizer):
    assert largest_difference(fitted(strategy, make_optimizer), plain_loop(make_optimizer)) <= 1e-5


class HalvesLate(Callback):
    """Another way of zeroing comes in mid-run, by the module's parameters."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == 2:
            trainer.optimizers[0].zero_grad = lambda set_to_none=True: halve(module)


def halve(module):
    for p in module.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_another_way_of_zeroing_in_mid_run(strategy):
    def comes_late(module, optimizer, calls=[0]):  # noqa: B006
        calls[0] += 1
        if calls[0] == 3:
            optimizer.zero_grad = lambda: halve(module)

    expected = plain_loop(adamw, on_train_batch_end=comes_late)
    assert largest_difference(fitted(strategy, callbacks=[HalvesLate()]), expected) <= 1e-5


# --- types


class ByType(Callback):
    def on_train_batch_end(self, trainer, module, *unused):
        for p in module.parameters():
            if type(p) is nn.Parameter:
                p.data.mul_(0.99)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_a_hook_that_would_pass_over_all_parameters_is_refused(strategy):
    message = r"in on_train_batch_end: .* compares the type of a value .* under '.*_fork' these are of type DTensor"
    with pytest.raises(ProcessRaisedException, match=message):
        fitted(strategy, callbacks=[ByType()])


# --- parts without values


class ByLargest(torch.optim.Optimizer):
    """Divides by the largest gradient so far; of a parameter, in ways that need a value."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.02, "largest": 1e-8})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                extremes = p.grad.max(), -p.grad.min(), p.grad.abs().amax(), torch.linalg.vector_norm(p.grad, torch.inf)
                group["largest"] = max(group["largest"], *map(float, extremes))
                p.add_(p.grad, alpha=-group["lr"] / group["largest"])
        return loss


@pytest.mark.timeout(60)
def test_the_largest_value_of_a_parameter_that_a_rank_has_no_part_of():
    assert largest_difference(fitted("fsdp", ByLargest), plain_loop(ByLargest)) <= 1e-5
