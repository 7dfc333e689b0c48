"""What a block does besides returning has the effect that it has in one process: it writes into its arguments, into
attributes, and into its own parameters. Expected values are those of a plain loop.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from polyphase.engine import Engine
from tests.zoo.model import Model, Zoo, loader, plain_loop
from tests.zoo.run import largest_difference

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def inner(self, x: Tensor) -> Tensor:
        return self.up(x).tanh()


class Appends(Block):
    def forward(self, x, losses):
        h = self.inner(x)
        losses.append(h.square().mean())
        return x + self.down(h) * len(losses)


class AppendsLast(Block):
    """To a list in a tuple, what its parameters make of its output."""

    def forward(self, x, lists):
        y = x + self.down(self.inner(x))
        lists[0].append(self.up(y).square().mean())
        return y


class AddsInPlace(Block):
    def forward(self, x, state):
        h = self.inner(x)
        state["loss"] += h.square().mean()
        state["calls"] += 1
        return x + self.down(h) * state["calls"]


class HasOnlyADict(Block):
    """Returns nothing."""

    def forward(self, state):
        h = self.inner(state["x"])
        state["x"] = state["x"] + self.down(h)
        state.setdefault("losses", []).append(h.abs().mean())


class Pops(Block):
    def forward(self, x, skips):
        return x + self.down(self.inner(x + skips.pop()))


@dataclasses.dataclass(slots=True)
class Carried:
    x: Tensor
    loss: Tensor | float = 0.0


class SetsFields(Block):
    def forward(self, carried):
        h = self.inner(carried.x)
        carried.x, carried.loss = carried.x + self.down(h), carried.loss + h.square().mean()
        return carried.x


class Keeps:
    def __init__(self) -> None:
        self.hidden: list[Tensor] = []


class WritesParent(Block):
    def forward(self, x, parent, keeps):
        h = self.inner(x)
        keeps.hidden.append(h)
        self.loss = self.up(x + 1).square().mean()
        parent.total = parent.total + h.abs().mean() + self.loss
        return x + self.down(h) + self.down(keeps.hidden[0])


class KeepsLoss(Block):
    """In an attribute, what its parameters make of its output."""

    def forward(self, x):
        y = x + self.down(self.inner(x))
        self.losses = [self.up(y).square().mean()]
        return y


class Arguments(Zoo):
    """A list of two blocks of each kind."""

    KINDS = (Appends, AppendsLast, AddsInPlace, HasOnlyADict, Pops, SetsFields, WritesParent, KeepsLoss)

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(DIM, DIM)
        self.kinds = nn.ModuleDict({kind.__name__: nn.ModuleList(kind() for _ in range(3)) for kind in self.KINDS})

    def shard_units(self):
        return [block for blocks in self.kinds.values() for block in blocks]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = self.into(batch[0]), batch[1]
        losses, last, keeps = [], [], Keeps()
        state, table, carried = {"loss": torch.zeros(()), "calls": 0}, {"x": x}, Carried(x)
        skips = [self.into(batch[0] * number) for number in range(3)]
        self.total = 0.0
        y = dict.fromkeys(self.kinds, x)
        for name, blocks in self.kinds.items():
            for block in blocks:
                arguments: dict[str, Any] = {
                    "Appends": (y[name], losses),
                    "AppendsLast": (y[name], (last, None)),
                    "AddsInPlace": (y[name], state),
                    "HasOnlyADict": (table,),
                    "Pops": (y[name], skips),
                    "SetsFields": (carried,),
                    "WritesParent": (y[name], self, keeps),
                    "KeepsLoss": (y[name],),
                }
                y[name] = block(*arguments[name])
        y["HasOnlyADict"] = table["x"]
        auxiliary = sum(losses) + sum(last) + state["loss"] + sum(table["losses"]) + carried.loss + self.total
        auxiliary += sum(block.losses[0] for block in self.kinds["KeepsLoss"])
        assert (len(losses), len(last), state["calls"], len(skips), len(keeps.hidden)) == (3, 3, 3, 0, 3)
        return sum(mse_loss(out, target) for out in y.values()) + 0.1 * auxiliary

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Plain(Block):
    def forward(self, x):
        return x + self.down(self.inner(x))


class Clamps(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return x + self.down(self.inner(x))


class BoundsNorm(Block):
    def forward(self, x):
        self.up.weight.data.renorm_(2, 0, 0.5)
        self.down.weight.data = self.down.weight.data / self.down.weight.data.norm().clamp(min=1)
        return x + self.down(self.inner(x))


class InHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_pre_hook(self._scale)

    @staticmethod
    def _scale(layer: nn.Linear, args: Any) -> None:
        with torch.no_grad():
            layer.weight.copy_(layer.weight * 0.99)

    def forward(self, x):
        return x + self.down(self.inner(x))


class Counts(Block):
    """Writes a buffer and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.mean = nn.Parameter(torch.zeros(DIM), requires_grad=False)

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(self.down.bias.detach(), 0.5)
        return x + self.down(self.inner(x)) / self.calls + self.mean


class DecaysAfter(Block):
    """Writes when autograd has saved the weight, which does not see it."""

    def forward(self, x):
        y = x + self.down(self.inner(x))
        self.down.weight.data.mul_(0.99)
        return y


