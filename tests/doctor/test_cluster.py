"""What is between the hosts of a job: how it is judged."""

import pytest

from polyphase.doctor.host import judge_clocks, judge_links, judge_meeting, judge_versions_alike

HOSTS = {0: "a", 1: "a", 2: "b", 3: "c"}


def rates(slow=None, between=1000.0, within=5000.0):
    """Rates of all pairs, with a slow one at rank `slow`."""
    return {
        (s, t): 20.0 if slow in (s, t) else within if HOSTS[s] == HOSTS[t] else between
        for s in HOSTS
        for t in HOSTS
        if s != t
    }


@pytest.mark.parametrize(
    ("check", "status", "found", "remedy"),
    [
        (judge_meeting(4, 3, 1.2), "ok", "4 ranks on 3 hosts", ""),
        (judge_meeting(4, 0, None, "timed out"), "fail", "timed out", "MASTER_ADDR"),
        (judge_clocks({"a": 0.0, "b": -0.003}), "ok", "0.003 s", ""),
        (judge_clocks({"a": 0.0, "b": -90.0}), "warn", "that of b", "clock of b"),
        (judge_versions_alike({"a": "torch 2.13", "b": "torch 2.13"}), "ok", "on all hosts", ""),
        (judge_versions_alike({"a": "torch 2.13", "b": "torch 2.12"}), "fail", "a: torch 2.13; b: torch 2.12", "image"),
        (judge_links(rates(), HOSTS, 900.0), "ok", "1,000 MB/s between ranks", ""),
        (judge_links(rates(slow=2), HOSTS, 30.0), "warn", "at least 20 (rank", "cable of rank 2 (b)"),
        (judge_links(rates(between=110.0), HOSTS, 90.0), "warn", "110 MB/s between", "compression"),
        (judge_links(rates(between=110.0), dict.fromkeys(HOSTS, "a"), 90.0), "ok", "90 MB/s in an all-reduce", ""),
        (judge_links({}, {0: "a"}, 900.0), "ok", "900 MB/s", ""),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_how_it_is_judged(check, status, found, remedy):
    assert (check.status, bool(check.remedy)) == (status, bool(remedy))
    assert found in check.found
    assert remedy in check.remedy
