"""Packed sequences are trained on as if each were alone: token by token, in loss and gradients."""

import copy

import pytest
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from polyphase.engine.data import LengthBucketing, PackSequences, block_diagonal_mask, cu_seqlens
from polyphase.models import ByteGPT

from ..tiny import engine

LENGTHS = [7, 3, 12, 1, 5, 9, 2, 4]


def samples(lengths=LENGTHS):
    """Dicts as tokenised data sets have them; of every third, a prompt of two tokens is not to be learned."""
    torch.manual_seed(0)
    found = [{"input_ids": torch.randint(256, (length,)).tolist()} for length in lengths]
    for sample in found[::3]:
        sample |= {"labels": [-100] * 2 + sample["input_ids"][2:], "attention_mask": [1] * len(sample["input_ids"])}
        sample["labels"] = sample["labels"][: len(sample["input_ids"])]
    return found


def model():
    torch.manual_seed(1)
    return ByteGPT(num_layers=2, num_heads=2, dim=16, context_length=16).double()


def one_by_one(net, some):
    """Mean over the predicted tokens of sequences that each go through the net alone."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in some:
        labels = torch.tensor(sample.get("labels", sample["input_ids"]))[1:]
        if (labels >= 0).any():
            logits = net(torch.tensor([sample["input_ids"]]))[0, :-1]
            total = total + functional.cross_entropy(logits, labels, reduction="sum")
        count += int((labels >= 0).sum())
    return total / count


def test_rows_have_each_sequence_once_with_positions_from_zero():
    batch = PackSequences(16, pad_token_id=255)([{"input_ids": [10] * 9}, {"input_ids": [20] * 7}, {"input_ids": [30]}])
    assert batch["input_ids"].tolist() == [[10] * 9 + [20] * 7, [30] + [255] * 15]
    assert batch["position_ids"].tolist() == [[*range(9), *range(7)], [0, *range(15)]]
    assert batch["labels"].tolist() == [[-100] + [10] * 8 + [-100] + [20] * 6, [-100] * 16]
    assert batch["sequence_lengths"].tolist() == [[9, 7, *[0] * 6], [1, 15, *[0] * 6]]
    assert cu_seqlens(batch["sequence_lengths"]).tolist() == [0, 9, *[16] * 7, 17, *[32] * 7]


def test_the_number_of_boundaries_is_a_power_of_two():
    """Compiled steps have a graph for each number that they meet."""
    batches = [PackSequences(64)([{"input_ids": [1]}] * number) for number in (1, 7, 8, 15, 16, 64)]
    assert [batch["sequence_lengths"].size(1) for batch in batches] == [8, 8, 16, 16, 32, 64]


def test_a_position_sees_its_own_sequence_up_to_itself():
    mask = block_diagonal_mask(torch.tensor([[0, 1, 0, 1, 2]]))[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]


def test_loss_and_gradients_are_those_of_sequences_alone():
    packed, alone = model(), model()
    batch = PackSequences(16)(samples())
    assert batch["input_ids"].shape == (3, 16), "43 tokens in three rows"
    packed._loss(batch).backward()
    loss = one_by_one(alone, samples())
    loss.backward()
    assert torch.allclose(packed._loss(batch), loss, rtol=0, atol=1e-12)
    for mine, expected in zip(packed.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine.grad, expected.grad, rtol=0, atol=1e-12)


class Fixed(ByteGPT):
    """With plain gradient descent."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp_fork", 2)])
def test_a_run_weighs_each_token_alike(strategy, devices):
    torch.manual_seed(1)
    module = Fixed(num_layers=2, num_heads=2, dim=16, context_length=16)
    plain = copy.deepcopy(module)
    data = samples()
    batches = LengthBucketing(LENGTHS, 16, seed=3)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=PackSequences(16))
    dealt = list(batches)
    steps = [[*one, *other] for one, other in zip(dealt[::2], dealt[1::2], strict=True)]
    flags = {"accumulate_grad_batches": 2 // devices, "max_steps": len(steps), "max_epochs": 1}
    trainer = engine(strategy=strategy, devices=devices, **flags)
    trainer.fit(module, loader)
    assert len(steps) > 1
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in steps:
        optimizer.zero_grad()
        one_by_one(plain, [data[i] for i in step]).backward()
        optimizer.step()
    for mine, expected in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("sample", "match"),
    [
        ({"input_ids": []}, r"a sample of 0 tokens does not fit rows of length=4"),
        ({"input_ids": [1] * 5}, r"a sample of 5 tokens does not fit rows of length=4"),
        ({"input_ids": [1, 2], "labels": [1]}, r"2 input_ids and 1 labels"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, r"attention_mask with zeros"),
        ({"input_ids": [1], "token_type_ids": [0]}, r"a sample has token_type_ids, which can't be packed"),
    ],
)
def test_refuses_what_it_would_change(sample, match):
    with pytest.raises(ValueError, match=match):
        PackSequences(4)([sample])
