"""What a message may name, and where the parameter server listens."""

import io
import os
import pickle
import pickletools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.rpc import internal
from torch.futures import Future

from polyphase.engine.distributed.environment import bind_interface
from polyphase.engine.strategies.ps import server
from polyphase.engine.strategies.ps.object_gather import PendingGathers
from polyphase.engine.strategies.ps.rpc import Connection, _Unpickler, interface_of


class Names:
    """Pickles as a call of something else."""

    def __init__(self, *reduction: Any) -> None:
        self.reduction = reduction

    def __reduce__(self) -> Any:
        return self.reduction


def opened(content: bytes) -> Any:
    return _Unpickler(io.BytesIO(content)).load()


def test_calls_of_ours_are_opened():
    call = internal.PythonUDF(server.exchange, (0, 1, [torch.ones(2)], [True], [{"lr": 0.1}], None), {})
    content, tensors = internal.serialize(call)
    internal._thread_local_tensor_tables.recv_tables = tensors
    found = opened(content)
    assert found.func is server.exchange
    assert torch.equal(found.args[2][0], torch.ones(2))
    failure = opened(pickle.dumps(internal.RemoteException("no", KeyError)))
    assert failure.exception_type is KeyError


@pytest.mark.parametrize(
    "bad",
    [
        Names(os.system, ("echo",)),
        Names(eval, ("1",)),
        Names(exec, ("1",)),
        Names(torch.load, ("file",)),
        Names(internal._run_function, (None,)),
        internal.PythonUDF(os.getpid, (), {}),
    ],
    ids=lambda bad: getattr(getattr(bad, "reduction", (bad,))[0], "__name__", type(bad).__name__),
)
def test_nothing_else_is(bad):
    with pytest.raises(pickle.UnpicklingError, match="not among what ps may be asked for"):
        opened(pickle.dumps(bad))


def test_attributes_can_not_be_asked_for():
    content = pickle.dumps(Names(getattr, (internal._InternalRPCPickler, "serialize")))
    assert "getattr" in "".join(str(argument) for _, argument, _ in pickletools.genops(content))
    with pytest.raises(pickle.UnpicklingError, match="asks for 'serialize'"):
        opened(content)


def test_interfaces_by_address_network_and_name():
    loopback = interface_of("127.0.0.1")
    assert interface_of("127.0.0.0/8") == interface_of(loopback) == loopback
    for nonsense in ("203.0.113.7", "eth123", "here"):
        with pytest.raises(ValueError, match=rf"but got '{nonsense}'. This machine has .*127\.0\.0\.1"):
            interface_of(nonsense)


def test_the_environment_is_as_it_was_afterwards(monkeypatch):
    monkeypatch.delenv("TP_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with bind_interface(None):
        assert os.environ["TP_SOCKET_IFNAME"].startswith("lo")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        with bind_interface("eth8"):
            assert {os.environ[f"{kind}_SOCKET_IFNAME"] for kind in ("TP", "GLOO")} == {"eth8"}
    assert "TP_SOCKET_IFNAME" not in os.environ
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_who_does_not_answer_is_named():
    waits = SimpleNamespace(timeout_s=0.3)
    with pytest.raises(RuntimeError, match=r"rank 3 was asked for a sign, and has not answered in 0\.3 s"):
        Connection.wait(waits, {3: Future()}, "for a sign")
    failed: Future = Future()
    failed.set_exception(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match=r"rank 3 was asked for a sign, and could not answer: .*gone"):
        Connection.wait(waits, {3: failed}, "for a sign")


def test_gathers_end_when_all_have_contributed_or_are_lost():
    gathers = PendingGathers([0, 1, 2])
    answers = [gathers.contribute("a", rank, f"{rank}".encode()) for rank in (1, 0)]
    assert not answers[0].done()
    gathers.lose([2])
    assert [answer.value() for answer in answers] == [[b"0", b"1"]] * 2
    later = gathers.contribute("b", 1, b"1")
    assert not later.done()
    gathers.contribute("b", 0, b"0")
    assert later.value() == [b"0", b"1"]
