"""Each rule finds its cause and its rank, names what mends it, and says nothing of a healthy run."""

import dataclasses
from pathlib import Path

import pytest

from polyphase.engine.doctor import RULES, judge

from .runs import STEPS, interval, run_of

ROOT = Path(__file__).parents[3]


def changed(each, **fields):
    return dataclasses.replace(each, **fields)


def only(run):
    """The one finding."""
    findings = judge(run).findings
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_healthy_run_has_no_finding(num_ranks):
    assert judge(run_of(*[interval()] * num_ranks)).findings == []
    assert judge(run_of(*[interval()] * num_ranks)).lines()[1] == "  nothing stands out"


def test_slow_loader_of_one_rank():
    fast = interval(waiting=20.2)
    finding = only(run_of(fast, fast, interval(data_wait=20.1), fast))
    assert (finding.cause, finding.ranks, finding.host) == ("slow_loader", (2,), "host2")
    assert finding.gain == pytest.approx(2 / 3, abs=0.02)
    assert "num_workers=4" in finding.remedy
    assert "host2" in finding.remedy


def test_slow_loader_of_all():
    finding = only(run_of(interval(data_wait=10.0), interval(data_wait=11.0), num_workers=0))
    assert (finding.cause, finding.ranks) == ("slow_loader", ())
    assert "DataLoader(num_workers=3, persistent_workers=True)" in finding.remedy


def test_slow_copy_says_to_pin_where_there_is_a_device():
    assert "pin_memory=True" in only(run_of(interval(copy=2.0), device="cuda")).remedy
    assert "on_after_batch_transfer" in only(run_of(interval(copy=2.0))).remedy


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


def test_slow_callback_of_one_rank_is_named():
    slow = changed(interval(callbacks=5.0), by_hook={"Draws.on_train_batch_end": 0.4, "Draws.on_before_backward": 0.1})
    finding = only(run_of(slow, interval(waiting=5.2)))
    assert (finding.cause, finding.ranks) == ("slow_callback", (0,))
    assert "Draws.on_train_batch_end takes 4 ms a step" in finding.evidence
    assert finding.gain == pytest.approx(1 / 3, abs=0.01)


def test_slow_callback_of_all_is_no_ranks():
    slow = changed(interval(callbacks=5.0), by_hook={"Draws.on_train_batch_end": 0.5})
    assert only(run_of(slow, slow)).ranks == ()


def test_a_hook_that_is_hidden_behind_the_device_is_not_slow():
    hidden = changed(interval(callbacks=0.1), by_hook={"Draws.on_train_batch_end": 0.5})
    assert judge(run_of(hidden, device="cuda")).findings == []


def test_the_doctor_does_not_name_itself():
    notes = changed(interval(callbacks=5.0), by_hook={"Doctor.on_train_batch_end": 0.5})
    assert "slow_callback" not in {finding.cause for finding in judge(run_of(notes, notes)).findings}


def test_slow_logging_names_the_loggers():
    finding = only(run_of(interval(logging=3.0), interval(waiting=3.2), loggers=["WandbLogger"]))
    assert (finding.cause, finding.ranks) == ("slow_logging", (0,))
    assert "WandbLogger" in finding.evidence


def test_checkpoint_stall():
    stalled = changed(interval(checkpoint=5.0), num_saves=5)
    finding = only(run_of(stalled, stalled))
    assert (finding.cause, finding.ranks) == ("checkpoint_stall", ())
    assert "5 saves stop training for 0.1 s each" in finding.evidence
    assert "Snapshot()" in finding.remedy


def test_the_time_of_a_checkpoint_callback_is_the_checkpoints():
    stalled = changed(interval(callbacks=5.0), num_saves=5, by_hook={"ModelCheckpoint.on_train_batch_end": 0.5})
    assert only(run_of(stalled, stalled)).cause == "checkpoint_stall"


def test_one_save_at_the_end_is_no_finding():
    assert judge(run_of(changed(interval(checkpoint=5.0), num_saves=1))).findings == []


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [("ddp", "compression="), ("fsdp", "bf16-mixed"), ("tp", "fewer ranks along tp"), ("local_sgd", "local_sgd:every")],
)
def test_exposed_communication(strategy, remedy):
    finding = only(run_of(*[interval(communication=5.0)] * 2, strategy=strategy))
    assert finding.cause == "exposed_communication"
    assert remedy in finding.remedy
    assert finding.gain == pytest.approx(5 / 14.5, abs=0.01)


