"""The table of strategies: the names that flags have, and those that they had."""

import pytest

from polyphase.engine import Engine
from polyphase.engine.old_names import warn_of_old_name
from polyphase.engine.run_info import run_parameters
from polyphase.engine.strategies.registry import check_strategy, current_strategy
from tests.engine.tiny import QUIET

OLD_NAMES = {
    "local_sgd:every=4": "local_sgd:sync_every=4",
    "diloco_fork:outer_lr=0.5,every=4": "diloco_fork:outer_lr=0.5,sync_every=4",
    "pp:stages=2": "pp:pipeline_size=2",
    "pp+ddp_spawn:schedule=interleaved,stages=2,chunks=3": (
        "pp+ddp_spawn:schedule=interleaved,pipeline_size=2,virtual_stages=3"
    ),
    "pp+fsdp:stages=2,shard=2": "pp+fsdp:pipeline_size=2,shard=2",
}
"""Flags as they were written, and as they are now."""


@pytest.fixture(autouse=True)
def _nothing_said():
    warn_of_old_name.cache_clear()
    yield
    warn_of_old_name.cache_clear()


@pytest.mark.parametrize(("old", "new"), OLD_NAMES.items())
def test_the_old_names_of_options_are_read_and_become_the_new_ones(old, new):
    with pytest.warns(FutureWarning, match="The old name works until polyphase"):
        assert current_strategy(old) == new
    check_strategy(old)  # has been said once
    check_strategy(new)


@pytest.mark.parametrize(
    "text", ["ddp", "auto", "no_such:every=2", "ddp_find_unused_parameters_true", "ps:staleness=2"]
)
def test_all_other_flags_stay_as_they_are(text):
    assert current_strategy(text) == text


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("pp:stage=2", "pipeline_size"),
        ("pp:chunk=2", "virtual_stages"),
        ("pp:virtual_stage=2", "virtual_stages"),
        ("local_sgd:evry=2", "sync_every"),
    ],
)
def test_an_option_close_to_an_old_name_is_answered_with_the_new_one(flag, near):
    with pytest.raises(ValueError, match=f"Did you mean '{near}'"):
        check_strategy(flag)


def test_a_run_records_the_new_name(tmp_path):
    with pytest.warns(FutureWarning, match="'every' of strategy 'local_sgd' is now called 'sync_every'") as said:
        engine = Engine(strategy="local_sgd_fork:every=2", devices=2, **QUIET)
    assert len(said) == 1
    assert run_parameters(engine)["polyphase/strategy"] == "local_sgd_fork:sync_every=2"
