"""Each word of another tool is answered with the flag of the engine, in Python and in the command."""

import inspect
import re

import pytest

from polyphase.engine import Engine
from polyphase.engine.cli.runs import check_names, flags_of
from polyphase.engine.flags import ARGUMENTS, VALUES, as_flag
from polyphase.engine.select import check_strategy

WORDS = {word: target for words in ARGUMENTS.values() for word, target in words.items()}
RUN = ["--model", "DigitsClassifier", "--data", "Digits"]


def test_no_word_stands_twice_or_is_a_flag_itself():
    assert len(WORDS) == sum(map(len, ARGUMENTS.values()))
    assert not WORDS.keys() & inspect.signature(Engine).parameters.keys()


@pytest.mark.parametrize("word", WORDS)
def test_an_argument_of_another_tool_is_answered_with_ours(word):
    target = WORDS[word]
    with pytest.raises(TypeError, match=re.escape(f"{word!r}. Did you mean ")) as refused:
        Engine(**{word: 1})
    assert target in str(refused.value)
    for written in (f"--{word}", f"--trainer.{word}", f"--{word.replace('_', '-')}"):
        with pytest.raises(ValueError, match=re.escape(f"fit has no flag {written}. Did you mean {as_flag(target)}?")):
            check_names("fit", [*RUN, written, "1"])


@pytest.mark.parametrize("word", WORDS)
def test_what_it_is_answered_with_is_right(word):
    flag = as_flag(WORDS[word])
    assert re.match(r"--|DataLoader\(|logger=|configure_optimizers\(\) |fit\(", flag)
    if flag.startswith("--") and (" " in flag or "=" in flag):
        check_names("fit", [*RUN, *flag.split()])
    elif flag.startswith("--"):
        assert flag.removeprefix("--") in flags_of("fit")


@pytest.mark.parametrize(("flag", "word"), [(flag, word) for flag, words in VALUES.items() for word in words])
def test_a_value_of_another_tool_is_answered_with_ours(flag, word):
    ours = VALUES[flag][word]
    with pytest.raises(ValueError, match=re.escape(f"Did you mean {ours!r}?")):
        Engine(**{flag: word}, accelerator="cpu", logger=False)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("zero3_fork", "fsdp_fork"),
        ("ZeRO2_spawn", "fsdp_spawn:reshard_after_forward=false"),
        ("zero_notebook", "zero1_notebook"),
    ],
)
def test_the_word_of_another_tool_keeps_its_launcher(word, ours):
    check_strategy(ours)
    with pytest.raises(ValueError, match=re.escape(f"Did you mean {ours!r}?")):
        Engine(strategy=word, accelerator="cpu", logger=False)
