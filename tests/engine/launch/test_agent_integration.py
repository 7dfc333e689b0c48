"""torchrun ends when the host of its rendezvous has gone silent, and takes its ranks along."""

import sys
import time

import psutil
import pytest

from polyphase.engine.launch.agent import _place
from tests.chaos.hosts import Hosts

LISTENS = """
import socket, time
server = socket.create_server(("{0}", 29400), backlog=64)
while True:
    server.accept()[0].close()
"""
WATCHES = """
import subprocess, sys
from polyphase.engine.launch.agent import _watch
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)  # a rank"])
_watch("{0}", 29400, longest_s=4.0)
"""


def wait_for(condition, timeout_s):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s
        time.sleep(0.1)


def test_a_rendezvous_that_has_gone_silent(tmp_path):
    with Hosts() as hosts:
        for host, script in enumerate((LISTENS, WATCHES)):
            words = [sys.executable, "-c", script.format(hosts.addresses[0])]
            hosts.start(host, words, tmp_path / f"log{host}.txt")
        wait_for(lambda: _is_a_rank_there(hosts), 60)
        time.sleep(5.5)  # longer than the host may be silent
        assert _is_a_rank_there(hosts)
        hosts.cut()
        wait_for(lambda: not hosts.processes(1), 40)
    said = (tmp_path / "log1.txt").read_text()
    assert f"the host of the rendezvous, {hosts.addresses[0]}:29400, has not answered for " in said
    assert "Start the job again once the host is back." in said


def _is_a_rank_there(hosts):
    return any(_is_a_rank(process) for process in hosts.processes(1))


def _is_a_rank(process):
    try:
        return process.cmdline()[-1].endswith("# a rank")
    except (psutil.NoSuchProcess, IndexError):
        return False


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [
        ("head:29500", ("head", 29500)),
        ("head", ("head", 29400)),
        ("[fd00::1]:29500", ("fd00::1", 29500)),
        ("localhost:0", None),
        ("127.0.0.1:29400", None),
        ("", None),
    ],
)
def test_where_the_rendezvous_is(endpoint, place):
    assert _place(endpoint) == place
