"""Rules about the host: its CPUs, its memory, and what Python itself takes."""

import pytest

from polyphase.doctor import judge
from tests.doctor.runs import STEPS, changed, interval, only, run_of


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


def test_swapping():
    host = [changed(interval(), swap_read_mb=35.0), changed(interval(), swap_read_mb=36.0, swapped_mb=812.0)]
    run = run_of(interval(), *host)
    run.ranks[1].host = run.ranks[2].host = "b"
    finding = only(run)
    assert (finding.cause, finding.ranks, finding.host, finding.gain) == ("swapping", (1, 2), "b", None)
    assert "b reads 36 MB/s back from swap while it trains; rank 2 has 812 MB there" in finding.evidence
    assert judge(run_of(interval(), changed(interval(), swap_read_mb=0.5, swapped_mb=812.0))).findings == []


def test_shared_memory_that_is_nearly_full():
    used = [changed(interval(), shm_mb=mb) for mb in (10.0, 62.0, 60.0)]
    run = run_of(*used, shm_capacity_mb=64.0)
    run.ranks[1].host = run.ranks[2].host = "b"
    finding = only(run)
    assert (finding.cause, finding.ranks, finding.host) == ("full_shared_memory", (1, 2), "b")
    assert "/dev/shm of b was 97% full: 62 of 64 MB" in finding.evidence
    assert "--shm-size" in finding.remedy
    assert judge(run_of(used[0], changed(interval(), shm_mb=50.0), shm_capacity_mb=64.0)).findings == []


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
