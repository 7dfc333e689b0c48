"""What a checkpoint says, made to fit the run that opens it."""

from typing import Any

import pytest

from polyphase.engine.resume.run_state import _matching_accumulation, _with_samples, to_last_step


def ours(world_size: int, per_rank: int, asked: int) -> dict[str, Any]:
    return {"world_size": world_size, "accumulate_grad_batches": per_rank, "accumulation_asked": asked, "layout": {}}


@pytest.mark.parametrize(
    ("saved", "asked", "world_size", "matching"),
    [
        (ours(4, 1, 1), 1, 4, 1),
        (ours(4, 1, 1), 1, 2, 2),  # fewer go on
        (ours(2, 2, 1), 1, 2, 2),  # and die once more, still fewer
        (ours(2, 2, 1), 1, 1, 4),
        (ours(2, 2, 1), 1, 4, 1),  # the others are back
        (ours(2, 3, 3), 3, 6, 1),
        (ours(2, 2, 1), 4, 2, 4),  # the user wants another now
        (ours(2, 4, 4), 1, 1, 1),
    ],
)
def test_the_global_batch_stays_unless_the_flag_is_another(saved, asked, world_size, matching):
    assert _matching_accumulation(asked, world_size, saved) == matching


def test_a_global_batch_that_can_not_be_kept_is_said():
    with pytest.warns(UserWarning, match="no accumulation gives the same global batch: 4 micro-batches .* then, 3 now"):
        assert _matching_accumulation(1, 3, ours(4, 1, 1)) == 1


@pytest.mark.parametrize(
    ("layout", "world_size", "ranks"),
    [
        ({}, 1, [0]),
        ({"replicate": 2, "shard": 2}, 4, [0, 1, 2, 3]),
        ({"shard": 2, "tp": 2}, 4, [0, 2]),
        ({"pp": 2, "replicate": 2}, 4, [0, 1]),
        ({"pp": 2, "replicate": 2, "tp": 2}, 8, [0, 2]),
    ],
)
def test_of_ranks_that_share_samples_the_first_speaks(layout, world_size, ranks):
    assert list(_with_samples({"layout": layout, "world_size": world_size})) == ranks


def test_ranks_that_share_samples_count_once():
    saved = {**ours(4, 2, 2), "layout": {"shard": 2, "tp": 2}}
    assert _matching_accumulation(2, 4, saved) == 1
    assert _matching_accumulation(2, 1, saved) == 4


@pytest.mark.parametrize("failed", [True, False])
def test_half_a_validation_is_done_again_and_a_batch_that_failed_was_tried(failed):
    def counts(tried: int, done: int) -> dict[str, int]:
        return {"ready": tried, "started": tried, "processed": done, "completed": done}

    batches = {"total": counts(8, 8), "current": counts(4, 4), "is_last_batch": True}
    validation = {"total": counts(6 + failed, 6), "current": counts(2 + failed, 2), "is_last_batch": False}
    loops = {"epoch_loop.batch_progress": batches, "epoch_loop.val_loop.batch_progress": validation}
    said = {"cut_short": False, "between_steps": True, "between_epochs": False, "batches": 4, "in_validation": True}
    assert to_last_step(loops, said) == "end"
    assert validation == {"total": counts(4 + failed, 4), "current": counts(0, 0), "is_last_batch": False}
