"""What Python prints of an exception that has ended a run and that nobody catches."""

import pickle
import sys

import pytest

from polyphase.engine.reliability.tracebacks import Failure, failure_of, forget_failures, on_uncaught


@pytest.fixture
def hook(monkeypatch):
    """Python's own, whatever the tests' runner has put there; and again after the test."""
    forget_failures()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    yield
    forget_failures()


def raised(kind=ValueError) -> Exception:
    try:
        raise kind("mine")
    except kind as error:
        return error


def uncaught(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def test_said_once(hook, capsys):
    error = raised()
    on_uncaught(error, Failure(is_printed=True))
    on_uncaught(error, Failure())  # what was said first holds
    assert failure_of(error) == Failure(is_printed=True)
    uncaught(error)
    assert capsys.readouterr().err == ""
    assert sys.excepthook is sys.__excepthook__


def test_first_what_there_is_to_say_then_the_traceback(hook, capsys):
    error = raised()
    on_uncaught(error, Failure(print_details=lambda: print("the report", file=sys.stderr)))
    uncaught(error)
    first, second, *_, last = capsys.readouterr().err.splitlines()
    assert (first, second, last) == ("the report", "Traceback (most recent call last):", "ValueError: mine")


def test_other_exceptions_are_python_s_but_for_those_raised_from_one(hook, capsys):
    said = []
    error = raised()
    on_uncaught(error, Failure(print_details=lambda: said.append("report")))
    uncaught(raised(KeyError))
    assert not said
    on_uncaught(error, Failure())
    other = raised(RuntimeError)
    other.__cause__ = error
    uncaught(other)
    assert said
    assert capsys.readouterr().err.splitlines()[-1] == "RuntimeError: mine"


def test_a_hook_of_the_users_is_called(hook, capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
    error = raised()
    on_uncaught(error, Failure(is_printed=True))
    uncaught(error)
    assert seen == [(ValueError, error, error.__traceback__)]


def test_the_next_run_puts_the_hook_back(hook):
    on_uncaught(raised(), Failure())
    assert sys.excepthook is not sys.__excepthook__
    forget_failures()
    assert sys.excepthook is sys.__excepthook__


def test_an_exception_that_takes_no_attributes_is_left_alone(hook, capsys):
    class ClosedError(Exception):
        def __setattr__(self, name, value):
            raise AttributeError(name)

    error = raised(ClosedError)
    on_uncaught(error, Failure(is_printed=True))
    uncaught(error)
    assert capsys.readouterr().err.endswith("ClosedError: mine\n")


def test_what_is_noted_goes_through_pickle():
    error = raised()
    on_uncaught(error, Failure(is_printed=True))
    forget_failures()
    assert failure_of(pickle.loads(pickle.dumps(error))) == Failure(is_printed=True)  # noqa: S301 - our own
