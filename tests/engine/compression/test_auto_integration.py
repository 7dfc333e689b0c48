"""What `auto` measures and chooses, and `Engine.bench_comm`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn

from polyphase.engine import Engine
from polyphase.engine.compression import Auto, Bucket, CountingGroup, ParamSlice
from tests.distributed import run_ranks
from tests.engine.compression.test_runs_integration import Saves, Two, rows, train
from tests.engine.tiny import QUIET
from tests.pairs import nightly


class Choice(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        hook = trainer.strategy.comm_hook
        found = {
            "chosen": hook.chosen,
            "method": hook._method.flag,
            "measured": [each.compression for each in hook.measured],
            "bytes": hook.num_bytes,
        }
        self.path.with_suffix(f".{trainer.global_rank}").write_text(json.dumps(found))


@pytest.mark.parametrize("strategy", ["hsdp_fork:replicate=2", *nightly("ddp_fork")])
def test_auto_chooses_the_same_on_all_ranks(strategy, tmp_path):
    flags = {"strategy": strategy, "compression": "auto", "max_steps": Auto().num_steps()}
    train(Two(), 2, **flags, callbacks=[Choice(tmp_path / "choice")])
    first, second = (json.loads((tmp_path / f"choice.{rank}").read_text()) for rank in range(2))
    assert first == second
    assert first["method"] == first["chosen"] in first["measured"] == Auto().candidates


def test_first_steps_of_auto_are_those_without_compression():
    assert Auto().candidates[0] == "none"
    flags: dict[str, Any] = {"max_steps": 7}  # three until the first candidate, and its four
    as_it_is, measured = train(Two(), 2, **flags), train(Two(), 2, compression="auto", **flags)
    assert all(torch.equal(as_it_is[name], measured[name]) for name in as_it_is)


def test_what_auto_chose_goes_on_after_a_resumption(tmp_path):
    class Sign(Callback):
        """Leaves no choice."""

        def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
            trainer.strategy.comm_hook.candidates = ["sign"]

    class SavesLate(Saves):
        def on_train_step_end(self, trainer: Any, pl_module: LightningModule, save_now: bool) -> None:
            if trainer.global_step == 5:
                assert trainer.strategy.comm_hook.chosen == "sign"
                trainer.save_checkpoint(self.path)

    saved = tmp_path / "saved"
    expected = train(Two(), 2, compression="auto:1", callbacks=[Sign(), SavesLate(saved)])
    found = train(Two(), 2, saved, compression="auto:1", callbacks=[Choice(tmp_path / "choice")])
    assert json.loads((tmp_path / "choice.0").read_text())["chosen"] == "sign"
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_waits_for_the_choice_is_saved_too():
    hook = Auto()
    unsent = {"weight": torch.ones(3)}
    hook.load_state_dict({"flag": "topk", "step": 7, "residuals": unsent})
    assert hook.state_dict()["residuals"] == unsent


def check_repeated_steps(rank: int) -> None:
    """A rank that failed hears twice that its step is skipped, and the others once."""
    module = nn.Linear(64, 48)
    members = tuple(ParamSlice(name, tuple(p.shape)) for name, p in module.named_parameters())
    hook = Auto(steps=1)
    hook.candidates, hook.may_repeat = ["none", "sign"], True
    hook.begin(module, CountingGroup())
    assert hook.wire is not None

    def run() -> None:
        hook.run(Bucket(0, torch.ones(65 * 48), members))

    for step in range(hook.num_steps() + 1):  # the step after one that was skipped is not measured
        assert hook.chosen is None
        run()
        if step == 4:
            for _ in range(1 + rank):
                hook.on_step_end(skipped=True)
            run()
        hook.on_step_end()
        num_seen = [torch.zeros(1) for _ in range(hook.wire.size)]
        dist.all_gather(num_seen, torch.tensor([float(sum(map(len, hook._seen)))]))
        assert len({float(num) for num in num_seen}) == 1
    assert hook.chosen in hook.candidates
    assert [each.compression for each in hook.measured] == hook.candidates
    assert hook._method.step == hook.step


def test_all_ranks_choose_together_where_steps_are_repeated():
    run_ranks(check_repeated_steps, 2, start_method="fork")


def test_wire_reports_and_leaves_the_module_as_it_is(caplog):
    module = Two()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    engine = Engine(**QUIET, strategy="ddp_fork", devices=2)
    caplog.set_level("INFO")
    report = engine.bench_comm(module, rows(2), compressions=["none", "topk:0.5"])
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert report.num_ranks == 2
    assert [each.compression for each in report.measured] == ["none", "topk:0.5"]
    assert [each.sent_bytes for each in report.measured] == [4 * 808, 8 * 404]
    assert all(each.step_s > 0 for each in report.measured)
    assert report.recommended in ("none", "topk:0.5")
    assert str(report) in caplog.text


def test_wire_refuses_what_is_no_compression():
    engine = Engine(**QUIET, strategy="ddp_fork", devices=2)
    with pytest.raises(ValueError, match=r"topk:density must be greater than 0 and at most 1"):
        engine.bench_comm(Two(), rows(2), compressions=["none", "topk:2"])
