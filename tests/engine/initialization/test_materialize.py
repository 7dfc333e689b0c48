"""Built on the meta device and then materialised equals built on the CPU, bit for bit."""

import weakref

import pytest
import torch
from torch import nn

from polyphase.engine.initialization import check_shapes, has_meta_tensors, materialize
from polyphase.models.transformer import Transformer

SEED = 11


class Scaled(nn.Module):
    """Draws its own weight after its children, and fills its buffer, in reset_parameters."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("offset", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.scale)
        nn.init.ones_(self.offset)


class Redraws(nn.Module):
    """Has no tensors of its own, and draws those of its children again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self):
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.02)


class Tied(nn.Module):
    """A language model's ends: the tie goes one way or the other, with or without a bias beside it."""

    def __init__(self, bias: bool, embedding_wins: bool):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=bias)
        if embedding_wins:
            self.head.weight = self.embed.weight
        else:
            self.embed.weight = self.head.weight


MODULES = {
    "linear": lambda: nn.Linear(4, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
    "embedding, padded": lambda: nn.Embedding(5, 3, padding_idx=0),
    "convolution, batch norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)),
    "lstm": lambda: nn.LSTM(4, 5, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "transformer layers": lambda: nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)),
    "own reset, own buffer": Scaled,
    "parent draws again": Redraws,
    "half precision": lambda: nn.Linear(4, 3, dtype=torch.bfloat16),
    "frozen": lambda: nn.Linear(4, 3).requires_grad_(False),
    "tied": lambda: Tied(bias=False, embedding_wins=True),
    "tied, with bias": lambda: Tied(bias=True, embedding_wins=True),
    "our transformer": lambda: Transformer(num_tokens=11, dim=8, num_layers=2, num_heads=2, context_length=6),
}


def built(make, device="cpu"):
    torch.manual_seed(SEED)
    with torch.device(device):
        return make()


def materialized(make):
    module = built(make, "meta")
    assert has_meta_tensors(module)
    torch.manual_seed(SEED)
    materialize(module)
    return module


@pytest.mark.parametrize("name", list(MODULES))
def test_a_materialised_module_equals_one_built_on_the_cpu(name):
    expected = built(MODULES[name])
    found = materialized(MODULES[name])
    assert not has_meta_tensors(found)
    assert list(found.state_dict()) == list(expected.state_dict())
    for key, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[key], tensor, rtol=0, atol=0, msg=lambda m, k=key: f"{k}: {m}")
    frozen = [p.requires_grad for p in expected.parameters()]
    assert [p.requires_grad for p in found.parameters()] == frozen


@pytest.mark.parametrize("name", [name for name in MODULES if "tied" in name])
def test_tied_weights_stay_tied(name):
    module = materialized(MODULES[name])
    assert module.head.weight is module.embed.weight


def test_a_shared_module_is_drawn_once():
    def make():
        shared = nn.Linear(3, 3)
        return nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(3, 3))

    expected, found = built(make), materialized(make)
    assert found[0] is found[2]
    for key, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor), key


def test_a_shared_buffer_stays_shared():
    def make():
        pair = nn.ModuleList([Scaled(), Scaled()])
        pair[1].offset = pair[0].offset
        return pair

    pair = materialized(make)
    assert pair[0].offset is pair[1].offset


def test_what_is_real_keeps_its_values():
    pretrained = nn.Linear(3, 3)
    before = pretrained.weight.clone()
    module = nn.Sequential(pretrained, built(lambda: nn.Linear(3, 3), "meta"))
    materialize(module)
    assert module[0] is pretrained
    assert torch.equal(pretrained.weight, before)


def test_what_is_real_keeps_its_values_even_where_the_parent_draws_its_children():
    module = Redraws()
    before = module.layers[0].weight.clone()
    module.layers[1] = built(lambda: nn.Linear(3, 3), "meta")
    materialize(module)
    assert torch.equal(module.layers[0].weight, before)


def test_a_real_module_draws_nothing():
    module = nn.Sequential(nn.Linear(3, 3), Scaled())
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    assert not has_meta_tensors(module)
    materialize(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(module.state_dict()[key], tensor) for key, tensor in before.items())


def test_each_part_is_handed_on_complete_and_children_first():
    module = built(lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Scaled())), "meta")
    names = {part: name for name, part in module.named_modules()}
    seen = []

    def on_complete(part):
        assert not has_meta_tensors(part)
        seen.append(names[part])

    materialize(module, on_complete)
    assert seen == ["0", "1.0", "1.1.inner", "1.1", "1", ""]
    assert set(seen) == set(names.values())


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def test_meta_tensors_that_nothing_fills_are_refused_by_name():
    module = built(lambda: nn.Sequential(nn.Linear(2, 2), NoReset()), "meta")
    with pytest.raises(ValueError, match=r"1 \(NoReset\) was built on the meta device and has no method reset_param"):
        materialize(module)


def test_a_root_that_nothing_fills_is_refused_by_its_class():
    with pytest.raises(ValueError, match=r"^NoReset \(NoReset\) was built on the meta device"):
        materialize(built(NoReset, "meta"))


class Masked(nn.Linear):
    """Inherits a reset_parameters that knows nothing of its mask."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())


def test_a_tensor_that_reset_parameters_leaves_out_is_no_garbage():
    module = built(Masked, "meta")
    with pytest.raises(ValueError, match="mask"):
        materialize(module)


def test_what_shards_take_the_place_of_is_let_go_of():
    module = built(lambda: nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(4))), "meta")
    whole = []

    def shard(part):
        assert [weight for weight in whole if weight() is not None] == []
        if isinstance(part, nn.Linear):
            whole.append(weakref.ref(part.weight))
            part.weight = nn.Parameter(torch.empty(1, 2))

    materialize(module, shard)
    assert len(whole) == 4


def test_lazy_modules_are_named_until_they_have_run():
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"0\.weight of Sequential, a parameter of LazyLinear, gets its shape from"):
        check_shapes(module)
    module(torch.ones(2, 4))
    check_shapes(module)