def test_device_reads_have_their_line_and_cost_nothing_on_a_cpu():
    reads = changed(interval(), reads={"item() at model.py:12 in training_step": 2})
    finding = only(run_of(reads, interval(), device="cuda"))
    assert finding.cause == "device_reads"
    assert "item() at model.py:12" in finding.evidence
    assert judge(run_of(reads, interval())).findings == []


def test_thread_oversubscription():
    queued = changed(interval(), runqueue_s=0.3)
    finding = only(run_of(queued, queued, num_threads=8))
    assert finding.cause == "thread_oversubscription"
    assert finding.remedy == "OMP_NUM_THREADS=4"
    assert judge(run_of(interval(), interval(), num_threads=8)).findings == [], "many threads that harm nobody"


def test_every_rank_waits_for_a_cpu_because_ranks_outnumber_cpus():
    queued = changed(interval(), runqueue_s=0.3)
    run = run_of(*[queued] * 4)
    for info in run.ranks.values():
        info.num_cpus = 2.0
    finding = only(run)
    assert (finding.cause, finding.ranks, finding.remedy.partition(":")[0]) == ("cpu_shortage", (), "devices=2")
    assert finding.gain == pytest.approx(0.3, abs=0.01)
    assert "4 ranks share 2 CPUs" in finding.evidence


def test_cpus_that_the_ranks_other_threads_have_are_no_neighbours():
    """Threads of gloo reduce gradients on the CPU for which the thread that trains waits."""
    for own_s, causes in ((0.9, []), (0.4, ["busy_neighbour"])):
        queued = changed(interval(), runqueue_s=0.3, process_cpu_s=own_s)
        run = run_of(queued, queued)
        for info in run.ranks.values():
            info.host, info.num_cpus = "a", 2.0
        assert [finding.cause for finding in judge(run).findings] == causes


def test_ranks_that_are_bound_to_cpus_of_their_own_share_none():
    queued = changed(interval(), runqueue_s=0.3)
    run = run_of(queued, queued)
    for rank, info in run.ranks.items():
        info.host, info.num_cpus, info.cpus = "a", 1.0, [rank]
    assert only(run).cause == "busy_neighbour"
    for info in run.ranks.values():
        info.cpus = [0]
    finding = only(run)
    assert (finding.cause, finding.numbers["cpus"]) == ("cpu_shortage", 1.0)


def test_every_rank_waits_for_a_cpu_because_others_compute_there():
    queued = changed(interval(), runqueue_s=0.3)
    finding = only(run_of(queued, queued))
    assert (finding.cause, finding.ranks) == ("busy_neighbour", ())
    assert judge(run_of(queued, changed(interval(), runqueue_s=0.1))).findings == []
    assert judge(run_of(queued, queued, device="cuda")).findings == [], "there the device computes meanwhile"


def calling(num_operators, *, operator_us=4.0, **phases):
    each = changed(interval(**phases), num_operators=num_operators * STEPS)
    return run_of(each, each, operator_s=operator_us / 1e6)


def test_many_small_operators():
    finding = only(calling(1500))
    assert (finding.cause, finding.ranks) == ("host_bound", ())
    assert finding.gain == pytest.approx(0.6, abs=0.01)
    assert (
        "1,500 operators a step take 5.33 us each, of which 4 us are the host's to call one: 60% of" in finding.evidence
    )
    assert "compile=True" in finding.remedy


def test_operators_that_are_few_or_not_known_or_compiled():
    unknown = calling(1500)
    unknown.ranks[1].operator_s = None
    for run in (calling(500), calling(1500, compute=30.0), calling(3000), unknown):
        assert judge(run).findings == []


def test_padding():
    finding = only(run_of(changed(interval(), padding=0.5)))
    assert finding.cause == "padding"
    assert finding.gain == pytest.approx(0.5 * 0.8, abs=0.01)


def test_uneven_data_by_fillers():
    finding = only(run_of(interval(), changed(interval(), num_fillers=20)))
    assert (finding.cause, finding.ranks) == ("uneven_data", (1,))


def test_slow_validation():
    assert only(run_of(*[interval(validation=6.0)] * 2)).cause == "slow_validation"


def test_ranks_that_wait_for_each_other_in_turn():
    finding = only(run_of(interval(waiting=4.0), interval(waiting=4.5)))
    assert (finding.cause, finding.ranks) == ("varying_steps", ())


def test_little_computing_where_nothing_else_is_found():
    finding = only(run_of(interval(compute=4.0, callbacks=1.0, logging=0.2)))
    assert (finding.cause, finding.ranks) == ("low_compute", ())
    share = (4.0 + 1.0 + 0.4) / 7.2
    assert finding.numbers["share"] == pytest.approx(share)
    assert finding.gain == pytest.approx(1 - share / 0.85)
    assert "and communication take 75% of a step's time; callbacks 14%, waiting 4%" in finding.evidence
    assert "hooks" in finding.remedy


