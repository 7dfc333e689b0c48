"""Rules about the network: compression that costs more than it saves, and slow links."""

import pytest

from polyphase.doctor import judge
from tests.doctor.runs import changed, interval, only, run_of


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
