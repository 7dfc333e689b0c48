"""What stands in the job's store counts only if a rank has written it."""

import json
import logging
import socket
from contextlib import suppress

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from polyphase.engine.distributed import job_store
from polyphase.engine.distributed.job_store import (
    FIRST_FAILURE,
    JobStore,
    ProcessState,
    SignedStore,
    _StoreLine,
    accept_probes,
    own_port,
    parsed,
    probe,
    signed,
    verified,
)
from polyphase.engine.reliability.rendezvous import RankRegistry, _process_key

FAILURE = {"rank": 1, "kind": "hang", "by": 0, "message": "no progress"}


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["secret", None])
def job(store, request, monkeypatch):
    monkeypatch.delenv("POLYPHASE_JOB_SECRET", raising=False)
    if request.param:
        monkeypatch.setenv("POLYPHASE_JOB_SECRET", request.param)
    return JobStore(store, 0, 2)


def test_the_first_failure_stays(job):
    assert job.first_failure() is None
    assert job.record_failure(FAILURE) == FAILURE
    assert job.record_failure({**FAILURE, "rank": 0}) == FAILURE
    assert JobStore(job.store, 1, 2).first_failure() == FAILURE


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xfe" * 40,
        b"[" * 100_000,
        b"x" * 3_000_000,
        json.dumps(FAILURE).encode(),
        signed("elsewhere", json.dumps(FAILURE).encode()),
        signed(FIRST_FAILURE, json.dumps({**FAILURE, "rank": 7}).encode()),
        signed(FIRST_FAILURE, json.dumps({**FAILURE, "rank": True}).encode()),
        signed(FIRST_FAILURE, json.dumps({**FAILURE, "message": None}).encode()),
        signed(FIRST_FAILURE, json.dumps([FAILURE]).encode()),
    ],
    ids=range(10),
)
def test_garbage_is_ignored_and_written_over(job, garbage, caplog):
    job.store.set(FIRST_FAILURE, garbage)
    with caplog.at_level(logging.WARNING, "polyphase.engine"):
        assert job.first_failure() is None
        assert job.first_failure() is None
    assert caplog.text.count("no rank of this job has written it") == 1
    assert job.record_failure(FAILURE) == FAILURE
    assert job.first_failure() == FAILURE


def test_without_the_secret_nobody_is_believed(store, monkeypatch):
    monkeypatch.setenv("POLYPHASE_JOB_SECRET", "another")
    JobStore(store, 1, 2).write(FIRST_FAILURE, FAILURE)
    monkeypatch.setenv("POLYPHASE_JOB_SECRET", "ours")
    assert JobStore(store, 0, 2).first_failure() is None


def test_words_are_read_in_one_exchange_and_only_those_in_order(job):
    job.write("a", {"x": 1})
    job.store.set("b", "garbage")
    assert job.read_all(["a", "b", "c"], {"x": int}) == {"a": {"x": 1}}


def test_peers_do_not_take_garbage_for_ranks(job):
    peers = RankRegistry("0", job)
    job.store.set("polyphase/process/1", "garbage")
    job.store.set("polyphase/watch/0/beat/1", "garbage")
    place = {"step": 0, "batch": 0, "evaluated": 0, "phase": "train", "pending": None, "line": None}
    peers.beat({**place, "units": None, "is_debugged": False, "resume_from": None})
    assert peers.absent == [1]
    assert peers.beats() == {}
    assert peers.ended_ranks() == []


class Counted(_StoreLine):
    """Counts its calls."""

    num_calls = 0

    def ask(self, method, *arguments):
        self.num_calls += 1
        return super().ask(method, *arguments)


def test_a_rank_that_meets_many_others_asks_for_a_few_at_a_time(store):
    job = JobStore(store, 0, 200)
    job.line, job.clone = Counted(store), lambda: job
    peers = RankRegistry("0", job)
    place = {"step": 0, "batch": 0, "evaluated": 0, "phase": "setup", "pending": None, "line": None}
    place |= {"units": None, "is_debugged": False, "resume_from": None}

    def num_calls(look):
        before = job.line.num_calls
        look()
        return job.line.num_calls - before

    for number in range(70):
        come = range(1, min(5 * number + 1, 199))
        for rank in come[-5:]:
            job.write(_process_key(rank), peers.me)
            job.write(f"polyphase/watch/0/beat/{rank}", {"number": 1, **peers.me, **place})
        assert num_calls(lambda: peers.beat(place)) <= 12
    assert peers.absent == [199]
    job.write(_process_key(199), peers.me)
    job.write("polyphase/watch/0/beat/199", {"number": 1, **peers.me, **place})
    assert num_calls(lambda: peers.beat(place)) <= 12
    assert peers.absent == []
    assert num_calls(lambda: peers.beat(place)) == 1
    assert num_calls(peers.beats) == 2
    assert len(peers.last) == 199


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=8), st.integers(0, 10**6))
def test_a_changed_word_is_not_opened(content, change, at):
    message = signed("here", content)
    assert verified("here", message) == content
    at %= len(message)
    changed = message[:at] + change + message[at + len(change) :]
    assert changed == message or verified("here", changed) is None


def test_a_signature_is_of_one_key_and_one_secret(monkeypatch):
    monkeypatch.setenv("POLYPHASE_JOB_SECRET", "ours")
    message = signed("here", b"content")
    assert verified("here", message) == b"content"
    assert verified("there", message) is None
    monkeypatch.setenv("POLYPHASE_JOB_SECRET", "theirs")
    assert verified("here", message) is None


@given(st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda each: st.lists(each, max_size=3)))
def test_only_objects_with_the_fields_are_words(value):
    assert parsed(json.dumps(value).encode(), {"rank": int}, 2) is None
    assert parsed(json.dumps({"rank": 1, "more": value}).encode(), {"rank": int}, 2) == {"rank": 1, "more": value}


def test_texts_that_ranks_agree_on_are_signed(store, caplog):
    ours, theirs = SignedStore(store, 0), SignedStore(store, 1)
    store.set("requested", "1")
    assert not ours.check(["requested"])
    assert not ours.check(["requested", "absent"])
    assert caplog.text.count("no rank of this job has written it") == 1
    theirs.set("requested", "1")
    assert ours.check(["requested"])
    assert ours.get("requested") == b"1"


def test_the_port_by_which_others_see_that_a_process_lives_reads_nothing(monkeypatch):
    monkeypatch.setattr(job_store, "_servers", {})
    assert own_port("127.0.0.1") == 0  # ranks of one machine have none
    address = "localhost"
    port = own_port(address)
    assert port
    with socket.create_connection((address, port), 5) as connection:
        assert probe(address, port) is ProcessState.LIVES
        connection.sendall(b"x" * 1000)
        accept_probes()
        connection.settimeout(5)
        with suppress(ConnectionResetError):  # what it had not read is refused
            assert connection.recv(1) == b""
    assert own_port(address) == port
    for server in job_store._servers.values():
        server.close()
