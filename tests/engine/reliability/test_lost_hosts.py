"""What a rank says of the failure that it stops because of."""

import pytest

from polyphase.engine.reliability.report import HOST_LOST, because

FAILURE = {"rank": 2, "by": 0, "kind": "silent", "message": "no heartbeat for 31 s"}


@pytest.mark.parametrize(
    ("rank", "change", "reason"),
    [
        (1, {}, "rank 2 failed first: no heartbeat for 31 s"),
        (2, {}, "rank 0 reports its failure: no heartbeat for 31 s"),
        (2, {"by": 2}, "no heartbeat for 31 s"),
        (2, {"kind": HOST_LOST}, "no heartbeat for 31 s"),
    ],
)
def test_the_reason_names_the_rank_that_failed_unless_it_is_this_one(rank, change, reason):
    assert because(FAILURE | change, rank) == reason
