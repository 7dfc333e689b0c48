"""Clipping equals torch's own on whole gradients; sharded ones are compared in the integration tests."""

import pytest
import torch
from torch import Tensor, nn

from polyphase.engine.precision.clipping import clip_by_norm, clip_by_value

from ..tiny import Regression, engine, rows


def parameters(scale: float = 1.0, *, without: int | None = None) -> list[nn.Parameter]:
    """Three parameters with gradients of norm about 5 times `scale`; `without` is the index of one that has none."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, 3), (7,), ())
    made = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for i, p in enumerate(made):
        p.grad = None if i == without else torch.randn(p.shape, generator=generator) * scale
    return made


def gradients(params: list[nn.Parameter]) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in params]


def equal(a, b) -> bool:
    return all(x is y is None or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("without", [None, 0, 2])
@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6])
def test_the_norm_and_the_gradients_equal_torchs(max_norm, without):
    expected, found = parameters(without=without), parameters(without=without)
    norm = torch.nn.utils.clip_grad_norm_(expected, max_norm)
    assert torch.equal(clip_by_norm(found, max_norm), norm)
    assert equal(gradients(found), gradients(expected))


def test_the_norm_returned_is_that_before_clipping_and_the_norm_after_is_the_limit():
    params = parameters()
    before = torch.cat([p.grad.flatten() for p in params]).norm()
    torch.testing.assert_close(clip_by_norm(params, 0.5), before)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in params]).norm(), torch.tensor(0.5))


def test_gradients_below_the_limit_are_left_as_they_are():
    params = parameters(scale=1e-3)
    before = gradients(params)
    clip_by_norm(params, 1.0)
    assert equal(gradients(params), before)


def test_an_iterator_will_do():
    expected, found = parameters(), parameters()
    clip_by_norm(expected, 0.5)
    clip_by_norm(iter(found), 0.5)
    assert equal(gradients(found), gradients(expected))


@pytest.mark.parametrize("params", [[], [nn.Parameter(torch.ones(2))]], ids=["no parameters", "no gradients"])
def test_without_gradients_the_norm_is_zero(params):
    assert torch.equal(clip_by_norm(params, 1.0), torch.zeros(()))
    clip_by_value(params, 1.0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_shows_in_the_norm(bad):
    params = parameters()
    params[0].grad[0, 0] = bad
    assert not clip_by_norm(params, 1.0).isfinite()


@pytest.mark.parametrize("without", [None, 1])
@pytest.mark.parametrize("max_value", [0.1, 1e6])
def test_values_are_clamped_as_by_torch(max_value, without):
    expected, found = parameters(without=without), parameters(without=without)
    torch.nn.utils.clip_grad_value_(expected, max_value)
    clip_by_value(found, max_value)
    assert equal(gradients(found), gradients(expected))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "64-true"])
def test_the_flag_limits_the_step_and_the_engine_keeps_the_norm(precision):
    limit = 1e-3
    lengths = []

    class Watched(Regression):
        def optimizer_step(self, *args, **kwargs):
            before = [p.detach().clone() for p in self.parameters()]
            super().optimizer_step(*args, **kwargs)
            steps = [(p.detach() - q).flatten() for p, q in zip(self.parameters(), before, strict=True)]
            lengths.append(float(torch.cat(steps).norm()))

        def training_step(self, batch, batch_idx):
            # Small enough that gradients times the loss scale fit into float16.
            return super().training_step(batch.to(self.net[0].weight.dtype), batch_idx) * 1e-2

    run = engine(precision=precision, gradient_clip_val=limit)
    run.fit(Watched(), rows())
    assert run.grad_norm > limit
    assert lengths == pytest.approx([0.1 * limit] * 4, rel=1e-2)  # the learning rate is 0.1


@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0}, {"gradient_clip_algorithm": "value"}])
def test_without_norm_clipping_there_is_no_norm(flags):
    if "gradient_clip_algorithm" in flags:
        flags = {**flags, "gradient_clip_val": 0.1}
    run = engine(**flags)
    run.fit(Regression(), rows())
    assert run.grad_norm is None
