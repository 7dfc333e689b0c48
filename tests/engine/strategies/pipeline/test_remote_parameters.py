"""Parameters of other stages outside of a step: their form is known, and who needs more is told the name."""

import copy
import io

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim.swa_utils import AveragedModel

from polyphase.engine.strategies.callers import CutError
from polyphase.engine.strategies.pipeline.plan import RemoteTensor, plan_stages, replace_absent

from ..test_optimizer_trial import Lion


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.blocks[1].weight.mark = "mine"


def first_stage():
    """A module as the first of two stages has it, with gradients."""
    net = Net()
    plan = plan_stages(net, 2)
    replace_absent(net, plan, [p for p, stages in plan.holders.items() if 0 not in stages])
    net.blocks[0](torch.ones(3)).sum().backward()
    return net


def test_their_form_is_known():
    net = first_stage()
    remote = net.blocks[1].weight
    assert isinstance(remote, nn.Parameter)
    assert (remote.shape, remote.dtype) == ((3, 3), torch.float32)
    assert (remote.mark, len({remote, *net.parameters()})) == ("mine", 4)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == 24
    assert "blocks.1.weight" in repr(dict(net.named_parameters()))
    net.requires_grad_(False)
    assert not remote.requires_grad
    state = net.state_dict()
    assert all(isinstance(value, RemoteTensor) == name.startswith("blocks.1") for name, value in state.items())
    copied = copy.deepcopy(net)
    assert copied.blocks[1].weight is not remote
    with pytest.raises(CutError, match=r"needs the values of 'blocks.1.weight'"):
        float(copied.blocks[1].weight.norm())


@pytest.mark.parametrize("make", [torch.optim.AdamW, Lion, lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)])
def test_optimizers_step_what_has_gradients(make):
    net = first_stage()
    before = net.blocks[0].weight.detach().clone()
    optimizer = make(net.parameters())
    nn.utils.clip_grad_value_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    net.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(before, net.blocks[0].weight)


@pytest.mark.parametrize("of", [lambda p: p, lambda p: p.data, lambda p: p.detach().clone(), lambda p: p.grad])
def test_user_code_is_not_told_that_they_are_elsewhere(of):
    weights = [of(block.weight) for block in first_stage().blocks]
    for place in (lambda w: w.is_meta, lambda w: w.device, lambda w: w.is_cpu, lambda w: w.is_cuda):
        assert place(weights[0]) == place(weights[1])


def average(net):
    with torch.no_grad():
        for teacher, student in zip(Net().parameters(), net.parameters(), strict=True):
            teacher.lerp_(student, 0.1)


def average_data(net):
    for teacher, student in zip(Net().parameters(), net.parameters(), strict=True):
        teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def average_state(net):
    kept = {name: value.clone() for name, value in Net().state_dict().items()}
    for name, value in net.state_dict().items():
        kept[name].mul_(0.9).add_(value)


def norm_by_hand(net):
    norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
    for p in net.parameters():
        p.grad.mul_(0.1 / norm)


def branch(net):
    for p in net.parameters():
        if p.norm() > 1:
            p.data.mul_(0.5)


def norm_of_what_is_here(net):
    here = [p for p in net.parameters() if not p.is_meta and p.device == torch.device("cpu")]
    norm = torch.stack([p.norm() for p in here]).norm()
    with torch.no_grad():
        for p in here:
            p.mul_(0.1 / norm)


def save(net):
    torch.save({name: p.detach().cpu() for name, p in net.named_parameters()}, io.BytesIO())


VALUES = r"in {}: .* needs the values of 'blocks.1.weight', which another pipeline stage has"
GRADIENT = r"in {}: .* reads the gradient of 'blocks.1.weight', .* Set gradient_clip_val"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (average, VALUES.format("average")),
        (average_data, VALUES.format("average_data")),
        (average_state, VALUES.format("average_state")),
        (norm_by_hand, VALUES.format("norm_by_hand")),
        (norm_of_what_is_here, VALUES.format("norm_of_what_is_here")),
        (lambda net: [p.untyped_storage().data_ptr() for p in net.parameters()], VALUES.format("<listcomp>")),
        (branch, VALUES.format("branch")),
        (save, VALUES.format("save")),
        (lambda net: net.blocks[1](torch.ones(3)), VALUES.format("<lambda>")),
        (lambda net: AveragedModel(net).update_parameters(net), VALUES.format("<lambda>")),
        (lambda net: nn.init.normal_(net.blocks[1].weight), VALUES.format("<lambda>")),
        (lambda net: nn.init.orthogonal_(net.blocks[1].weight), VALUES.format("<lambda>")),
        (lambda net: net.blocks[1].weight.data.add_(torch.randn_like(net.blocks[1].weight)), VALUES.format("<lambda>")),
        (lambda net: net.blocks[1].weight.numpy(force=True), VALUES.format("<lambda>")),
        (lambda net: nn.utils.parameters_to_vector(net.parameters()), VALUES.format("<lambda>")),
        (lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0), GRADIENT.format("<lambda>")),
        (lambda net: grad_norm(net, 2), GRADIENT.format("<lambda>")),
    ],
)
def test_who_needs_more_is_told_the_name(use, message):
    with pytest.raises(CutError, match=message):
        use(first_stage())


class Samples(LightningModule):
    """Looks at an output of its own once an epoch, as people do."""

    def __init__(self):
        super().__init__()
        self.net = first_stage()

    def forward(self, x):
        for block in self.net.blocks:
            x = block(x)
        return x

    def on_validation_epoch_end(me):  # noqa: N805 - whatever it is called
        me(torch.ones(3))


def test_a_hook_that_calls_the_model_is_named_first():
    message = (
        r"^the model is called in Samples.on_validation_epoch_end, at .*remote_parameters.py:\d+ in forward: .* Call it"
        r" in training_step, validation_step"
    )
    with pytest.raises(CutError, match=message):
        Samples().on_validation_epoch_end()
