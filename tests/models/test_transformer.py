"""Laws of the transformer: causality, tying, and weights that can be drawn again."""

import pytest
import torch

from polyphase.models import Transformer


def net(**shape: object) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**{"num_tokens": 17, "context_length": 8, "dim": 12, "num_heads": 3, "num_layers": 2, **shape})


@pytest.mark.parametrize("position", [1, 4, 7])
def test_a_token_changes_nothing_before_it(position):
    model = net().eval()
    tokens = torch.randint(0, 17, (2, 8))
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % 17
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.allclose(before[:, position:], after[:, position:])


def test_embeddings_are_tied():
    model = net()
    assert model.head.weight is model.token_embedding.weight
    assert sum("weight" in name and p.shape == (17, 12) for name, p in model.named_parameters()) == 1


def test_every_parameter_has_a_gradient():
    model = net()
    model(torch.randint(0, 17, (2, 8))).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_shorter_sequences_are_fine_and_longer_ones_are_not():
    model = net()
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 17)
    with pytest.raises(ValueError, match="9 tokens does not fit the model's context_length=8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="dim must be a multiple of num_heads, but 12 is not a multiple of 5"):
        net(num_heads=5)


def test_dropout_acts_in_training_only():
    model = net(dropout=0.5)
    tokens = torch.randint(0, 17, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
