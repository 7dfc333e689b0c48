"""What is split, and how, by the structure of the module alone."""

import pytest
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from polyphase.engine.strategies.tensor.plan import make_plan
from polyphase.engine.strategies.tensor.styles import (
    EmbeddingParallel,
    FusedColwise,
    ParallelRegion,
    PlainRowwise,
    VocabParallel,
)
from polyphase.models import ByteGPT

from .attentions import BLOCKS, DIM, Apart, Fused, FusedGate, Gated, MultiQuery, NoHeads, Residual


def within(**parts: nn.Module) -> nn.Module:
    return nn.ModuleDict(parts)


def kinds(plan):
    return {name: type(style) for name, style in plan.styles.items()}


def test_a_gpt_is_split_in_its_attention_its_mlps_and_its_vocabulary():
    plan = make_plan(ByteGPT(num_layers=2), 4)
    assert kinds(plan) == {
        f"net.{name}": kind
        for block in ("blocks.0", "blocks.1")
        for name, kind in {
            f"{block}.attention": ParallelRegion,
            f"{block}.attention.qkv": FusedColwise,
            f"{block}.attention.out": RowwiseParallel,
            f"{block}.mlp": ParallelRegion,
            f"{block}.mlp.up": ColwiseParallel,
            f"{block}.mlp.down": RowwiseParallel,
        }.items()
    } | {"net.token_embedding": EmbeddingParallel, "net.head": VocabParallel}


def test_it_prints_what_is_alike_once():
    text = str(make_plan(ByteGPT(size="tiny"), 2))
    assert text.splitlines()[1:] == [
        "  net.blocks.*.attention         qkv by columns, out by rows: 2 of 4 heads",
        "  net.blocks.*.mlp               up by columns, down by rows: 256 of 512 hidden units",
        "  net.token_embedding, net.head  by the vocabulary, tied: 128 of 256 rows, logits gathered",
    ]
    assert "(2." in text.splitlines()[0]  # per cent of the parameters are biases, norms and positions


@pytest.mark.parametrize("block", BLOCKS)
def test_every_common_block_is_recognised(block):
    (entry,) = make_plan(within(block=block()), 2).entries
    assert entry.name == "block"


def test_layers_in_a_row_are_split_in_pairs():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    plan = make_plan(within(net=net), 2)
    assert kinds(plan) == {
        "net.0": ColwiseParallel,
        "net.2": PlainRowwise,
        "net.4": ColwiseParallel,
        "net.5": PlainRowwise,
    }
    whole, num_biases = 6 + 2, 8 + 6 + 6 + 2  # the biases of the second layer of each pair
    assert plan.replicated_share == pytest.approx(whole / (4 * 8 + 8 * 6 + 6 * 6 + 6 * 2 + num_biases))


@pytest.mark.parametrize("between", [nn.LayerNorm(8), nn.Softmax(-1), nn.BatchNorm1d(8), nn.GLU()])
def test_nothing_is_split_around_what_looks_at_several_numbers(between):
    with pytest.raises(ValueError, match="no layer of ModuleDict is known to be safe to split over 2"):
        make_plan(within(net=nn.Sequential(nn.Linear(4, 8), between, nn.Linear(8, 4))), 2)


def test_what_is_more_than_an_mlp_is_searched_for_some():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
            self.mlp = Gated()

    assert [entry.name for entry in make_plan(within(net=Net()), 2).entries] == ["net.mlp"]


def test_two_layers_of_such_sizes_are_a_fused_gate_by_the_name_of_the_second():
    class Latent(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode, self.mlp = nn.Linear(8, 8), nn.Linear(4, 8), Gated()

    assert [entry.name for entry in make_plan(within(net=Latent()), 2).entries] == ["net.mlp"]
    style = make_plan(within(block=FusedGate()), 2, is_sharded=True).styles["block.gate_up_proj"]
    assert (style.num_parts, style.cuts_bias) == (2, False)


def test_experts_are_split_rather_than_the_layers_that_choose_between_them():
    experts = nn.Module()
    experts.into, experts.router = nn.Linear(8, 16), nn.Linear(16, 4)
    experts.experts = nn.ModuleList(Residual() for _ in range(2))
    plan = make_plan(nn.ModuleDict({"net": experts}), 2)
    assert [entry.name for entry in plan.entries] == ["net.experts.0", "net.experts.1"]


def test_fused_projections_keep_a_whole_bias_where_parts_are_sharded():
    for is_sharded in (False, True):
        style = make_plan(within(block=Fused()), 2, is_sharded=is_sharded).styles["block.qkv"]
        assert (style.num_parts, style.cuts_bias) == (3, not is_sharded)


def test_without_heads_the_projections_alone_are_split():
    plan = make_plan(within(block=NoHeads()), 2)
    assert "attention itself done by every rank: it has no `num_heads`" in str(plan)
    assert ParallelRegion not in kinds(plan).values()


def test_heads_may_stand_in_a_config():
    class Config:
        num_attention_heads = 4

    block = Apart()
    del block.num_heads, block.num_kv_heads
    block.config = Config()
    assert "2 of 4 heads" in str(make_plan(within(block=block), 2))


def test_heads_that_do_not_divide_are_refused_by_name():
    with pytest.raises(ValueError, match=r"the attention 'net\.3' \(Apart\) has 4 heads, which 3 .* can't share"):
        make_plan(within(net=nn.ModuleDict({"3": Apart()})), 3)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (Apart(key_heads=2), "4 ranks can't share 2 heads of keys and values equally"),
        (MultiQuery(), "q, k and v have unequal parts of it"),
    ],
)
def test_heads_of_keys_that_do_not_divide_are_gathered(block, reason):
    plan = make_plan(within(block=block), 4)
    assert f"attention itself done by every rank: {reason}" in str(plan)
    assert ParallelRegion not in kinds(plan).values()


