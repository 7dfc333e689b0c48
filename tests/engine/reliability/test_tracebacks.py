"""Tracebacks without the frames of libraries."""

import os
import traceback

import pytest
import torch

from polyphase.engine.flags import check_count
from polyphase.engine.reliability.tracebacks import shorten, shown

TORCH = os.path.dirname(torch.__file__)

TEXT = f"""\
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in main
    fit(module)
    ^^^^^^^^^^^
  File "{TORCH}/nn/modules/module.py", line 1, in _call
    return forward()
           ^^^^^^^^^
  File "{TORCH}/nn/modules/module.py", line 2, in forward
    return inner()
  File "/home/me/model.py", line 5, in forward
    self.layer(x)
  File "{TORCH}/nn/modules/linear.py", line 3, in forward
    return linear()
RuntimeError: shapes
  differ
"""


def test_frames_of_libraries_are_counted_but_for_the_innermost():
    assert (
        shorten(TEXT)
        == f"""\
Traceback (most recent call last):
  File "/home/me/train.py", line 9, in main
    fit(module)
  ... 2 frames of torch (POLYPHASE_TRACEBACK=full shows them)
  File "/home/me/model.py", line 5, in forward
    self.layer(x)
  File "{TORCH}/nn/modules/linear.py", line 3, in forward
    return linear()
RuntimeError: shapes
  differ
"""
    )
    assert shorten(TEXT, keeps_innermost=False, says_how=False).splitlines()[-3:] == [
        "  ... 1 frame of torch",
        "RuntimeError: shapes",
        "  differ",
    ]


def test_text_without_frames_stays_as_it_is():
    for text in (
        "",
        "\n",
        "ValueError: no\nFile of mine\n",
        '  File "x.py", line 3\n    x =\n      ^\nSyntaxError: no',
    ):
        assert shorten(text) == text


def test_all_tracebacks_in_a_text_are_shortened_a_workers_too():
    """As a DataLoader's worker hands over its own, within the message."""
    lines = shorten(
        f"{TEXT}\nDuring handling of the above exception, another exception occurred:\n\n{TEXT}"
    ).splitlines()
    assert [line for line in lines if "... " in line] == [
        "  ... 2 frames of torch (POLYPHASE_TRACEBACK=full shows them)",
        "  ... 2 frames of torch",
    ]


def recursive(depth: int) -> None:
    if depth == 0:
        raise KeyError("deep")
    recursive(depth - 1)


@pytest.mark.parametrize("wants", [None, "full"])
def test_of_an_exception(wants, monkeypatch):
    monkeypatch.setenv("POLYPHASE_TRACEBACK", wants or "")
    try:
        try:
            recursive(9)
        except KeyError as error:
            torch.zeros(2).softmax(5)
            raise ValueError("never") from error
    except IndexError as error:
        text, whole = shown(error), "".join(traceback.format_exception(error))
    assert text.splitlines()[-1] == whole.splitlines()[-1]
    assert "[Previous line repeated 6 more times]" in text
    assert "During handling of the above exception" in text
    assert text == (whole if wants else shorten(whole))


def test_where_the_engine_says_what_is_wrong_is_left_out():
    with pytest.raises(ValueError, match="steps") as refused:
        check_count("steps", 0)
    *_, count, message = shown(refused.value).splitlines()
    assert count == "  ... 1 frame of polyphase (POLYPHASE_TRACEBACK=full shows them)"
    assert message == "ValueError: steps must be a whole number of at least 1, but got 0."
