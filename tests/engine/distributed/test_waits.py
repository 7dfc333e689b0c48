"""A thread's declared waits are read by other threads, and stay with an exception that was raised in one."""

import threading

import pytest

from polyphase.engine.distributed.waits import current_wait, wait_that_raised, waiting


def test_another_thread_reads_the_innermost_wait_and_none_once_it_is_over():
    begun, may_end = threading.Event(), threading.Event()

    def wait():
        with waiting("outer"):
            with waiting("inner"):
                begun.set()
                may_end.wait(10)
            seen.append(current_wait(threading.get_ident()))

    seen = []
    thread = threading.Thread(target=wait)
    thread.start()
    assert begun.wait(10)
    seen.append(current_wait(thread.ident))
    assert current_wait(threading.get_ident()) is None
    may_end.set()
    thread.join()
    assert seen == ["inner", "outer"]
    assert current_wait(thread.ident) is None


def test_an_exception_keeps_the_innermost_wait_that_it_was_raised_in():
    with pytest.raises(ValueError, match="late") as caught, waiting("outer"), waiting("inner"):
        raise ValueError("late")
    assert wait_that_raised(caught.value) == "inner"
    assert current_wait(threading.get_ident()) is None


def test_an_exception_outside_of_waits_has_none():
    with waiting("a save"):
        pass
    assert wait_that_raised(ValueError("early")) is None


def test_a_thread_that_never_waited_has_none():
    assert current_wait(-1) is None