@pytest.mark.parametrize(
    ("phase", "remedy"),
    [("data_wait", "num_workers"), ("copy", "pin_memory"), ("engine", "a larger batch"), ("callbacks", "fewer")],
)
def test_the_rest_of_a_step_says_what_to_do(phase, remedy):
    rest = dict.fromkeys(("data_wait", "copy", "engine", "callbacks"), 0.45) | {phase: 0.9}
    finding = only(run_of(interval(**rest)))
    assert finding.cause == "low_compute"
    assert remedy in finding.remedy


def test_saves_and_validation_are_no_part_of_a_step_that_computes_little():
    assert judge(run_of(changed(interval(checkpoint=5.0), num_saves=1), strategy="single")).findings == []


def test_the_most_costly_comes_first():
    slow = changed(interval(data_wait=5.0, callbacks=2.0), by_hook={"Draws.on_train_batch_end": 0.2})
    assert [finding.cause for finding in judge(run_of(slow)).findings] == ["slow_loader", "slow_callback"]


def test_few_steps_are_not_judged():
    verdict = judge(run_of(interval(num_steps=9, data_wait=50.0)))
    assert verdict.findings == []
    assert verdict.caveats == ["9 steps were measured after the first ones: 10 are needed to judge"]


def test_the_warm_up_is_left_out():
    run = run_of(interval())
    run.intervals[0].insert(0, changed(interval(step=3, num_steps=3, compute=900.0), is_warmup=True))
    assert judge(run).figures.step_s == pytest.approx(0.01)


def test_a_rank_that_is_missing_is_named():
    run = run_of(interval(), interval())
    del run.ranks[1], run.intervals[1]
    assert judge(run).caveats == ["ranks 1 are missing, whose files may lie on other hosts"]


def exposed(**fields):
    intervals = [changed(interval(communication=4.0), **fields)] * 2
    return run_of(*intervals, flags={"strategy": "ddp_fork:bucket_cap_mb=0.1"} if not fields else {})


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


def compressing(compress_ms, wire_ms, **phases):
    """Gradients of 4 MB, of which 1 MB is sent; an all-reduce carries 2 MB in a millisecond."""
    of = {"compress_s": compress_ms / 1e3, "sent_mb": 1.0, "plain_mb": 4.0}
    fields = {"all_reduce_mb_per_s": 2000.0}
    ranks = [changed(interval(**phases), **fields, compression=of | {"wire_s": wire_ms / 1e3})]
    # The other one waits for it in its collectives: that is no time of the compression.
    ranks.append(changed(interval(**phases), **fields, compression=of | {"wire_s": wire_ms / 1e3 + 0.005}))
    return run_of(*ranks, compression="int8")


def test_compression_that_costs_more_than_it_saves():
    finding = only(compressing(3.0, 0.5, communication=3.0))
    assert (finding.cause, finding.ranks) == ("costly_compression", ())
    assert finding.gain == pytest.approx(1.5 / 12.5, abs=0.001)
    assert "takes 3.5 ms a step for 1 MB, and 4 MB without it would take 2 ms" in finding.evidence
    assert "'none'" in finding.remedy


@pytest.mark.parametrize("compress_ms", [0.5, 1.5])
def test_compression_that_pays_is_no_finding(compress_ms):
    exposed = judge(compressing(compress_ms, 0.5, communication=3.0))
    assert [finding.cause for finding in exposed.findings] == ["exposed_communication"]


def test_of_averages_that_are_seldom_sent_or_not_compared_no_cost_is_known():
    seldom, alone = compressing(3.0, 0.5), compressing(3.0, 0.5)
    for info in seldom.ranks.values():
        info.strategy = "local_sgd"
    alone.intervals[0][0].all_reduce_mb_per_s = None
    assert judge(seldom).findings == judge(alone).findings == []


def linked(rates, hosts=None, **fields):
    """A run whose rank r has received from rank s at ``rates(s, r)`` MB/s."""
    number = range(len(hosts) if hosts else 4)
    run = run_of(
        *(changed(interval(communication=2.5), links=[rates(s, r) if s != r else 0.0 for s in number]) for r in number),
        **fields,
    )
    for rank, info in run.ranks.items():
        info.host = hosts[rank] if hosts else "a"
    return run


def found_link(run):
    findings = [finding for finding in judge(run).findings if finding.cause == "slow_link"]
    return findings[0] if findings else None


