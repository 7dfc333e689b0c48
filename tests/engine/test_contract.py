"""What the engine asks of a strategy, answered by the engine's own and for all others."""

import ast
import dataclasses
import inspect

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, SingleDeviceStrategy

from polyphase.engine.contract import Capabilities, EngineStrategy, adapt, without_sync
from polyphase.engine.flags import Layout
from polyphase.engine.strategies import STRATEGIES
from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.options import DDPOptions
from tests.engine.tiny import Regression, engine, rows

MULTI = [name for name, row in STRATEGIES.items() if row.make]


def test_each_capability_is_described_in_one_line():
    (kind,) = ast.parse(inspect.getsource(Capabilities)).body
    fields = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
    assert [node.target.id for node in fields] == [field.name for field in dataclasses.fields(Capabilities)]
    for node in fields:
        text = kind.body[kind.body.index(node) + 1]
        assert isinstance(text, ast.Expr), node.target.id
        assert "\n" not in text.value.value, node.target.id
    with pytest.raises(dataclasses.FrozenInstanceError):
        Capabilities().keeps_step = False


@pytest.mark.parametrize("name", MULTI)
def test_a_strategy_of_the_engine_declares_what_its_layout_implies(name):
    strategy = engine(strategy=name, devices=8 if name in ("hsdp+tp", "hsdp+cp") else 4).strategy
    assert adapt(strategy) is strategy
    can, layout = adapt(strategy).capabilities, strategy.layout
    assert can.engine_checkpoints
    # Under cp each rank has whole parameters, but as DTensors.
    assert can.state_is_sharded == (layout.shard > 1 or layout.num_sharing > 1 or layout.pp > 1)
    assert can.splits_module == can.state_is_sharded
    assert can.runs_own_schedule == (layout.pp > 1)
    assert hasattr(strategy, "run_schedule") == can.runs_own_schedule
    assert can.steps_alone == (name in ("local_sgd", "diloco"))
    assert adapt(strategy).capabilities == can, "it stays what it is"


def test_options_decide_too():
    assert adapt(engine(strategy="ddp", devices=2).strategy).capabilities.unsupported_repeat is None
    static = engine(strategy="ddp:static_graph=true", devices=2).strategy
    assert adapt(static).capabilities.unsupported_repeat == "ddp:static_graph=true"
    assert adapt(engine(strategy="ps", devices=2).strategy).capabilities.keeps_step
    assert not adapt(engine(strategy="ps:staleness=1", devices=2).strategy).capabilities.keeps_step
    assert not adapt(engine(strategy="ps:servers=1", devices=2).strategy).capabilities.keeps_step
    assert adapt(engine(strategy="pp", devices=2).strategy).capabilities.evaluates_in_inference_mode
    assert not adapt(engine(strategy="pp+fsdp", devices=4).strategy).capabilities.evaluates_in_inference_mode


class OwnFormat(DDPStrategy):
    def save_checkpoint(self, checkpoint, filepath, storage_options=None) -> None: ...


@pytest.mark.parametrize(
    ("strategy", "is_saved_for"),
    [
        (SingleDeviceStrategy("cpu"), True),
        (DDPStrategy(), True),
        (OwnFormat(), False),
        (FSDPStrategy(), False),
        (None, False),
    ],
)
def test_others_have_the_capabilities_of_stock_lightning(strategy, is_saved_for):
    answers = adapt(strategy)
    name = type(strategy).__name__
    assert isinstance(answers, EngineStrategy)
    assert repr(answers) == repr(name)
    averages = isinstance(strategy, DDPStrategy)
    offloads = {"activations"} if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) else ()
    assert answers.capabilities == Capabilities(
        engine_checkpoints=is_saved_for,
        can_offload=frozenset(offloads),
        averages_whole_gradients=averages,
        unsupported_repeat=name,
    )
    assert answers.comm_hook is None
    assert (answers.wires, answers.lost_ranks, answers.held_bytes) == ([], frozenset(), 0)
    assert not answers.can_lose(0)
    assert not answers.go_on_without([1])
    assert answers.shared_state() == answers.state_of_rank() == {}
    answers.counts_traffic = True
    assert not adapt(strategy).counts_traffic
    assert strategy is None or "counts_traffic" not in vars(strategy)


def test_all_processes_of_others_are_replicas():
    assert adapt(engine(strategy=DDPStrategy(), devices=3).strategy).layout == Layout(replicate=3)
    assert engine(strategy=DDPStrategy(), devices=3).layout == Layout(replicate=3)
    assert engine().layout == Layout()
    assert adapt(engine().strategy).root_device == torch.device("cpu")


def test_inner_micro_batches_are_not_averaged():
    strategy = DDP(DDPOptions())
    strategy.model = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(strategy.model)
    strategy.model.require_backward_grad_sync = True
    with without_sync(strategy):
        assert not strategy.model.require_backward_grad_sync
    assert strategy.model.require_backward_grad_sync
    with without_sync(SingleDeviceStrategy("cpu")):
        pass


class OnLightnings(EngineStrategy, DDPStrategy): ...


@pytest.mark.parametrize("kind", [DDPStrategy, OnLightnings])
def test_ranks_of_a_strategy_on_lightnings_base_have_samples_of_their_own(kind):
    run = engine(strategy=kind(), devices=3)
    assert (run.data_size, run.data_rank) == (3, 0)


class Declares(EngineStrategy, SingleDeviceStrategy):
    """A user's, that keeps something of its own."""

    capabilities = Capabilities(engine_checkpoints=True)
    counter = 0

    def check_module(self, module) -> None:
        if not hasattr(module, "net"):
            raise ValueError("needs a net")

    def sync_weights(self) -> None:
        self.counter += 1

    def shared_state(self):
        return {"counter": self.counter}

    def load_state(self, shared, of_rank) -> None:
        self.counter = shared.get("counter", 0)


def test_a_strategy_of_a_users_own_is_asked_too(tmp_path):
    first = engine(strategy=Declares("cpu"), max_epochs=2)
    first.fit(Regression(), rows())
    assert first.strategy.counter == 2, "once an epoch"
    first.save_checkpoint(tmp_path / "saved.ckpt")
    second = engine(strategy=Declares("cpu"), max_epochs=5)
    second.fit(Regression(), rows(), ckpt_path=tmp_path / "saved.ckpt")
    assert second.strategy.counter == 5, "continues from two"
    with pytest.raises(ValueError, match="needs a net"):
        engine(strategy=Declares("cpu")).fit(_NoNet(), rows())


class _NoNet(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.net
        del self.net
