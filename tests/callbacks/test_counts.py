from dataclasses import dataclass
from typing import Any

import pytest
import torch

from polyphase.callbacks._counts import count_samples, count_tokens


@dataclass
class Pair:
    name: str
    x: Any


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(5, 2),
        [torch.ones(5), torch.ones(7)],
        ("a name", torch.ones(5)),
        {"ids": ["a"], "inner": {"x": torch.ones(5, 1)}},
        Pair("a", torch.ones(5)),
    ],
)
def test_samples_are_the_length_of_the_first_tensor(batch):
    assert count_samples(batch) == 5


def test_a_single_number_is_one_sample():
    assert count_samples(torch.tensor(3.0)) == 1


@pytest.mark.parametrize("batch", [{"a": "text"}, [], 3])
def test_a_batch_without_tensors_needs_a_function(batch):
    with pytest.raises(ValueError, match=rf"batch of type {type(batch).__name__}.*num_samples="):
        count_samples(batch)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        (torch.ones(2, 6, dtype=torch.int64), 12),
        ((torch.ones(2, 3), torch.ones(2, 6, dtype=torch.int32)), 12),
        ({"input_ids": torch.ones(2, 6, dtype=torch.int64), "attention_mask": torch.eye(2, 6)}, 2),
        ({"labels": torch.ones(2, dtype=torch.int64), "x": torch.ones(2, 6)}, None),
        (torch.ones(2, 3, 8, 8, dtype=torch.uint8), None),  # images
        ("text", None),
    ],
)
def test_tokens_are_the_mask_or_the_first_integer_matrix(batch, tokens):
    assert count_tokens(batch) == tokens


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float16])
def test_the_sum_of_a_mask_is_exact_and_stays_a_tensor(dtype):
    tokens = count_tokens({"attention_mask": torch.ones(3, 1001, dtype=dtype)})
    assert isinstance(tokens, torch.Tensor)
    assert tokens == 3003
