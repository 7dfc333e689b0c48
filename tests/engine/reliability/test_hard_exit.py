"""A process that exits at once does so whatever its threads are in."""

import sys

from tests.distributed import run_command

BLOCKED = """
import os, sys, threading, time
from polyphase.engine.reliability.hard_exit import hard_exit

_, unread = os.pipe()
sys.stdout = open(unread, "w")
threading.Thread(target=lambda: print("-" * 1_000_000)).start()
time.sleep(0.5)
hard_exit()
"""


def test_what_was_printed_is_written():
    script = "from polyphase.engine.reliability.hard_exit import hard_exit; print('said', end=''); hard_exit()"
    finished = run_command([sys.executable, "-c", f"import sys; sys.stdout = open(1, 'w'); {script}"], timeout_s=60)
    assert finished == (1, "said")


def test_a_full_pipe_keeps_no_process():
    assert run_command([sys.executable, "-c", BLOCKED], timeout_s=60).returncode == 1
