"""Hundreds of single typos in flags and in values of closed sets: each is told with the word that was meant."""

import random
import string

import pytest

from polyphase.engine.cli.check import COMMANDS, ENGINE_FLAGS, UsageError, check, flags_of
from polyphase.engine.compression.registry import ROWS
from polyphase.engine.flags import LAUNCHERS
from polyphase.engine.precision import PRECISIONS
from polyphase.engine.strategies.registry import STRATEGIES
from tests.pairs import nightly

LETTERS = string.ascii_lowercase + string.digits + "_"
LEAST_SHARE = 0.95
VALUES = {
    "strategy": [n + (s and f"_{s}") for n, row in STRATEGIES.items() for s in LAUNCHERS if row.make or not s],
    "precision": list(PRECISIONS),
    "compression": list(ROWS),
    "model": ["ByteGPT", "DigitsClassifier"],
    "data": ["Digits", "PythonSource"],
} | {flag.name: list(flag.choices) for flag in flags_of("fit") if flag.choices}


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


def command_line(rng: random.Random) -> tuple[str, list[str], str, str]:
    """A command, its words with one typo, the flag that the message is to name, and the word that was meant."""
    command = rng.choice(list(COMMANDS))
    model = ["--model", "ByteGPT"]
    if rng.random() < 0.6:
        name = rng.choice([flag.name for flag in flags_of(command) if len(flag.name) >= 4 and "." not in flag.name])
        prefix = rng.choice(["", "trainer."]) if any(name == flag.name for flag in ENGINE_FLAGS) else ""
        wrong = f"--{prefix}{typo(name, rng)}"
        return command, [*model, wrong, "1"], wrong, name
    flag = rng.choice(list(VALUES))
    value = rng.choice([value for value in VALUES[flag] if len(value) >= 4] or ["auto"])
    return command, [*(model if flag != "model" else []), f"--{flag}", typo(value, rng)], f"--{flag}", value


@pytest.mark.parametrize("num_typos", [300, *nightly(1000)])
def test_a_typo_is_told_in_three_lines_with_the_closest_match(num_typos):
    rng = random.Random(0)
    hits = told = 0
    missed = []
    while told < num_typos:
        command, words, flag, meant = command_line(rng)
        try:
            check(command, words)
        except UsageError as error:
            message = str(error)
        else:
            continue  # still a word of the language: fsdp for hsdp, 64-true for 16-true
        told += 1
        assert len(message.splitlines()) <= 3, message
        assert flag in message, message
        question = message.partition("Did you mean ")[2].partition("?")[0].strip("'").removeprefix("--")
        good = question.removeprefix("trainer.") == meant
        hits += good
        missed += [] if good else [(words, meant, message)]
    assert hits / told >= LEAST_SHARE, f"{hits} of {told}: {missed[:20]}"
    print(f"{hits} of {told} typos are told with the word that was meant")


@pytest.mark.parametrize("word", ["strategy", "max_epochs", "fsdp"])
def test_typos_are_one_edit_away(word):
    rng = random.Random(1)
    for _ in range(100):
        assert abs(len(typo(word, rng)) - len(word)) <= 1