def test_hidden_units_and_rows_that_do_not_divide_stay_whole():
    plan = make_plan(within(a=Gated(), b=nn.Sequential(nn.Linear(3, 10), nn.Linear(10, 3))), 4)
    assert "b.1  whole: 10 hidden units are no multiple of 4" in str(plan)
    with pytest.raises(ValueError, match=r"block\.down: 24 hidden units are no multiple of 5"):
        make_plan(within(block=Residual()), 5)
    tables = within(a=nn.Embedding(9, 4), b=nn.Linear(4, 9), c=Gated())
    assert make_plan(tables, 2).skipped == (("a", "9 rows are no multiple of 2"),)


def test_an_embedding_without_an_output_layer_stays_whole():
    plan = make_plan(within(positions=nn.Embedding(8, DIM), mlp=Gated()), 2)
    assert not any("positions" in name for name in plan.styles)


def test_an_embedding_whose_rows_depend_on_each_other_stays_whole():
    plan = make_plan(within(table=nn.Embedding(8, 4, max_norm=1.0), head=nn.Linear(4, 8), mlp=Gated()), 2)
    assert plan.skipped == (("table", "an embedding with max_norm, sparse=True or scale_grad_by_freq=True"),)


def test_all_embeddings_that_share_a_table_with_the_output_layer_are_split():
    net = within(a=nn.Embedding(8, 4), b=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False))
    net["b"].weight = net["head"].weight = net["a"].weight
    (entry,) = make_plan(net, 2).entries
    assert (entry.name, kinds(make_plan(net, 2))) == (
        "a, b, head",
        {"a": EmbeddingParallel, "b": EmbeddingParallel, "head": VocabParallel},
    )


class Head(nn.Module):
    """That of a masked language model."""

    def __init__(self):
        super().__init__()
        self.dense, self.decoder = nn.Linear(4, 4), nn.Linear(4, 8)


def test_one_of_two_layers_that_share_a_parameter_is_not_split_alone():
    net = within(table=nn.Embedding(8, 4, max_norm=1.0), head=Head(), mlp=Gated())
    net["head"].decoder.weight = net["table"].weight
    plan = make_plan(net, 2)
    assert [entry.name for entry in plan.entries] == ["mlp"]
    assert plan.skipped[0] == ("head", "head.decoder shares a parameter with table, which is not split as it is")
    net["mlp"].norm = net["norm"] = nn.LayerNorm(4)  # one module, not two with one parameter
    assert [entry.name for entry in make_plan(net, 2).entries] == ["mlp"]
    net["norm"] = nn.LayerNorm(4)
    net["norm"].weight = net["mlp"].norm.weight
    with pytest.raises(ValueError, match=r"mlp: mlp\.norm shares a parameter with norm"):
        make_plan(net, 2)


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm, nn.utils.spectral_norm])
def test_layers_whose_weight_is_made_of_other_parameters_stay_whole(norm):
    net = within(
        mlp=Gated(),
        gated=Gated(),
        attention=Apart(),
        row=nn.Sequential(norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 4)),
    )
    norm(net["gated"].gate_proj)
    norm(net["attention"].k_proj)
    assert [entry.name for entry in make_plan(net, 2).entries] == ["mlp"]


class Says(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2))
        self._plan = plan

    def tensor_parallel_plan(self):
        return self._plan


def test_a_module_may_say_better_with_wildcards():
    plan = make_plan(Says({"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}), 2)
    assert kinds(plan) == {
        "blocks.0.up": ColwiseParallel,
        "blocks.1.up": ColwiseParallel,
        "blocks.0.down": RowwiseParallel,
        "blocks.1.down": RowwiseParallel,
    }
    assert "blocks.*.up    ColwiseParallel, as the module says" in str(plan)


def test_a_sequence_is_cut_by_a_plan_that_is_derived_only():
    plan = make_plan(ByteGPT(), 2, by_sequence=True)
    assert str(plan).endswith("  between them, activations are split by the sequence")
    assert plan.styles["net.blocks.0.mlp.down"].output_layouts == (Shard(1),)
    with pytest.raises(ValueError, match="sequence_parallel=true is for plans that are derived, but Says has a"):
        make_plan(Says({"blocks.*.up": ColwiseParallel()}), 2, by_sequence=True)


@pytest.mark.parametrize("plan", [None, {"blocks.0.up": "colwise"}, [ColwiseParallel()], {"blocks.0.up": Shard(0)}])
def test_a_plan_of_something_else_is_refused(plan):
    with pytest.raises(ValueError, match=r"Says\.tensor_parallel_plan\(\) must return a dict of .* but got"):
        make_plan(Says(plan), 2)


def test_a_name_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"names 'blocks\.0\.upp', but .* Did you mean 'blocks\.0\.up'\?"):
        make_plan(Says({"blocks.0.upp": ColwiseParallel()}), 2)


def test_without_a_plan_it_is_said_what_to_give():
    with pytest.raises(ValueError, match=r"m: nn.MultiheadAttention .* Give the module a method tensor_parallel_plan"):
        make_plan(within(m=nn.MultiheadAttention(8, 2)), 2)
