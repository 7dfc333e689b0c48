import pytest
import torch

from polyphase.callbacks._counts import count_tokens


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
