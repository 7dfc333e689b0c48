"""Rules about ranks: slow ones, stages of pipelines, and communication that nothing hides."""

import pytest

from polyphase.doctor import judge
from polyphase.engine.strategies.registry import STRATEGIES
from tests.doctor.runs import STEPS, changed, exposed, interval, only, run_of


def slow_compute(**fields):
    return run_of(interval(waiting=8.2), changed(interval(compute=16.0), **fields))


def test_slow_rank_by_itself():
    finding = only(slow_compute(cpu_s=16.0 * STEPS / 1e3))
    assert (finding.cause, finding.ranks, finding.host) == ("slow_rank", (1,), "host1")
    assert finding.gain == pytest.approx(8 / 18, abs=0.01)
    assert finding.numbers["step_ms"] == pytest.approx(16.0)
    assert "host1" in finding.remedy


def test_slow_rank_that_waits_for_something():
    finding = only(slow_compute(cpu_s=8.0 * STEPS / 1e3))
    assert (finding.cause, finding.ranks) == ("slow_rank", (1,))
    assert "sleeps in `training_step`" in finding.remedy


def test_slow_rank_with_a_busy_neighbour():
    finding = only(slow_compute(cpu_s=8.0 * STEPS / 1e3, runqueue_s=7.0 * STEPS / 1e3))
    assert (finding.cause, finding.ranks) == ("busy_neighbour", (1,))
    assert "taskset" in finding.remedy


def test_slow_rank_with_more_samples():
    finding = only(slow_compute(num_samples=16 * STEPS))
    assert (finding.cause, finding.ranks) == ("uneven_data", (1,))
    assert "2 times as many samples" in finding.evidence


def test_unequal_stages():
    fast = interval(waiting=12.2)
    run = run_of(fast, interval(compute=20.0), layout={"pp": 2, "replicate": 1}, strategy="pp")
    finding = only(run)
    assert (finding.cause, finding.ranks) == ("unequal_stages", (1,))
    assert finding.gain == pytest.approx(6 / 22 * (1 - 1 / 4), abs=0.02), "one of four micro-batches fills the pipeline"
    assert "pipeline_stages()" in finding.remedy


def test_few_micro_batches():
    for number, gain in ((2, 1 / 6), (4, 1 / 10)):  # of two stages: a third of the time, and a fifth
        bubble = interval(bubble=10.0 / number)
        fields = {"layout": {"pp": 2}, "strategy": "pp", "flags": {"strategy": f"pp:microbatches={number}"}}
        finding = only(run_of(bubble, bubble, **fields))
        assert (finding.cause, finding.ranks) == ("few_micro_batches", ())
        assert finding.gain == pytest.approx(gain, abs=0.005)
        assert f"pp:microbatches={2 * number}" in finding.remedy
    bubble = interval(bubble=10.0 / 12)
    assert judge(run_of(bubble, bubble, layout={"pp": 2}, strategy="pp")).findings == []


def test_stages_that_are_alike_still_have_to_be_filled():
    """As computed: stages of 20 and 8 ms take 20 + 8 / m for m micro-batches, and two of 14 ms take 14 + 14 / m."""
    for number in (1, 2, 12):
        flags = {"strategy": f"pp:microbatches={number}"}
        slow, fast = interval(compute=20.0), interval(waiting=12.2)
        finding = only(run_of(fast, slow, layout={"pp": 2, "replicate": 1}, strategy="pp", flags=flags))
        before, after = 20.0 + 8.0 / number, 14.0 + 14.0 / number
        step_ms = sum(1e3 * each.wall_s / each.num_steps for each in (fast, slow)) / 2
        assert finding.gain * step_ms == pytest.approx(before - after, abs=0.01)


def test_a_stage_with_a_busy_neighbour_is_not_unequal():
    slow = changed(interval(compute=20.0), runqueue_s=11.0 * STEPS / 1e3)
    run = run_of(interval(waiting=12.2), slow, layout={"pp": 2, "replicate": 1}, strategy="pp")
    finding = only(run)
    assert (finding.cause, finding.ranks) == ("busy_neighbour", (1,))
    assert "taskset" in finding.remedy


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [
        ("ddp", "compression="),
        ("fsdp", "bf16-mixed"),
        ("hsdp", "compression="),
        ("tp", "fewer ranks along tp"),
        ("hsdp+tp", "fewer ranks along tp"),
        ("cp", "fewer ranks along cp"),
        ("ddp+cp", "fewer ranks along cp"),
        ("hsdp+cp", "fewer ranks along cp"),
        ("pp+ddp", "more micro-batches"),
        ("ps", "ps:staleness"),
        ("local_sgd", "local_sgd:overlap_steps"),
    ],
)
def test_exposed_communication(strategy, remedy):
    finding = only(run_of(*[interval(communication=5.0)] * 2, strategy=strategy))
    assert finding.cause == "exposed_communication"
    assert remedy in finding.remedy
    if not STRATEGIES[strategy].compressions:
        assert "compression" not in finding.remedy
    assert finding.gain == pytest.approx(5 / 14.5, abs=0.01)


