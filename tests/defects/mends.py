"""Defects beside the weights: state on parameters, gradients by hand, buffers, what blocks do besides returning.

As in `defects.py`, each is there once what prevents it is taken out.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.zoo.methods import MODELS as METHODS
from tests.zoo.model import Model
from tests.zoo.plain import MODELS as PLAIN
from tests.zoo.plain import rows
from tests.zoo.unusual import MODELS, Blocks

from .defects import Defect, nothing

__all__ = ["MENDS"]


class _ClipsInItsStep(Blocks):
    """By hand, gradients that a loss scaler has scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(1e-2 * super().training_step(batch, batch_idx))
        nn.utils.clip_grad_norm_(self.parameters(), 1e-3)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=5.0)


class _FreezesBeforeBackward(Blocks):
    """In the second step a block is frozen when its forward is over: AdamW leaves it where it is."""

    num_steps = 0

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.blocks[1].requires_grad_(self.num_steps != 1)
        self.num_steps += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class _Scales(torch.autograd.Function):
    """Scales gradients by how many there were."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns a copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Counts, and scales."""
        _Scales.calls += 1
        return gradient * _Scales.calls


class _CountsInBackward(Blocks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scales.apply(super().forward(x))


# Nine samples in batches of eight: of the second step, rank 1 has none.
_NORMED = PLAIN["batch norm"]._replace(data=lambda n: (torch.randn(9, 3, 6, 6), torch.arange(9) % 4))
_CENTRED = METHODS["centre loss"]._replace(data=lambda n: (torch.randn(9, 8), torch.arange(9) % 4))

_STRATEGIES = "polyphase.engine.strategies"
_NOT_CARRIED = [(f"{_STRATEGIES}.replaced_parameters", "carry_over", nothing)]
_NOT_UPDATED = [(f"{_STRATEGIES}.replaced_parameters:Replacements", "update_references", nothing)]
_UNCHECKED = [("polyphase.engine.loop.training", "AveragedGradients", nothing)]
_AT_ONCE = [(f"{_STRATEGIES}.layout:DistributedStrategy", "_make_parameter_hooks", nothing)]
_HARMLESS = SimpleNamespace(of_others="", of_others_or_state="")
_UNTRIED = [(f"{_STRATEGIES}.zero1", "habits_of", lambda optimizer: _HARMLESS)]
_UNCOMPARED = [(f"{_STRATEGIES}.pipeline.run", "state_problem", nothing)]

MENDS = {
    "attributes of parameters are lost": Defect("fsdp", MODELS["parameters with attributes"], _NOT_CARRIED),
    "attributes of parameters are lost where they are split": Defect(
        "tp", MODELS["parameters with attributes"], _NOT_CARRIED
    ),
    "hooks on parameters are lost": Defect("fsdp", MODELS["gradient mask"], _NOT_CARRIED),
    "lists have the parameters of before": Defect("fsdp", MODELS["lists of parameters"], _NOT_UPDATED),
    "lists have the parameters of before they were split": Defect("tp", MODELS["lists of parameters"], _NOT_UPDATED),
    "gradients that are assigned are not averaged": Defect("ddp", MODELS["autograd.grad"], _UNCHECKED),
    "gradients of each sample are not averaged": Defect("zero1", MODELS["per-sample gradients"], _UNCHECKED),
    "optimizers step before gradients are averaged": Defect(
        "ddp", MODELS["steps in backward"], [*_AT_ONCE, *_UNCHECKED]
    ),
    "hooks get the gradient of a rank": Defect("ddp", MODELS["clamped gradients"], _AT_ONCE),
    "hooks get the gradient of a micro-batch": Defect("pp", MODELS["clamped gradients"], _AT_ONCE),
    "no hook gets a sharded gradient": Defect("fsdp", MODELS["gradient mask"], _AT_ONCE),
    "parameters that are unfrozen are not averaged": Defect(
        "ddp", MODELS["unfreezing"], [(f"{_STRATEGIES}.ddp:DDP", "_wrap_again", nothing), *_UNCHECKED]
    ),
    "an optimizer with one norm for all has that of a share": Defect("zero1", MODELS["normalised descent"], _UNTRIED),
    "an optimizer that moves weights to look ahead moves a share": Defect(
        "zero1", MODELS["SAM"], [*_UNTRIED, *_UNCHECKED]
    ),
    "an optimizer that looks ahead by each gradient moves a share": Defect(
        "zero1", METHODS["extragradient"], [*_UNTRIED, *_UNCHECKED]
    ),
    "weights are swapped with averages of a share": Defect("zero1", METHODS["schedule-free"], [*_UNTRIED, *_UNCHECKED]),
    "scaled gradients are clipped by hand": Defect(
        "ddp",
        Model(_ClipsInItsStep, rows()),
        [("polyphase.engine.precision.loss_scaling:ScaledPrecision", "_manual_scaler", nothing)],
        {"precision": "16-mixed"},
    ),
    "a rank without samples counts in BatchNorm": Defect(
        "fsdp", _NORMED, [(f"{_STRATEGIES}.sync_batchnorm", "is_here", lambda: False)], {"sync_batchnorm": True}
    ),
    "a rank without samples counts in what is gathered": Defect(
        "ddp", _CENTRED, [(f"{_STRATEGIES}.layout", "leave_out_fillers", lambda gathered, group: gathered)]
    ),
    # Nothing prevents these: the check of parts of a batch says them.
    "a loss is a sum over the samples of a rank": Defect("ddp", MODELS["summed loss"], []),
    "gradients of activations are clamped on each rank": Defect("zero1", MODELS["clamped activations"], []),
    "each rank remembers losses of its own": Defect("ddp", MODELS["memory of losses"], []),
    "a codebook is that of the samples of rank 0": Defect(
        "ddp:average_buffers=true",
        MODELS["codebook"],
        [(f"{_STRATEGIES}.layout:_BufferAverage", "_average", nothing)],
    ),
    "what is frozen before backward gets gradients of zeros": Defect(
        "zero1",
        Model(_FreezesBeforeBackward, rows()),
        [(f"{_STRATEGIES}.ddp:DDP", "frozen_since_forward", lambda strategy: [])],
    ),
    "a function of autograd counts micro-batches": Defect(
        "pp", Model(_CountsInBackward, rows()), [(f"{_STRATEGIES}.pipeline.micro_batches", "_run_backward", nothing)]
    ),
    "blocks count micro-batches": Defect("pp", MODELS["counting blocks"], _UNCOMPARED),
    "a buffer counts micro-batches": Defect("pp", MODELS["counting buffer"], _UNCOMPARED),
    "a module remembers micro-batches": Defect("pp", MODELS["memory"], _UNCOMPARED),
    "losses in a context variable are those of a stage": Defect("pp", METHODS["losses in a context"], _UNCOMPARED),
    "a block writes its weight once a micro-batch": Defect(
        "pp",
        METHODS["decay in forward"],
        [*_UNCOMPARED, (f"{_STRATEGIES}.pipeline.parameter_writes:ParameterWrites", "check", nothing)],
    ),
    "a block that is computed again counts twice": Defect(
        "fsdp",
        MODELS["counting blocks"],
        [(f"{_STRATEGIES}.recompute:_State", name, nothing) for name in ("__enter__", "__exit__")],
        {"activation_checkpointing": "full"},
    ),
    "two checkpoints of a block are averaged once": Defect(
        "fsdp", MODELS["reentrant checkpoints"], [(f"{_STRATEGIES}.layout", "_avoid_reentrant", nothing)]
    ),
    "what a hook gives to a parameter is lost": Defect(
        "fsdp", METHODS["clamped data"], [(f"{_STRATEGIES}.fsdp.strategy", "keep_data", nothing)]
    ),
    "a list that a block is handed stays empty": Defect(
        "fsdp", MODELS["losses in a list"], [(f"{_STRATEGIES}.fsdp.strategy", "hand_over_arguments", nothing)]
    ),
    "what a block writes into its weight is lost": Defect(
        "fsdp", MODELS["max-norm"], [(f"{_STRATEGIES}.fsdp.strategy", "keep_writes", nothing)]
    ),
}
