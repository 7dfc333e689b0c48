"""Checks that an optimizer steps each parameter by itself: a pipeline stage does not have the others."""

import copy
from collections import OrderedDict
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

__all__ = ["check_optimizer"]

_FACTORS = (100.0, 1.0, 10.0, 100.0, 10.0, 1.0), (1.0, 100.0, 30.0, 1.0, 30.0, 10.0)
"""Factors on the gradients of other parameters, by step. They vary: a common factor would cancel under Adam."""
_REMEDY = "choose another optimizer, or another strategy, such as 'ddp' or 'fsdp'."


def check_optimizer(optimizer: Optimizer) -> None:
    """Checks that the step of a parameter does not depend on others, by steps of a copy on small tensors.

    Raises:
        ValueError: it depends on others, as with a norm of all gradients (LAMB, SAM) or a common estimate (Prodigy).
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            f"LBFGS looks at all parameters as one vector, of which a pipeline stage has a part: {_REMEDY}"
        )
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    groups = [index for index, group in enumerate(optimizer.param_groups) if group["params"]]
    try:
        with torch.random.fork_rng(devices=[]):
            is_independent = all(_is_independent(optimizer, group) for group in groups[:2])
    except Exception as error:
        rank_zero_warn(
            f"a pipeline stage steps its own parameters alone, and whether {name} gives the same result then could not"
            f" be tried out ({type(error).__name__}: {error}). It does not if it looks at all parameters together, as"
            " with a norm of all gradients."
        )
        return
    if not is_independent:
        raise ValueError(
            f"{name} steps a parameter by what it knows of others too, such as a norm of all gradients, but a pipeline"
            f" stage has only its own: switch that off, if it is an option of {name} (and set gradient_clip_val of the"
            f" Engine for clipping), {_REMEDY}"
        )


def _is_independent(optimizer: Optimizer, group: int) -> bool:
    first, second = (_movement(optimizer, group, factors) for factors in _FACTORS)
    return torch.allclose(first, second, rtol=1e-3, atol=0)


def _movement(optimizer: Optimizer, group: int, factors: tuple[float, ...]) -> Tensor:
    """Returns how far the first parameter of a group moves if all other gradients are multiplied by `factors`."""
    torch.manual_seed(0)
    copies = {id(p): _small(p) for param_group in optimizer.param_groups for p in param_group["params"]}
    first = copies[id(optimizer.param_groups[group]["params"][0])]
    before = first.detach().clone()
    memo: dict[int, Any] = dict(copies)
    copied = memo[id(optimizer)] = object.__new__(type(optimizer))
    attributes = {name: copy.deepcopy(value, memo) for name, value in vars(optimizer).items() if name not in _LEFT_OUT}
    copied.__dict__.update(attributes, **{name: OrderedDict() for name in _LEFT_OUT[1:]})
    for step, factor in enumerate(factors):

        def closure(step: int = step, factor: float = factor) -> Tensor:
            generator = torch.Generator().manual_seed(step)
            for parameter in copies.values():
                noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.grad = (7.0 if parameter is first else factor) * (noise + parameter.detach())
            return torch.ones(())

        type(optimizer).step(copied, closure)  # type: ignore[arg-type]
    return first.detach() - before


_LEFT_OUT = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of an optimizer that are not copied: a scheduler sets `step`, and hooks are the user's."""


def _small(parameter: Tensor) -> nn.Parameter:
    size = (4 if parameter.dim() < 3 else 2,) * parameter.dim()
    count = torch.Size(size).numel()
    # In double precision: optimizers that estimate their learning rate begin with tiny steps.
    content = torch.arange(1, count + 1, dtype=torch.float64) / count
    return nn.Parameter(content.view(size), parameter.requires_grad)
