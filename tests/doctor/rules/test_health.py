"""Rules about the health of training: each of them finds its fault in the ranks' notes, and none in healthy ones."""

import dataclasses

import pytest

from polyphase.doctor import Run, judge
from tests.doctor.runs import info, interval

NUM = 8


def run(*by_rank, **fields):
    """A run of as many ranks, each with a list of what differs in its intervals."""
    series = {
        rank: [
            dataclasses.replace(interval(10 * number, 10), **changes)
            for number, changes in enumerate(intervals, start=1)
        ]
        for rank, intervals in enumerate(by_rank)
    }
    return Run({rank: info(rank, len(by_rank), **fields) for rank in series}, series)


def healthy(number, **changes):
    return {
        "grad_norm": 1.0 + number % 3,
        "loss_scale": 65536.0 / 2 ** (number % 2),
        "without_gradient": [],
        "checksum": 10.0 + number,
        "checksum_step": 10 * number,
        "lr": 0.1 / number,
        "lr_steps": 10 * number,
        **changes,
    }


def series(**of):
    """A healthy series, but for functions of the interval's number."""
    return [healthy(n, **{name: value(n) for name, value in of.items()}) for n in range(1, NUM + 1)]


def found(given):
    return {finding.cause: finding for finding in judge(given).findings}


def test_a_healthy_run():
    assert found(run(series(), series(), lr_interval_steps=1)) == {}


def test_a_run_of_which_nothing_is_known():
    assert found(run([{}] * NUM, [{}] * NUM, lr_interval_steps=1)) == {}


def test_a_rank_with_other_weights_is_named_among_three():
    off = series(checksum=lambda n: 10.0 + n + (1e-5 if n >= 4 else 0.0))
    finding = found(run(series(), off, series()))["replicas_differ"]
    assert (finding.ranks, finding.host, finding.numbers["step"]) == ((1,), "host1", 40)
    assert "after step 40 rank 1 has other weights" in finding.evidence


def test_of_two_ranks_none_is_named():
    finding = found(run(series(), series(checksum=lambda n: 11.0 + n)))["replicas_differ"]
    assert (finding.ranks, finding.numbers["step"]) == ((), 10)


def test_a_checksum_that_is_no_number_differs():
    assert found(run(series(), series(checksum=lambda n: float("nan"))))["replicas_differ"].ranks == ()


def test_checksums_of_different_steps_are_not_compared():
    assert found(run(series(), series(checksum_step=lambda n: 10 * n + 5, checksum=lambda n: 0.0))) == {}


def test_other_weights_are_the_first_finding():
    slow = dataclasses.replace(interval(10, 10, data_wait=50.0), checksum=1.0, checksum_step=10)
    other = dataclasses.replace(slow, checksum=2.0)
    assert judge(Run({r: info(r) for r in range(2)}, {0: [slow], 1: [other]})).findings[0].cause == "replicas_differ"


def test_what_endangers_the_run_comes_before_what_slows_it_down():
    slow = interval(10, 10, data_wait=50.0)
    times = {"seconds": lambda n: slow.seconds, "wall_s": lambda n: slow.wall_s}
    rank = series(grad_norm=lambda n: 100.0 if n == 5 else 1.0, **times)
    assert [finding.cause for finding in judge(run(rank, rank)).findings] == ["gradient_spikes", "slow_loader"]


@pytest.mark.parametrize(("norm", "is_found"), [(100.0, True), (19.0, False)])
def test_a_spike_of_the_gradients(norm, is_found):
    causes = found(run(series(grad_norm=lambda n: norm if n == 5 else 1.0)))
    assert ("gradient_spikes" in causes) == is_found
    if is_found:
        assert "by step 50 the norm of the gradients on rank 0 was 100 times" in causes["gradient_spikes"].evidence


def test_norms_that_fall_as_training_begins_are_no_spike():
    assert found(run(series(grad_norm=lambda n: 100.0 if n == 1 else 1.0))) == {}


def test_a_loss_scale_that_falls():
    finding = found(run(series(loss_scale=lambda n: 65536.0 / 4**n)))["loss_scale_falls"]
    assert finding.numbers == {"from": 16384.0, "to": 1.0}
    assert "bf16-mixed" in finding.remedy


def test_a_loss_scale_that_comes_back_is_healthy():
    assert found(run(series(loss_scale=lambda n: 65536.0 / 1024 if n == 4 else 65536.0))) == {}


def test_parameters_without_gradient_are_named():
    dead = series(without_gradient=lambda n: ["a.weight", "b.weight"] if n % 2 else ["b.weight"])
    finding = found(run(dead, series(without_gradient=lambda n: ["b.weight", "c.weight"])))["dead_parameters"]
    assert finding.evidence == "b.weight had no gradient in all 8 steps that were looked at"


def test_a_shard_without_gradient_is_not_a_parameter_without_one():
    assert found(run(series(without_gradient=lambda n: ["a"]), series())) == {}


def test_a_parameter_of_one_stage_is_dead_there():
    causes = found(run(series(without_gradient=lambda n: ["a"]), series(), layout={"pp": 2}))
    assert "a had no gradient" in causes["dead_parameters"].evidence


def test_a_scheduler_that_is_not_stepped():
    stands = series(lr_steps=lambda n: 0, lr=lambda n: 0.1)
    finding = found(run(stands, lr_interval_steps=1))["lr_stands_still"]
    assert "was not stepped for 70 steps: it is 0.1" in finding.evidence


@pytest.mark.parametrize("every", [None, 50], ids=["by epochs", "seldom"])
def test_a_scheduler_that_is_not_due_is_healthy(every):
    assert found(run(series(lr_steps=lambda n: 0), lr_interval_steps=every)) == {}
