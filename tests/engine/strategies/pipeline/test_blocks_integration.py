"""What blocks do beside computing: hooks on gradients at the border of stages, and state that a checkpoint keeps."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.engine.parity import largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET


def halves_its_input(block: nn.Module) -> None:
    block.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


def clamps_its_output(block: nn.Module) -> None:
    block.register_full_backward_pre_hook(lambda module, outputs: (outputs[0].clamp(-1e-3, 1e-3),))


def both_and_an_argument(block: nn.Module) -> None:
    """A hook on the forward that changes the argument comes before the input that the backward hook sees."""
    block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    clamps_its_output(block)
    halves_its_input(block)


class Net(LightningModule):
    def __init__(self, add_hooks: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.into = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(32, 4)
        for block in self.blocks:
            add_hooks(block)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.into(batch[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.out(x), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def batches() -> DataLoader:
    torch.manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(24, 16), torch.arange(24) % 4), batch_size=8)


def plain_loop(net: Net) -> dict[str, Tensor]:
    optimizer = net.configure_optimizers()
    for index, batch in enumerate(batches()):
        optimizer.zero_grad()
        net.training_step(batch, index).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("add_hooks", [halves_its_input, clamps_its_output, both_and_an_argument])
def test_backward_hooks_of_blocks_see_the_gradients_at_the_border_of_stages(add_hooks):
    net = Net(add_hooks)
    flags = {"max_epochs": 1, "accelerator": "cpu", "check_first_steps": False}
    Engine(strategy="pp_fork", devices=3, **flags, **QUIET).fit(net, batches())
    assert largest_difference(net.state_dict(), plain_loop(Net(add_hooks))) <= 1e-6


class Settings:
    """A configuration that a model and its blocks share, as those of transformers do."""

    def __init__(self) -> None:
        self.scale = 0.5
        self.kind: str | None = None
        self.num_steps: int | None = None


class Configured(Net):
    """Decides after the blocks, once, what its first layer does from then on."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__(lambda block: None)
        self.settings, self.counts = Settings(), counts
        for block in self.blocks:
            block.settings = self.settings

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.into(batch[0]) * self.blocks[0].settings.scale * (2 if self.settings.kind == "classes" else 1)
        for block in self.blocks:
            x = block(x)
        if self.settings.kind is None:
            self.settings.kind = "classes"
        if self.counts:
            self.settings.num_steps = (self.settings.num_steps or 0) + 1
        return nn.functional.cross_entropy(self.out(x), batch[1])


@pytest.mark.parametrize("devices", [2, 3])
def test_a_word_that_the_last_stage_chooses_once_is_known_to_all(devices):
    net = Configured()
    Engine(strategy="pp_fork:microbatches=4", devices=devices, max_epochs=1, accelerator="cpu", **QUIET).fit(
        net, batches()
    )
    assert largest_difference(net.state_dict(), plain_loop(Configured())) <= 1e-6


def test_an_object_in_which_the_last_stage_counts_is_not_read_on_another():
    flags = {"max_epochs": 1, "accelerator": "cpu", **QUIET}
    with pytest.raises(
        ProcessRaisedException, match=r"reads 'settings' of .*, which `training_step` writes on another"
    ):
        Engine(strategy="pp_fork:microbatches=1,schedule=gpipe", devices=2, **flags).fit(
            Configured(counts=True), batches()
        )


class Scaled(nn.Module):
    """Its factor grows with its calls, and is kept beside the tensors: as extra state, and by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.calls = self.hooked = 0
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)

    @staticmethod
    def _save(module: "Scaled", state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}hooked"] = torch.tensor(module.hooked)

    @staticmethod
    def _load(module: "Scaled", state: dict[str, Any], prefix: str, *others: Any) -> None:
        module.hooked = int(state.pop(f"{prefix}hooked"))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            self.hooked += 2
        return torch.tanh(self.linear(x)) * (1 + 0.1 * self.calls + 0.1 * self.hooked)


class Keeps(Net):
    def __init__(self) -> None:
        super().__init__(lambda block: None)
        self.into, self.out = nn.Identity(), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))


class SaveAtEnd(Callback):
    """In the processes that trained, which are gone after `fit`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_extra_state_of_blocks_is_saved_by_their_stage(tmp_path):
    flags = {"strategy": "pp_fork:microbatches=1,schedule=gpipe", "devices": 2, "accelerator": "cpu"}
    path = str(tmp_path / "first.ckpt")
    engine = Engine(max_epochs=1, callbacks=[SaveAtEnd(path)], check_first_steps=False, **flags, **QUIET)
    engine.fit(Keeps(), batches())
    net = Keeps()
    Engine(max_epochs=2, check_first_steps=False, **flags, **QUIET).fit(net, batches(), ckpt_path=path)
    expected = Keeps()
    plain_loop(expected)
    plain_loop(expected)
    weights = [{name: p.detach() for name, p in module.named_parameters()} for module in (net, expected)]
    assert largest_difference(*weights) <= 1e-6
