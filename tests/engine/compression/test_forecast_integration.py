"""What `auto` measures, forecasts and chooses, and `Engine.bench_comm`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn

from polyphase.engine import Engine
from polyphase.engine.compression import AllReduceHook, Auto, Bucket, CountingGroup, Link, ParamSlice, make_comm_hook
from polyphase.engine.compression.counting_group import SimulatedGroup
from polyphase.engine.compression.forecast import Forecast, Step, advice, forecast
from tests.distributed import run_ranks
from tests.engine.compression.test_runs_integration import STEPS, Saves, Two, rows, train
from tests.engine.tiny import QUIET
from tests.pairs import nightly

SIZE = 2**20
MEMBERS = (ParamSlice("a", (1024, 512)), ParamSlice("b", (512, 1024)))
CANDIDATES = ("none", "bf16", "topk:0.01", "sign")


def link(megabytes_per_s: float) -> dict[str, Link]:
    return {name: Link(1e-4, megabytes_per_s * 1e6) for name in ("all_reduce", "all_gather", "all_to_all")}


def forecasts(links: dict[str, Link], step: Step) -> dict[str, float]:
    hooks = {flag: make_comm_hook(flag) or AllReduceHook() for flag in CANDIDATES}
    found = forecast(hooks, [Bucket(0, torch.empty(SIZE), MEMBERS)], step, links, CountingGroup(), AllReduceHook())
    assert [each.compression for each in found] == list(CANDIDATES)
    return {each.compression: each.step_s for each in found}


def check_forecasts(rank: int) -> None:
    before = torch.get_rng_state()
    # A megabyte a second: 4 MB take 4 s as they are, and 2 s in 16 bit; 1 % of places and values 80 ms, bits 131 ms.
    narrow = forecasts(link(1), Step([0.5], [4.5], length_s=5.0, overlaps=True))
    expected = {"none": 5.0, "bf16": 3.1, "topk:0.01": 1.08, "sign": 1.13}
    for flag, seconds in expected.items():
        assert narrow[flag] == pytest.approx(seconds, abs=0.15), flag
    # So fast that only the computation counts: what was hidden stays so, what waits is added.
    wide = forecasts(link(1e6), Step([0.5], [0.5], length_s=1.0, overlaps=False))
    assert wide["none"] == pytest.approx(1.0, abs=0.02)
    assert wide["none"] < wide["sign"] < 1.2
    # A step that was shorter than the all-reduce should have been.
    short = forecasts(link(1), Step([0.0], [0.0], length_s=0.01, overlaps=False))
    assert short["topk:0.01"] == pytest.approx(0.08, abs=0.15)
    assert min(short.values()) > 0
    assert torch.equal(torch.get_rng_state(), before), "the next epochs would have other orders"


def test_forecasts_follow_the_wire_and_the_computation_and_leave_the_random_state_alone():
    run_ranks(check_forecasts, 2, start_method="fork")


def test_a_dry_wire_knows_what_would_be_sent():
    wire = SimulatedGroup(4)
    flat = torch.ones(SIZE)
    AllReduceHook().average(Bucket(0, flat, MEMBERS), wire)
    assert [(message.collective, message.num_bytes) for message in wire.messages] == [("all_reduce", 4 * SIZE)]
    assert sum(wire.sent.values()) == 1.5 * 4 * SIZE


def test_a_dry_wire_has_the_collectives_of_any_hook():
    wire = SimulatedGroup(4)
    payload, gathered = torch.arange(3.0), torch.empty(12)
    wire.all_gather_into(gathered, payload)
    wire.reduce_scatter_into(shard := torch.empty(3), gathered, dist.ReduceOp.SUM)
    assert torch.equal(wire.start_broadcast(payload, 1)(), shard)
    assert [(message.collective, message.num_bytes) for message in wire.messages] == [
        ("all_gather", 12),
        ("reduce_scatter", 48),
        ("broadcast", 12),
    ]
    assert wire.sent.total() == 3 * 12 + 48 * 3 / 4 + 12 * 3 / 4


def test_the_advice_names_the_links_on_which_a_method_saves_time():
    found = [Forecast("none", 1.0, 100), Forecast("int8", 1.0, 25, 2e9), Forecast("sign", 1.0, 3, 5e8)]
    slow = {"all_reduce": Link(1e-4, 1e9 / 1.5)}
    assert advice(found, slow, 4) == (
        "Here a rank sends 1 GB/s in an all-reduce, and only int8 can save time. A method saves time on links below its"
        " rate (int8 2 GB/s, sign 0.5 GB/s), if backward does not hide the all-reduce."
    )
    assert "sends 470 GB/s in an all-reduce, and no compression can save time." in advice(
        found, {"all_reduce": Link(1e-5, 470e9 / 1.5)}, 4
    )


def check_limits(rank: int) -> None:
    """At the limit, what is computed takes as long as what is not sent."""
    hooks = {flag: make_comm_hook(flag) or AllReduceHook() for flag in CANDIDATES}
    buckets, step = [Bucket(0, torch.empty(SIZE), MEMBERS)], Step([0.5], [4.5], length_s=5.0, overlaps=True)
    found = forecast(hooks, buckets, step, link(1), CountingGroup(), AllReduceHook())
    assert found[0].pays_below == 0
    for each in found[1:]:
        # A million values of the plainest method take some milliseconds, which saves some megabytes.
        assert 1e7 < each.pays_below < 1e12, each


def test_a_forecast_says_below_which_rate_a_method_pays():
    run_ranks(check_limits, 2, start_method="fork")


class Choice(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        hook = trainer.strategy.comm_hook
        found = {
            "chosen": hook.chosen,
            "method": hook._method.flag,
            "forecasts": [each.compression for each in hook.forecasts],
            "bytes": hook.num_bytes,
        }
        self.path.with_suffix(f".{trainer.global_rank}").write_text(json.dumps(found))


@pytest.mark.parametrize("strategy", ["hsdp_fork:replicate=2", *nightly("ddp_fork")])
def test_auto_chooses_the_same_on_all_ranks(strategy, tmp_path):
    train(Two(), 2, strategy=strategy, compression="auto", callbacks=[Choice(tmp_path / "choice")])
    first, second = (json.loads((tmp_path / f"choice.{rank}").read_text()) for rank in range(2))
    assert first == second
    assert first["method"] == first["chosen"] in first["forecasts"] == Auto().candidates


def test_until_auto_has_chosen_nothing_is_changed():
    assert Auto().candidates[0] == "none"
    flags: dict[str, Any] = {"max_steps": 5}
    as_it_is, measured = train(Two(), 2, **flags), train(Two(), 2, compression="auto", **flags)
    assert all(torch.equal(as_it_is[name], measured[name]) for name in as_it_is)


def test_what_auto_chose_goes_on_after_a_resumption(tmp_path):
    class Sign(Callback):
        """Leaves no choice."""

        def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
            trainer.strategy.comm_hook.candidates = ["sign"]

    saved = tmp_path / "saved"
    expected = train(Two(), 2, compression="auto:1", callbacks=[Sign(), Saves(saved)])
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
    hook = Auto(steps=3)
    hook.candidates, hook.may_repeat = ["sign"], True
    hook.begin(module, CountingGroup())
    hook.load_state_dict({"flag": "auto", "step": 5, "chosen": None})
    assert hook.wire is not None

    def run() -> None:
        hook.run(Bucket(0, torch.ones(65 * 48), members))

    for step in range(4):
        run()
        if step == 1:
            for _ in range(1 + rank):
                hook.on_step_end(skipped=True)
            run()
        hook.on_step_end()
        num_seen = [torch.zeros(1) for _ in range(hook.wire.size)]
        dist.all_gather(num_seen, torch.tensor([float(len(hook._seen))]))
        assert [float(num) for num in num_seen] == [max(0, step - 1)] * hook.wire.size
    run()
    assert hook.chosen is None
    hook.on_step_end()
    assert hook.chosen == "sign"  # between two steps: one that is repeated has none of the calls that measure
    num_calls = hook.wire.num_calls
    run()
    assert hook.wire.num_calls == num_calls + 1
    assert hook._method.step == hook.step == 10
    assert hook.memories()["residuals"].in_two_phases


def test_all_ranks_choose_together_where_steps_are_repeated():
    run_ranks(check_repeated_steps, 2, start_method="fork")


def test_wire_reports_and_leaves_the_module_as_it_is(caplog):
    module = Two()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    engine = Engine(**QUIET, strategy="ddp_fork", devices=2, max_steps=STEPS)
    caplog.set_level("INFO")
    report = engine.bench_comm(module, rows(2), compressions=["none", "topk:0.5"])
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert report.num_ranks == 2
    assert [each.compression for each in report.forecasts] == ["none", "topk:0.5"]
    assert [each.sent_bytes for each in report.forecasts] == [4 * 808, 8 * 404]
    assert report.recommended in ("none", "topk:0.5")
    assert set(report.links) == {"all_reduce", "all_gather", "all_to_all"}
    assert all(each.latency_s > 0 < each.bytes_per_s for each in report.links.values())
    assert str(report) in caplog.text


def test_wire_refuses_what_is_no_compression():
    engine = Engine(**QUIET, strategy="ddp_fork", devices=2)
    with pytest.raises(ValueError, match=r"topk:density must be greater than 0 and at most 1"):
        engine.bench_comm(Two(), rows(2), compressions=["none", "topk:2"])
