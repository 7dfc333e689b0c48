"""Rules about the device: reads that wait for it, its memory, its clocks."""

import pytest

from polyphase.doctor import judge
from tests.doctor.runs import changed, interval, only, run_of


def test_device_reads_have_their_line_and_cost_nothing_on_a_cpu():
    reads = changed(interval(), reads={"item() at model.py:12 in training_step": 2})
    finding = only(run_of(reads, interval(), device="cuda"))
    assert finding.cause == "device_reads"
    assert "item() at model.py:12" in finding.evidence
    assert judge(run_of(reads, interval())).findings == []


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


def test_logits_that_take_much_of_the_memory():
    run = allocating(50_000.0, 40_000.0)
    for intervals in run.intervals.values():
        intervals[0].logits_mb = 4_200.0
    finding = only(run)
    assert (finding.cause, finding.ranks, finding.gain) == ("large_logits", (), None)
    assert "the loss has 4,200 MB of logits, 10% of the most memory that was allocated" in finding.evidence
    for intervals in run.intervals.values():
        intervals[0].logits_mb = 3_900.0
    assert judge(run).findings == []


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


def test_an_optimizer_of_many_kernels_has_what_it_takes_and_what_one_kernel_would():
    steps = interval(optimizer=5.0)
    finding = only(run_of(steps, steps, device="cuda", unfused_optimizer="AdamW by foreach"))
    assert finding.cause == "unfused_optimizer"
    assert "AdamW by foreach takes 5 ms of a step of 14 ms, and would take about 2 ms" in finding.evidence
    assert finding.gain == pytest.approx(0.6 * 5 / 14)
    for run in (
        run_of(steps, steps, unfused_optimizer="AdamW by foreach"),
        run_of(steps, steps, device="cuda"),
        run_of(interval(optimizer=0.3), interval(optimizer=0.3), device="cuda", unfused_optimizer="AdamW by foreach"),
    ):
        assert judge(run).findings == []
