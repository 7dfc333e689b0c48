"""The old names of options become the new ones, with one warning; errors name the new ones."""

import dataclasses
import warnings

import pytest

from polyphase.engine.flags import parse_flag, parse_options, renamed
from polyphase.engine.old_names import current_spelling, warn_of_old_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RenamedOptions:
    num_pieces: int = renamed("pieces", default=2)
    size: int = 1


@pytest.fixture
def nothing_said():
    warn_of_old_name.cache_clear()
    yield
    warn_of_old_name.cache_clear()


def test_the_old_name_of_an_option_becomes_the_new_one_with_one_warning(nothing_said):
    message = "the option 'pieces' of strategy 'x' is now called 'num_pieces'. The old name works until"
    with pytest.warns(FutureWarning, match=message) as said:
        found = [current_spelling("strategy 'x'", "x:size=3, pieces=4", RenamedOptions) for _ in range(2)]
    assert found == ["x:size=3,num_pieces=4"] * 2
    assert len(said) == 1
    assert parse_options("x", RenamedOptions, parse_flag(found[0]).options) == RenamedOptions(num_pieces=4, size=3)


def test_other_ranks_do_not_say_so(nothing_said, monkeypatch):
    monkeypatch.setattr("lightning.fabric.utilities.rank_zero.rank_zero_only.rank", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert current_spelling("x", "x:pieces=4", RenamedOptions) == "x:num_pieces=4"


@pytest.mark.parametrize("text", ["x", "x:", "x:num_pieces=4,size=3", "x:pieces", "x:a=1,,b", "x:size=pieces"])
def test_a_flag_without_old_names_stays_as_it_is(text):
    assert current_spelling("x", text, RenamedOptions) == text


def test_both_names_at_once_are_an_error(nothing_said):
    with pytest.warns(FutureWarning):
        text = current_spelling("x", "x:pieces=4,num_pieces=2", RenamedOptions)
    with pytest.raises(ValueError, match="'num_pieces' stands twice in the flag"):
        parse_flag(text)


@pytest.mark.parametrize("key", ["peices", "num_piecse"])
def test_an_option_close_to_either_name_is_answered_with_the_new_one(key):
    message = rf"unknown option of x '{key}'\. Did you mean 'num_pieces'\? Allowed: num_pieces, size\."
    with pytest.raises(ValueError, match=message):
        parse_options("x", RenamedOptions, {key: "1"})