def test_one_slow_link():
    finding = found_link(linked(lambda s, r: 20.0 if {s, r} == {1, 3} else 1000.0, hosts="abcd"))
    assert (finding.ranks, finding.host) == ((1, 3), "b")
    assert "the link between rank 1 and rank 3 (b and d) carries 20 MB/s" in finding.evidence
    share = 2.5 / 12.0
    assert finding.gain == pytest.approx(share * 0.98, abs=0.005)
    one_way = found_link(linked(lambda s, r: 20.0 if (s, r) == (3, 1) else 1000.0, hosts="abcd"))
    assert one_way.ranks == (1, 3)


@pytest.mark.parametrize("hosts", ["abc", "abcdef"])
@pytest.mark.parametrize("is_slow", [lambda s, r: s == 2, lambda s, r: 2 in (s, r)], ids=["out", "in and out"])
def test_all_links_of_one_rank_are_slow(hosts, is_slow):
    finding = found_link(linked(lambda s, r: 30.0 if is_slow(s, r) else 900.0, hosts=hosts))
    assert (finding.ranks, finding.host) == ((2,), "c")
    assert "cable of c" in finding.remedy


def test_links_that_are_not_slow():
    assert found_link(linked(lambda s, r: 500.0 + 100 * s)) is None
    # Within a host it is as quick as its memory and its CPUs are free.
    assert found_link(linked(lambda s, r: 20.0 if {s, r} == {1, 3} else 1000.0)) is None
    assert found_link(linked(lambda s, r: 5000.0 if s // 2 == r // 2 else 100.0, hosts="aabb")) is None
    # Two messages of 1 and 4 ms differ by what a busy CPU costs.
    assert found_link(linked(lambda s, r: 500.0 if s == 1 else 2000.0)) is None
    unknown = linked(lambda s, r: 20.0 if {s, r} == {1, 3} else 1000.0, hosts="abcd")
    unknown.intervals[2][0].links = []
    assert found_link(unknown) is None


def test_swapping():
    host = [changed(interval(), swap_read_mb=35.0), changed(interval(), swap_read_mb=36.0, swapped_mb=812.0)]
    run = run_of(interval(), *host)
    run.ranks[1].host = run.ranks[2].host = "b"
    finding = only(run)
    assert (finding.cause, finding.ranks, finding.host, finding.gain) == ("swapping", (1, 2), "b", None)
    assert "b reads 36 MB/s back from swap while it trains; rank 2 has 812 MB there" in finding.evidence
    assert judge(run_of(interval(), changed(interval(), swap_read_mb=0.5, swapped_mb=812.0))).findings == []


def allocating(*used_mb, flops=None):
    run = run_of(*(changed(interval(), device_mb=mb, flops=flops) for mb in used_mb), device="cuda")
    for info in run.ranks.values():
        info.device_capacity_mb, info.peak_flops_per_s = 80_000.0, 100e12
    return run


def test_memory_that_is_nearly_full():
    one = only(allocating(76_000.0, 40_000.0))
    assert (one.cause, one.ranks) == ("full_memory", (0,))
    assert "95% of its device's memory allocated: 76,000 of 80,000 MB" in one.evidence
    assert only(allocating(76_000.0, 75_000.0)).ranks == ()
    parts = allocating(76_000.0, 40_000.0)
    parts.intervals[0][0].model_mb = {"parameters": 9_000.0, "activations": 67_000.0}
    assert "76,000 of 80,000 MB: activations 67,000 MB, parameters 9,000 MB" in only(parts).evidence
    assert judge(allocating(70_000.0, 60_000.0)).findings == []


def test_an_allocator_that_has_to_free_its_reserve_is_at_the_end_of_its_memory():
    run = allocating(50_000.0, 40_000.0)
    run.intervals[1][0].num_alloc_retries = 3
    finding = only(run)
    assert (finding.cause, finding.ranks) == ("full_memory", (1,))
    assert "3 times torch had to free what it kept in reserve" in finding.evidence


def test_shared_memory_that_is_nearly_full():
    used = [changed(interval(), shm_mb=mb) for mb in (10.0, 62.0, 60.0)]
    run = run_of(*used, shm_capacity_mb=64.0)
    run.ranks[1].host = run.ranks[2].host = "b"
    finding = only(run)
    assert (finding.cause, finding.ranks, finding.host) == ("full_shared_memory", (1, 2), "b")
    assert "/dev/shm of b was 97% full: 62 of 64 MB" in finding.evidence
    assert "--shm-size" in finding.remedy
    assert judge(run_of(used[0], changed(interval(), shm_mb=50.0), shm_capacity_mb=64.0)).findings == []


def test_memory_that_is_not_used_counts_where_devices_have_little_to_do():
    flops = {share: share * 100e12 * interval().wall_s for share in (0.1, 0.5)}
    finding = only(allocating(8_000.0, 20_000.0, flops=flops[0.1]))
    assert (finding.cause, finding.ranks, finding.gain) == ("unused_memory", (), None)
    assert "at most 25% of a device's memory was allocated, at 10% of the peak rate" in finding.evidence
    for run in (
        allocating(8_000.0, 20_000.0, flops=flops[0.5]),
        allocating(8_000.0, 60_000.0, flops=flops[0.1]),
        allocating(8_000.0, 20_000.0),
    ):
        assert judge(run).findings == []


def throttled(clock, **reasons):
    reasons = {name.replace("_", " "): looks for name, looks in reasons.items()}
    return changed(
        interval(), num_looks=10, clock_share=clock, throttled=reasons, temperature_c=91.0, power_w=410.0
    )  # fmt: skip


def test_a_device_that_is_too_hot():
    run = run_of(throttled(0.9), throttled(0.6, heat=9, power_limit=10), device="cuda")
    finding = only(run)
    assert (finding.cause, finding.ranks, finding.host) == ("throttled_device", (1,), "host1")
    assert finding.gain == pytest.approx(0.8 * (1 - 0.6 / 0.9), abs=0.01)
    assert "60% of the highest for heat, at 100% of the looks, 91 degrees Celsius, 410 W" in finding.evidence
    assert "cooling" in finding.remedy


def test_a_power_limit_counts_where_others_are_quicker():
    assert only(run_of(throttled(0.9), throttled(0.7, power_limit=10), device="cuda")).ranks == (1,)
    assert judge(run_of(throttled(0.7, power_limit=10), throttled(0.7, power_limit=10), device="cuda")).findings == []
    all_hot = only(run_of(throttled(0.7, heat=10), throttled(0.7, heat=10), device="cuda"))
    assert all_hot.ranks == ()
    assert judge(run_of(throttled(0.9, heat=3), throttled(0.9), device="cuda")).findings == []


def growing(*sizes_mb, rank=0, num_ranks=2):
    """One rank has these sizes at the ends of intervals, the others the first one all along."""
    run = run_of(*[interval()] * num_ranks)
    for each in run.intervals:
        run.intervals[each] = [
            changed(interval(step=STEPS * number), rss_mb=size if each == rank else sizes_mb[0])
            for number, size in enumerate(sizes_mb, start=1)
        ]
    return run


def test_memory_leak_of_one_rank_and_of_a_run_of_one():
    finding = only(growing(400.0, 420.0, 440.0, 460.0, 480.0, rank=1))
    assert (finding.cause, finding.ranks) == ("memory_leak", (1,))
    assert finding.numbers["mb_per_step"] == pytest.approx(0.2)
    assert only(growing(400.0, 420.0, 440.0, 460.0, 480.0, num_ranks=1)).ranks == ()


@pytest.mark.parametrize(
    "sizes_mb",
    [(400.0, 500.0, 500.0, 500.0, 500.0), (400.0, 405.0, 410.0, 415.0, 420.0), (400.0, 450.0, 500.0, 600.0)],
    ids=["settles", "little", "few looks"],
)
def test_memory_that_settles_or_grows_little_is_no_leak(sizes_mb):
    assert judge(growing(*sizes_mb)).findings == []


@pytest.mark.parametrize("flag", ["ddp:find_unused_parameters=true", "ddp_find_unused_parameters_true"])
def test_unused_parameter_search_without_any(flag):
    def run(looks, strategy=flag):
        found = run_of(interval(), interval(), flags={"strategy": strategy})
        for rank in found.intervals:
            found.intervals[rank] = [changed(interval(step=STEPS * n), without_gradient=names) for n, names in looks]
        return found

    used = [(1, []), (2, []), (3, [])]
    finding = only(run(used))
    assert (finding.cause, finding.ranks, finding.gain) == ("unused_parameter_search", (), None)
    assert judge(run(used, "ddp")).findings == []
    assert judge(run(used[:2])).findings == []
    assert judge(run([*used, (4, ["head.weight"])])).findings == []


def test_the_page_has_the_table_of_the_rules():
    text = (ROOT / "docs" / "doctor.md").read_text()
    for rule in RULES:
        assert f"| `{rule.cause}` | {rule.threshold:g} | {rule.of} |" in text, rule.cause
