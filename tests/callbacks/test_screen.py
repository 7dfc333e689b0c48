import io
import os
import sys
import time

import pytest
from rich.console import Console

from polyphase.callbacks._screen import _REDRAW_S, BottomLines, PlainOutput, WholeLines, can_draw, screen_of
from tests.terminal import Window, on_window


@pytest.fixture
def window():
    window = Window(40, 10)
    yield window
    window.close()


@pytest.fixture
def lines(window):
    lines = BottomLines(window.file)
    yield lines
    lines.clear()
    lines.release()


def bar():
    return ["[bar]", "metrics"]


@on_window
def test_lines_of_others_are_whole_and_above_the_bar(window, lines):
    print("before")
    lines.show(bar)
    os.write(window.slave, b"a library's line\n")  # not through Python's streams
    lines.show(bar)
    for i in range(20):  # more than the window has rows
        print("print", i, end="!\n")
    assert window.look() == ["before", "a library's line", *(f"print {i}!" for i in range(20)), "", *bar()]
    lines.keep(["[done]"])
    print("after")
    assert window.look()[-3:] == ["print 19!", "[done]", "after"]
    lines.release()
    assert "write" not in vars(window.file)


@on_window
def test_lines_erase_a_bar_that_another_process_has_drawn(window, lines):
    bars_of_rank_0 = "\n[bar]\nmetrics\x1b[2A\r"
    lines.guard(is_drawn_here=False)
    for text in ("one\ntwo\nthree\n", "a longer line than the bar\n"):
        os.write(window.slave, bars_of_rank_0.encode())
        print("in ", end="")
        print(text, end="")
    assert window.look() == ["in one", "two", "three", "in a longer line than the bar"]


@on_window
def test_the_bar_comes_back_by_itself(window, lines):
    drawn = []
    lines.show(lambda: [f"[bar {len(drawn)}]", *(drawn.append(0) or ())])
    os.write(window.slave, b"\r\x1b[Jerased by another rank\n")
    assert window.look() == ["erased by another rank"]
    time.sleep(1.5 * _REDRAW_S)
    assert window.look() == ["erased by another rank", "", "[bar 1]"]


@on_window
def test_without_a_bar_all_is_passed_on_as_it_comes(window, lines):
    lines.guard()
    print("half", end="", flush=True)
    assert window.look() == ["half"]
    print(", whole")
    lines.show(bar)
    lines.clear()
    print("50 %", end="\r", flush=True)
    print("99 %", end="", flush=True)
    assert window.look() == ["half, whole", "99 %"]


@on_window
def test_half_a_line_waits_for_its_end(window, lines):
    lines.show(bar)
    print("half", end="", flush=True)
    assert window.look() == ["", *bar()]
    print(" whole")
    print("rest", end="")
    assert window.look() == ["half whole", "", *bar()]
    lines.keep(["[done]"])
    lines.release()
    assert window.look() == ["half whole", "[done]", "rest"]


@on_window
def test_a_forked_process_prints_whole_lines_and_no_bar(window, lines):
    lines.show(bar)
    print("parent's half", end="")
    process = os.fork()
    if not process:
        print("child")
        print("child's half ", end="")
        print("and the rest")
        os._exit(0)
    os.waitpid(process, 0)
    assert window.look() == ["child", "child's half and the rest"]
    lines.show(bar)
    assert window.look() == ["child", "child's half and the rest", "", *bar()]


def test_a_terminal_that_was_closed_ends_nothing():
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as file:
        lines = BottomLines(file)
        os.close(master)
        lines.show(bar)
        lines.keep(bar())


@on_window
def test_streams_that_others_have_wrapped_stay_wrapped(window):
    seen = []
    plain = window.file.write

    def others(text):
        seen.append(text)
        return plain(text)

    window.file.write = others
    first = WholeLines()
    first.guard(terminals_only=True)
    print("1")
    first.release()
    assert window.file.write is others
    second = WholeLines()
    second.guard(terminals_only=True)
    guarding = window.file.write
    window.file.write = lambda text: guarding(text)
    second.release()
    print("2")
    assert seen == ["1\n", "2", "\n"], "passed on as it came"
    assert window.look() == ["1", "2"]


def test_a_file_gets_the_rows_that_stay():
    file = io.StringIO()
    output = PlainOutput(file)
    output.show(bar)
    output.clear()
    output.keep(["[done]"])
    assert file.getvalue() == "[done]\n"


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}, {"TERM": "xterm"}], ids=str)
@on_window
def test_a_bar_is_drawn_where_there_are_escape_codes(window, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    is_drawn = environment["TERM"] == "xterm"
    assert can_draw() == is_drawn
    assert isinstance(screen_of(Console()), BottomLines if is_drawn else PlainOutput)


def test_a_wish_for_colours_is_no_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert not can_draw()
    assert isinstance(screen_of(Console()), PlainOutput)
