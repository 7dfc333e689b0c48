"""Hundreds of single typos in flags: each is told with the word that was meant (values: `test_random_arguments.py`)."""

import random
import string

import pytest

from polyphase.engine.cli.runs import RUNS, check_names, flags_of
from polyphase.engine.config import EngineConfig
from tests.pairs import nightly

LETTERS = string.ascii_lowercase + string.digits + "_"
LEAST_SHARE = 0.95


def typo(word: str, rng: random.Random) -> str:
    """`word` with one character deleted, inserted, replaced, or exchanged with the next."""
    at = rng.randrange(len(word))
    kind = rng.choice(["delete", "insert", "replace", "exchange"])
    if kind == "delete":
        return word[:at] + word[at + 1 :]
    if kind == "insert":
        return word[:at] + rng.choice(LETTERS) + word[at:]
    if kind == "replace":
        return word[:at] + rng.choice(LETTERS) + word[at + 1 :]
    at = min(at, len(word) - 2)
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def command_line(rng: random.Random) -> tuple[str, str, str]:
    """A command, a flag with one typo, and the word that was meant."""
    command = rng.choice(list(RUNS))
    name = rng.choice([name for name in flags_of(command) if len(name) >= 4 and "." not in name])
    prefix = rng.choice(["", "trainer."]) if name in EngineConfig.__dataclass_fields__ else ""
    return command, f"--{prefix}{typo(name, rng)}", name


@pytest.mark.parametrize("num_typos", [300, *nightly(1000)])
def test_a_typo_is_told_in_three_lines_with_the_closest_match(num_typos):
    rng = random.Random(0)
    hits = told = 0
    missed = []
    while told < num_typos:
        command, flag, meant = command_line(rng)
        try:
            check_names(command, ["--model", "ByteGPT", flag, "1"])
        except ValueError as error:
            message = str(error)
        else:
            continue  # still a word of the language: a flag of another command
        told += 1
        assert len(message.splitlines()) <= 3, message
        assert flag in message, message
        question = message.partition("Did you mean ")[2].partition("?")[0].strip("'").removeprefix("--")
        good = question.removeprefix("trainer.") == meant
        hits += good
        missed += [] if good else [(flag, meant, message)]
    assert hits / told >= LEAST_SHARE, f"{hits} of {told}: {missed[:20]}"
    print(f"{hits} of {told} typos are told with the word that was meant")


@pytest.mark.parametrize("word", ["strategy", "max_epochs", "fsdp"])
def test_typos_are_one_edit_away(word):
    rng = random.Random(1)
    for _ in range(100):
        assert abs(len(typo(word, rng)) - len(word)) <= 1
