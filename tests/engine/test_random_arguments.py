"""Arguments with random typos, and of random types: each is accepted, or refused by name, before anything is built."""

import datetime
import random
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from polyphase.engine import Engine
from polyphase.engine.compression import COMM_HOOKS
from polyphase.engine.config import EngineConfig, types_of
from polyphase.engine.errors import RefusedError
from polyphase.engine.precision import PRECISIONS
from polyphase.engine.strategies import STRATEGIES

from ..pairs import nightly
from .tiny import QUIET, engine

# --- single typos


def typo(word: str, chance: random.Random) -> str:
    """`word` with one character lost, doubled or another one put in, in the place of one, or two in the other's."""
    at = chance.randrange(len(word))
    letter = chance.choice("abcdefghijklmnopqrstuvwxyz")
    match chance.randrange(4):
        case 0:
            return word[:at] + word[at + 1 :]
        case 1:
            return word[:at] + letter + word[at:]
        case 2:
            return word[:at] + word[at : at + 2][::-1] + word[at + 2 :]
        case _:
            return word[:at] + letter + word[at + 1 :]


SUFFIXES = ("", "_spawn", "_fork", "_notebook")
CLOSED = {
    "strategy": [name + suffix for name, row in STRATEGIES.items() for suffix in SUFFIXES if row.make or not suffix],
    "compression": list(COMM_HOOKS),
    "precision": list(PRECISIONS),
    "accelerator": ["auto", "cuda"],
    **{
        name: [text for text in typing.get_args(types_of(EngineConfig)[name]) if isinstance(text, str)]
        for name in ("uneven", "nonfinite")
    },
    "compile": ["default", "reduce-overhead", "max-autotune"],
    "profiler": ["simple", "advanced", "pytorch"],
    "gradient_clip_algorithm": ["norm", "value"],
    "deterministic": ["warn"],
    "devices": ["auto"],
    "micro_batch_size": ["auto"],
}
SAID = {"accelerator": "accelerator name", "precision": "Precision"}


def typos(number: int) -> Iterator[tuple[dict[str, Any], str, str]]:
    """As many flags with one typo each, the argument that the message is to name, and what was meant."""
    chance = random.Random(16)
    names = [name for name in types_of(EngineConfig) if len(name) >= 4]
    values = [(name, word) for name, words in CLOSED.items() for word in words if len(word) >= 4]
    right = {*names, *(word for _, word in values), *STRATEGIES, *COMM_HOOKS}
    while number:
        name, word = chance.choice(values) if number % 2 else (chance.choice(names), "")
        wrong = typo(word or name, chance)
        if wrong.lower() in right or not wrong.isascii() or wrong.isdigit():
            continue
        number -= 1
        yield ({name: wrong}, name, word) if word else ({wrong: None}, wrong, name)


@pytest.mark.parametrize("total", [200, *nightly(1000)])
def test_single_typos_are_nearly_all_answered_with_what_was_meant(total):
    answered, missed = 0, []
    for flags, said, meant in typos(total):
        with pytest.raises((TypeError, ValueError)) as refused:
            engine(**{"devices": 2, **flags})
        message = str(refused.value)
        assert len(message.splitlines()) <= 3, message
        assert SAID.get(said, said) in message, message
        answered += meant in message
        missed += [] if meant in message else [(flags, message)]
    assert answered >= 0.95 * total, missed[:5]
    print(f"{answered} of {total} messages contain what was meant; not: {missed[:5]}")


# --- values of any type


def anything(chance: random.Random) -> Any:
    kinds = (
        lambda: chance.choice([None, True, False, ..., NotImplemented, object(), print, Engine, typing, int]),
        lambda: chance.randint(-5, 5),
        lambda: chance.choice([10**30, -(10**400), 2**31]),
        lambda: chance.choice([float("nan"), float("inf"), -0.0, 0.5, -1.5, 1e308, 3 + 1j]),
        lambda: "".join(chance.choices("abyzAZ019:,=+-_. \n\0é", k=chance.randint(0, 12))),
        lambda: chance.choice(["auto", "ddp:", "ddp:x=1", "1,2", "-1,", "1:2:3:4", "999999999999:00:00:00", "none"]),
        lambda: b"bytes",
        lambda: [anything(chance) for _ in range(chance.randint(0, 3))],
        lambda: tuple(anything(chance) for _ in range(chance.randint(0, 3))),
        lambda: {chance.choice(["hours", "x", 3]): anything(chance)},
        lambda: {1, 2},
        lambda: chance.choice([np.zeros(3), np.float32(2), np.int8(-3), torch.zeros(2, 2), torch.tensor(1)]),
        lambda: chance.choice([datetime.timedelta(days=-1), datetime.timedelta(0), Path("x"), range(3), iter(())]),
        lambda: chance.choice([Callback(), CPUAccelerator(), CSVLogger("."), DoublePrecision(), Callback]),
    )
    return chance.choice(kinds)()


@pytest.mark.filterwarnings("ignore")
def test_values_of_any_type_are_accepted_or_refused_by_name():
    chance = random.Random(17)
    names = list(types_of(EngineConfig))
    num_refused, strange = 0, []
    for index in range(700):
        name = names[index % len(names)]
        flags = {**QUIET, "devices": 1, name: anything(chance)}
        if name == "micro_batch_size":
            flags["global_batch_size"] = 8
        try:
            Engine(**flags)
        except (RefusedError, MisconfigurationException) as refused:
            num_refused += 1
            if not re.search(name.split("_")[0], str(refused), re.IGNORECASE):
                strange.append((name, flags[name], refused))
        except Exception as internal:
            strange.append((name, flags[name], repr(internal)))
    assert not strange, strange[:10]
    print(f"{num_refused} of 700 values were refused by name, the others accepted")