class Weights(Zoo):
    KINDS = (Clamps, BoundsNorm, InHook, Counts, DecaysAfter)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for kind in self.KINDS for _ in range(2))
        self.scale = nn.Parameter(torch.ones(DIM))

    def shard_units(self):
        return list(self.blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0.9, 0.999)
        x = batch[0] * self.scale
        for block in self.blocks:
            x = block(x)
        return mse_loss(x, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Initialised(Weights):
    """From the first batch that it sees, as in normalising flows."""

    def __init__(self) -> None:
        super().__init__()
        self.is_initialised = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.is_initialised:
            self.scale.data.copy_(batch[0].std(0))
            self.is_initialised = True
        return super().training_step(batch, batch_idx)


class TwoTasks(Zoo):
    """Two forwards through re-entrant checkpoints in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self(batch[0]), batch[1]) + mse_loss(self(-batch[0]), batch[1])


class Hooks(Zoo):
    """Writes rows of gradients and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Plain() for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return mse_loss(self.head(x), batch[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        first = self.blocks[0]
        first.up.weight.grad[0] = 0
        first.up.weight.grad[3].zero_()
        first.up.weight.grad[4][:2] = 0
        first.up.weight.grad[5] += 0.1
        first.up.bias.grad[torch.tensor([1, 5])] = first.up.bias.grad[2:4].clone()

    def on_train_batch_end(self, *unused: Any) -> None:
        first, second = self.blocks
        with torch.no_grad():
            first.up.weight[::2] = torch.zeros(8, DIM)
            second.down.weight[:, 1] = 0.5
            second.down.bias[second.down.bias > 0.1] = 0.1


class BetweenPasses(Zoo):
    """Writes into weights between forward and backward: what backward reads again has the new values."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(DIM, DIM), nn.ModuleList(Plain() for _ in range(3))
        self.out = nn.Linear(DIM, DIM)

    def training_step(self, batch, batch_idx):
        x = self.into(batch[0])
        for block in self.blocks:
            x = block(x)
        return mse_loss(self.out(x), batch[1])

    def write(self) -> None:
        for p in self.parameters():
            p.data.mul_(0.9)
        self.out.weight.data.clamp_(-0.1, 0.1)


class BeforeZeroing(BetweenPasses):
    def on_before_zero_grad(self, optimizer):
        self.write()


class Zeroing(BetweenPasses):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.write()
        optimizer.zero_grad()


class BeforeBackward(BetweenPasses):
    def on_before_backward(self, loss):
        self.write()


class DecaysGradients(BetweenPasses):
    """Adds to half of the last gradients, in place of zeroing them."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class Assigns(BetweenPasses):
    """What is split, and what is a whole copy until backward."""

    def on_before_backward(self, loss):
        self.out.weight.data = self.out.weight.data.clamp(-0.1, 0.1)


class AssignsToABlock(BetweenPasses):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad()
        self.blocks[0].up.weight.data = self.blocks[0].up.weight.data * 0.9


class AddsToItsInput(Block):
    def forward(self, x):
        x += self.down.bias
        return self.down(self.inner(x))


class WritesInputs(Hooks):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(AddsToItsInput() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.into(batch[0]), batch[1]], batch_idx)


class Arrays(Hooks):
    def on_train_batch_end(self, *unused: Any) -> None:
        self.blocks[0].up.weight.detach().cpu().numpy()


def _model(make: Any) -> Model:
    return Model(make, lambda n: (torch.randn(n, DIM), torch.randn(n, DIM)))


def _trained(model: Model, flag: str, **flags: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = model.make().train()
    num = 4 if "hsdp" in flag or "+tp" in flag else 2
    engine = Engine(
        **{"strategy": flag, "devices": num, "accelerator": "cpu", "max_epochs": 1, "check_first_steps": False},
        **QUIET,
        **flags,
    )
    engine.fit(module, loader(model, engine.data_size))
    return module.state_dict()


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (Arguments, "fsdp_fork"),
        (Arguments, "tp_fork"),
        (Weights, "fsdp_fork"),
        (Weights, "hsdp_fork:replicate=2,shard=2"),
        (Weights, "tp_fork"),
        (TwoTasks, "fsdp_fork"),
        (TwoTasks, "ddp_fork"),
        (Hooks, "fsdp_fork"),
        (Hooks, "tp_fork"),
        (BeforeZeroing, "fsdp_fork"),
        (Zeroing, "hsdp_fork:replicate=2,shard=2"),
        (BeforeBackward, "fsdp_fork"),
        (BeforeBackward, "tp_fork"),
        (DecaysGradients, "fsdp_fork"),
        (Zeroing, "zero1_fork"),
    ],
)
def test_equals_a_plain_loop(make, flag):
    model = _model(make)
    assert largest_difference(_trained(model, flag), plain_loop(model)) <= 1e-6


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("make", [Arguments])
def test_equals_a_plain_loop_with_recomputed_blocks(make, kind):
    model = _model(make)
    assert largest_difference(_trained(model, "fsdp_fork", activation_checkpointing=kind), plain_loop(model)) <= 1e-6


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Initialised, "a forward writes into scale, and each rank writes other values, made of its own samples"),
        (WritesInputs, "a block writes in place into a tensor that it is called with, which is refused"),
        (Assigns, "`p.data = values` in on_before_backward, between forward and backward, is refused"),
        (AssignsToABlock, "`p.data = values` in optimizer_zero_grad, between forward and backward, is refused"),
        (Arrays, r"a NumPy array of a parameter or gradient of shape \(16, 8\) is refused"),
    ],
)
def test_what_can_not_be_as_in_one_process_is_refused(make, said):
    with pytest.raises(ProcessRaisedException, match=said):
        _trained(_model(make), "fsdp_fork")
    assert "numpy" not in vars(torch.distributed.tensor.DTensor)