def test_ranks_that_wait_for_each_other_in_turn():
    finding = only(run_of(interval(waiting=4.0), interval(waiting=4.5)))
    assert (finding.cause, finding.ranks) == ("varying_steps", ())


def test_exposed_communication_by_synchronisation_in_each_backward_of_a_step():
    finding = only(exposed(num_syncs=4 * STEPS))
    assert finding.cause == "sync_while_accumulating"
    assert finding.gain == pytest.approx(0.75 * 4 / 13.5, abs=0.01)
    assert "accumulate_grad_batches=4" in finding.remedy
    assert only(exposed(num_syncs=STEPS)).cause == "exposed_communication"


def test_synchronisations_are_known_where_the_run_ends_with_an_interval():
    run = run_of(*[changed(interval(communication=4.0), num_syncs=4 * STEPS, num_tokens=STEPS)] * 2)
    for rank in run.intervals:
        empty = changed(interval(num_steps=0), num_batches=0, num_samples=0, num_syncs=None, num_tokens=None)
        run.intervals[rank].append(empty)
    verdict = judge(run)
    assert [finding.cause for finding in verdict.findings] == ["sync_while_accumulating"]
    assert verdict.figures.totals[0].num_tokens == STEPS


def test_communication_says_where_ranks_outnumber_the_cpus():
    run = run_of(*[interval(communication=5.0)] * 4)
    assert only(run).remedy.startswith("compression=")
    for info in run.ranks.values():
        info.num_cpus = 2.0
    assert only(run).remedy.startswith("no more ranks on a host than CPUs: 4 share 2 here; or ")


def test_ranks_that_outnumber_the_cpus_communicate_for_longer():
    """Collectives wait for a CPU as well: of four ranks on two CPUs twice as long is allowed."""
    for num_cpus, communication, is_found in ((4.0, 2.0, True), (2.0, 2.0, False), (2.0, 5.0, True)):
        run = run_of(*[interval(communication=communication)] * 4)
        for info in run.ranks.values():
            info.num_cpus = num_cpus
        assert [finding.cause for finding in judge(run).findings] == ["exposed_communication"] * is_found


def test_exposed_communication_by_small_buckets():
    finding = only(exposed())
    assert (finding.cause, finding.numbers["bucket_mb"]) == ("small_buckets", 0.1)
    assert "bucket_cap_mb" in finding.remedy
    assert judge(run_of(interval(), interval(), flags={"strategy": "ddp:bucket_cap_mb=0.1"})).findings == []


def sending(calls, sent_mb, *, mb_per_s=500.0, operation="all_reduce", **info):
    """Collectives of a step that take 4 ms which nothing hides."""
    call = {operation: {"calls": calls, "sent_mb": sent_mb}}
    each = changed(interval(communication=4.0), collectives=call, all_reduce_mb_per_s=mb_per_s)
    return run_of(each, each, **info)


def test_many_small_collectives_don_t_use_a_link():
    finding = only(sending(200, 0.2))
    assert (finding.cause, finding.numbers["use"]) == ("underused_link", pytest.approx(0.1))
    assert finding.gain == pytest.approx(0.9 * 4 / 13.6, abs=0.01)
    assert "they send 50 MB/s, and a large one 500" in finding.evidence
    assert finding.remedy.startswith("fewer and larger collectives")


def test_large_collectives_that_are_slower_than_a_large_one_share_the_link():
    assert only(sending(2, 0.8)).remedy.startswith("fewer and larger collectives")
    assert only(sending(2, 2.0, mb_per_s=1000.0)).remedy.startswith("look what else sends there")


@pytest.mark.parametrize("info", [{}, {"strategy": "ddp", "mb_per_s": None}, {"strategy": "pp"}])
def test_a_link_that_is_used_or_not_known_is_exposed_communication(info):
    sent_mb = 0.01 if info else 1.4
    assert only(sending(20, sent_mb, **info)).cause == "exposed_communication"


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_units_that_are_gathered_one_by_one_are_small(strategy):
    finding = only(sending(40, 0.4, operation="all_gather", strategy=strategy))
    assert (finding.cause, finding.numbers["calls"]) == ("small_units", 40)
    assert "units are gathered 40 times a step for 0.01 MB each" in finding.evidence
    assert "`shard_units()`" in finding.remedy
    assert finding.gain == pytest.approx(0.8 * 4 / 13.6, abs=0.01)


@pytest.mark.parametrize(
    ("calls", "sent_mb", "strategy"), [(4, 0.4, "fsdp"), (40, 80.0, "fsdp"), (40, 1.6, "fsdp"), (40, 0.4, "ddp")]
)
def test_units_that_are_few_or_large_are_not_small(calls, sent_mb, strategy):
    finding = only(sending(calls, sent_mb, operation="all_gather", strategy=strategy))
    assert finding.cause in ("exposed_communication", "underused_link")


def test_on_accelerators_less_exposed_communication_counts():
    some = [interval(communication=1.0)] * 2
    assert only(run_of(*some, device="cuda")).cause == "exposed_communication"
    assert judge(run_of(*some)).findings == []
