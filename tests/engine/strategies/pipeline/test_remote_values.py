"""Values without content: they have a shape and a device, and whoever needs more is told which line it was."""

import pytest
import torch
from torch import nn

from polyphase.engine.strategies.callers import CutError
from polyphase.engine.strategies.pipeline.remote_values import RemoteValueMode, has_absent

CPU = torch.device("cpu")


def mode(buffers=()):
    return RemoteValueMode(CPU, lambda tensor: any(tensor is buffer for buffer in buffers))


def absent(*shape):
    return torch.empty(shape, device="meta")


def test_what_meets_them_is_absent_and_all_else_is_real():
    x = absent(2, 3)
    with mode():
        y = nn.functional.linear(torch.ones(4, 3), x)
        z = torch.cat([x, torch.zeros(1, 3)])
        real = torch.ones(2) + 1
    assert y.is_meta
    assert y.shape == (4, 2)
    assert z.shape == (3, 3)
    assert has_absent({"a": [y]})
    assert not has_absent([real])


def test_what_is_made_for_their_device_or_shape_is_real():
    x = absent(2, 3)
    with mode():
        assert x.device == CPU
        assert not x.is_cuda
        made = [torch.arange(3, device=x.device), torch.ones_like(x), x.new_zeros(4), torch.rand_like(x)]
        moved = torch.ones(2).to(x), torch.ones(2, dtype=torch.int64).type_as(x)
    assert not has_absent([made, moved])
    assert torch.equal(made[1], torch.ones(2, 3))
    assert moved[1].dtype == torch.float32


def test_they_stay_absent_where_they_are_moved():
    x = absent(2)
    with mode():
        moved = [x.to("cpu"), x.cpu(), x.to(torch.float64), x.to(torch.zeros(1, dtype=torch.int32)), x.half()]
    assert all(tensor.is_meta for tensor in moved)
    assert [tensor.dtype for tensor in moved[2:]] == [torch.float64, torch.int32, torch.float16]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, own: nn.functional.dropout(x),
        lambda x, own: nn.functional.dropout(x, inplace=True),
        lambda x, own: nn.functional.alpha_dropout(x, training=True),
        lambda x, own: torch.bernoulli(x),
        lambda x, own: torch.bernoulli(x, generator=own),
        lambda x, own: x.normal_(),
        lambda x, own: torch.normal(x, torch.ones(5, 3)),
        lambda x, own: torch.multinomial(x, 2),
        lambda x, own: nn.functional.linear(nn.functional.dropout(x, training=False), x).add_(1),  # draws nothing
    ],
)
def test_what_is_drawn_next_is_the_same_as_where_they_are_real(draw):
    drawn = []
    for x in (torch.full((5, 3), 0.5), absent(5, 3)):
        own = torch.Generator().manual_seed(1)
        torch.manual_seed(0)
        with mode():
            found = draw(x, own)
        assert found.is_meta == x.is_meta
        drawn.append((torch.rand(4), torch.rand(4, generator=own)))
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


def test_statistics_of_an_absent_module_are_left_alone():
    norm = nn.BatchNorm1d(3)
    norm.weight = nn.Parameter(absent(3))
    norm.bias = nn.Parameter(absent(3))
    buffer = torch.ones(3)
    with mode([buffer]):
        y = norm(absent(5, 3))
        assert not y.is_meta  # user code is not told
        buffer.lerp_(absent(3), 0.5)
        buffer += absent(3)
    assert y.is_meta
    assert torch.equal(norm.running_mean, torch.zeros(3))
    assert torch.equal(buffer, torch.ones(3))


def test_what_the_stage_has_may_not_meet_them_any_more():
    watching = mode()
    watching.tracks_mixing = True
    with watching:
        torch.ones(2) * absent(2)
    assert 'in test_what_the_stage_has_may_not_meet_them_any_more: "torch.ones(2) * absent(2)"' in watching.mixing_line


def test_without_the_mode_nothing_is_changed():
    entered = mode()
    with entered, entered.paused():
        assert absent(2).device.type == "meta"
    with entered:
        with torch.device("cpu"), entered.paused():
            pass  # another mode was entered since: this one can't be left
        assert absent(2).device == CPU


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.item(),
        lambda x: bool(x),
        lambda x: float(x),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.nonzero(x),
        lambda x: torch.equal(x, torch.ones(1)),
    ],
)
def test_a_read_names_the_line(read):
    with (
        pytest.raises(CutError, match=r'test_remote_values.py:\d+ in <lambda>: "lambda x: .*" reads a value'),
        mode(),
    ):
        read(absent(1))


def test_a_shape_that_depends_on_values_names_the_line():
    with pytest.raises(CutError, match="can't be done without the values"), mode():
        absent(4)[absent(4) > 0]


@pytest.mark.parametrize("write", [lambda x, y: x.add_(y), lambda x, y: x.__setitem__(0, y[0]), torch.Tensor.copy_])
def test_a_write_into_a_real_tensor_names_the_line(write):
    with pytest.raises(CutError, match="writes a value that another pipeline stage has into a tensor"), mode():
        write(torch.ones(2), absent(2))


def test_dtypes_are_those_that_autocast_gives():
    """Also of operations on values of two dtypes, and with views that are views."""
    rows, weight = torch.randn(4, 4), torch.randn(4, 4)

    def compute(rows, weight):
        x = nn.functional.linear(rows, weight)
        y = nn.functional.linear(torch.cat([x, rows]), weight)
        return x, y, nn.functional.mse_loss(x, x), y.view(32), nn.functional.scaled_dot_product_attention(x, x, rows)

    with torch.autocast("cpu", torch.bfloat16):
        expected = compute(rows, weight)
        with RemoteValueMode(torch.device("cpu"), lambda tensor: False):
            found = compute(rows.to("meta"), weight.to("meta"))
    assert [(t.shape, t.dtype, t.is_meta) for t in found] == [(t.shape, t.dtype, True) for t in expected]
    assert found[3].untyped_storage()._cdata == found[1].untyped_storage()._cdata
