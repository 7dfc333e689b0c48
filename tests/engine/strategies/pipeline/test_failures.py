"""An error of the user's step says whose it is, where, and with what the step ran."""

import re

import pytest
import torch
from torch import nn

from polyphase.engine.strategies.callers import CutError
from polyphase.engine.strategies.pipeline.stage_module import describe_failure


def own():
    assert torch.ones(2).sum() == 3


def library():
    nn.functional.multi_head_attention_forward(
        *[torch.ones(1, 1, 3)] * 3, 4, 2, None, None, None, None, False, 0.0, None, None
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            own,
            r'(?s)stage 1 failed: AssertionError.*, .*test_failures.py:\d+ in own: "assert .* == 3". .* a few samples',
        ),
        (library, r'AssertionError: was expecting .*, .* in library: ".*", raised by .*functional.py:\d+ in multi'),
    ],
)
def test_it_names_the_place(step, message):
    with pytest.raises(AssertionError) as caught:
        step()
    assert re.search(message, describe_failure(caught.value, 1, "a few samples"))


def test_a_gradient_within_the_step_is_refused_by_name():
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(torch.ones(2, requires_grad=True).sum(), torch.ones(2, requires_grad=True))
    said = describe_failure(caught.value, 1, "")
    assert re.search(r'stage 1 failed: .*test_failures.py:\d+ in .*"torch.autograd.grad.*create_graph=True.*fsdp', said)


def test_what_can_not_be_cut_says_all_itself():
    assert describe_failure(CutError("why"), 0, "") == "pipeline stage 0 failed: why"
