"""A report says what its rank waits for: a declared wait, or one that its exception was raised in."""

import threading

from polyphase.engine import Engine
from polyphase.engine.distributed.waits import waiting


def _heartbeat():
    heartbeat = Engine(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False).heartbeat
    heartbeat.begin()
    return heartbeat


def test_a_declared_wait_is_in_the_report_of_another_thread_while_it_lasts():
    heartbeat, reports = _heartbeat(), []
    watchdog = threading.Thread(target=lambda: reports.append(heartbeat.report()))
    with waiting("the save in flight"):
        watchdog.start()
        watchdog.join()
    reports.append(heartbeat.report())
    assert [report["pending"] for report in reports] == ["the save in flight", None]


def test_the_report_of_an_exception_has_the_wait_that_it_was_raised_in():
    heartbeat, pending = _heartbeat(), []
    for what in ("a call to another rank", None):
        try:
            if what is None:
                raise RuntimeError("of this rank's own")
            with waiting(what):
                raise RuntimeError("no answer")
        except RuntimeError as error:
            pending.append(heartbeat.report(exception=error)["pending"])
    assert pending == ["a call to another rank", None]
