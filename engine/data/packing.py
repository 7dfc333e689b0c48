"""Packs token sequences of any length into rows of one length, each independent of its neighbours.

The positions of each sequence begin at 0, and its first label is masked, so that the last token of the sequence before
predicts nothing. `block_diagonal_mask` turns the positions into an attention mask; `cu_seqlens` turns the lengths into
boundaries, which kernels for sequences of different lengths take.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..flags import check_count

__all__ = ["PackSequences", "block_diagonal_mask", "cu_seqlens"]

_LEAST_COLUMNS = 8
"""The least columns of `sequence_lengths`, whose number is a power of two: compiled steps meet few of them."""
_IGNORED = -100
"""The label of a token that is not predicted; `torch.nn.functional.cross_entropy` leaves it out by default."""


class PackSequences:
    """A `collate_fn` that packs tokenised samples, the longest first, each into the first row with room for it.

    A sample is a dict as tokenised data sets have it: `input_ids` [time] and, if they differ, `labels` [time], lists or
    tensors, aligned (`labels[t]` is what position t - 1 predicts, or -100). An `attention_mask` of ones is allowed.

    The batch has these integers, all but the last one [rows, length]:

    - `input_ids`, filled up with `pad_token_id`;
    - `labels`, -100 at the first token of each sequence and at padding;
    - `position_ids`, from 0 in each sequence; padding is a sequence of its own;
    - `sequence_lengths` [rows, columns], the lengths of a row's sequences, and then zeros. On an accelerator nothing
      has to wait for their number.

    `training_step` returns ``{"loss": mean, "weight": count}`` with the number of labels that are not -100, so that
    each token counts the same, however many there are in a batch or on a rank.

    Args:
        length: tokens of a row.
        pad_token_id: token for the places that no sequence fills.

    Raises:
        ValueError: `length` is no positive number, or (when called) a sample is empty, too long or padded, or has
            labels of another length, or has columns that can't be packed.
    """

    def __init__(self, length: int, *, pad_token_id: int = 0) -> None:
        self.length = check_count("length", length)
        self.pad_token_id = pad_token_id

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Packs `samples`; see the class."""
        sequences = sorted(map(self._read, samples), key=lambda pair: len(pair[0]), reverse=True)
        rows: list[list[tuple[Tensor, Tensor]]] = []
        room: list[int] = []
        for tokens, labels in sequences:
            row = next((i for i, left in enumerate(room) if left >= len(tokens)), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(self.length)
            rows[row].append((tokens, labels))
            room[row] -= len(tokens)
        for row, left in enumerate(room):
            if left:
                rows[row].append((torch.full((left,), self.pad_token_id), torch.full((left,), _IGNORED)))
        most = max(_LEAST_COLUMNS, *map(len, rows))
        lengths = torch.zeros(len(rows), 2 ** (most - 1).bit_length(), dtype=torch.int64)
        for row, sequences_of_row in zip(lengths, rows, strict=True):
            row[: len(sequences_of_row)] = torch.tensor([len(tokens) for tokens, _ in sequences_of_row])
        return {
            "input_ids": torch.stack([torch.cat([tokens for tokens, _ in row]) for row in rows]),
            "labels": torch.stack([torch.cat([labels for _, labels in row]) for row in rows]),
            "position_ids": torch.stack([torch.cat([torch.arange(len(tokens)) for tokens, _ in row]) for row in rows]),
            "sequence_lengths": lengths,
        }

    def _read(self, sample: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns tokens and labels of a sample, with the first label masked."""
        if foreign := sorted(sample.keys() - {"input_ids", "labels", "attention_mask"}):
            raise ValueError(
                f"a sample has {', '.join(foreign)}, which can't be packed: give samples of only input_ids, labels and"
                " attention_mask, for example by removing the data set's other columns."
            )
        tokens = torch.as_tensor(sample["input_ids"], dtype=torch.int64)
        labels = torch.as_tensor(sample.get("labels", tokens), dtype=torch.int64).clone()
        if not 1 <= len(tokens) <= self.length:
            raise ValueError(
                f"a sample of {len(tokens)} tokens does not fit rows of length={self.length}: leave out samples without"
                " tokens, and cut long ones or pack to a greater length."
            )
        if len(labels) != len(tokens):
            raise ValueError(f"a sample has {len(tokens)} input_ids and {len(labels)} labels: give as many of both.")
        if "attention_mask" in sample and not torch.as_tensor(sample["attention_mask"]).bool().all():
            raise ValueError("a sample has an attention_mask with zeros: tokenise without padding.")
        labels[0] = _IGNORED
        return tokens, labels


def block_diagonal_mask(position_ids: Tensor) -> Tensor:
    """Returns the mask of the positions that each position sees: those of its own sequence, itself and before.

    Args:
        position_ids: [rows, length], 0 where a sequence begins.

    Returns:
        Boolean, [rows, 1, length, length], true where a query (third dimension) sees a key (last); for
        `scaled_dot_product_attention`.
    """
    sequence = (position_ids == 0).cumsum(1)
    return ((sequence[:, :, None] == sequence[:, None, :]).tril())[:, None]


def cu_seqlens(sequence_lengths: Tensor) -> Tensor:
    """Returns where each sequence begins in the rows one after the other, and the end: int32, [rows * columns + 1].

    An entry of length zero is an empty sequence, which such kernels leave out.

    Args:
        sequence_lengths: [rows, columns], of `PackSequences`.
    """
    return functional.pad(sequence_lengths.flatten().cumsum(0, dtype=torch.int32), (1, 0))
