"""Silent differences that the strategies prevent: each with what prevents it, which is taken out here.

What is put in its place does nothing, or what torch does by itself. The modules are as their users write them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polyphase.engine.loop.loss_weighting import LossWeighting
from polyphase.engine.precision import clipping
from polyphase.engine.strategies.fsdp import strategy as fsdp
from polyphase.engine.strategies.optimizer_trial import Habits
from polyphase.engine.strategies.pipeline import attribute_writes, gradients, plan, run, strategy
from polyphase.engine.strategies.tensor import strategy as tensor
from tests.callbacks.test_replica_guard_integration import not_added_up
from tests.engine.strategies.fsdp.test_unit_order_integration import Skipping
from tests.engine.strategies.fsdp.test_whole_numbers_integration import LARS
from tests.zoo.model import Model, Zoo
from tests.zoo.plain import MODELS, Auxiliary, Block, Classifier, GradientPenalty, rows
from tests.zoo.unusual import OneNorm

__all__ = ["DEFECTS", "Defect"]


class Defect(NamedTuple):
    """What goes wrong without a word if something is not there."""

    strategy: str
    model: Model
    without: list[tuple[Any, str, Any]]
    """Objects (or ``"module"``, ``"module:object"``), names of their attributes, and what takes their place."""
    flags: dict[str, Any] = {}  # noqa: RUF012


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a check, or of what says a warning."""


class _Blocks(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks, self.head = nn.Linear(8, 16), nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        return cross_entropy(self(inputs), classes)


class _ReadsNorms(_Blocks):
    def configure_optimizers(self) -> Any:
        return LARS(self.parameters())


class _StepsByOneNorm(_Blocks):
    def configure_optimizers(self) -> Any:
        return OneNorm(self.parameters(), lr=0.05)


class _ClipsByHand(_Blocks):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class _KeepsItsLoss(Block):
    auxiliary: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.auxiliary = found.square().mean()
        return found


class _Stale(Auxiliary):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_KeepsItsLoss() for _ in range(4))


class _Drops(Skipping):
    """A rank skips another block than the other one."""

    def skips(self, block: int, batch_idx: int) -> bool:
        return self.training and block == 1 + self.global_rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0], batch_idx)


class _DropsLater(_Drops):
    def skips(self, block: int, batch_idx: int) -> bool:
        return batch_idx == 2 and super().skips(block, batch_idx)


class _ByTokens(_Blocks):
    """A mean over what counts of each batch, which ranks have different numbers of."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes = batch
        counts = classes != 0
        loss = cross_entropy(self(inputs)[counts], classes[counts])
        return {"loss": loss, "weight": counts.sum()}


class _Tied(Zoo):
    """Its embedding is its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(12, 16), nn.ModuleList(Block() for _ in range(4))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 12, bias=False)
        self.out.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, following = batch
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.out(self.norm(x)).flatten(0, 1), following.flatten())


def _norm_here(norm: Tensor, mesh: Any, axes: Any) -> Tensor:
    return norm


_MLP = rows()
_TOKENS: Callable[[int], Any] = lambda n: (torch.randint(12, (n, 6)), torch.randint(12, (n, 6)))  # noqa: E731
_NORMED = Model(
    lambda: Classifier(
        nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)), nn.Linear(8, 4)
        )
    ),
    _MLP,
)

DEFECTS = {
    "an optimizer that reads norms gets those of its shards": Defect(
        "fsdp", Model(_ReadsNorms, _MLP), [(fsdp, "read_whole_numbers", nothing)]
    ),
    "blocks that are skipped mix the shards of others": Defect(
        "fsdp", Model(_Drops, lambda n: (torch.randn(n, 8),)), [(fsdp, "watch_units", nothing)]
    ),
    "blocks that are skipped from the third step on": Defect(
        "fsdp", Model(_DropsLater, lambda n: (torch.randn(n, 8),)), [(fsdp, "watch_units", nothing)]
    ),
    "gradients by hand are not averaged": Defect(
        "fsdp", MODELS["GAN"], [(fsdp, "optimizes_by_hand", lambda module: False)]
    ),
    "clipping by the norm of a shard": Defect(
        "fsdp", Model(_Blocks, _MLP), [(clipping, "_over_ranks", _norm_here)], {"gradient_clip_val": 0.1}
    ),
    "micro-batches that say their weight count alike": Defect(
        "fsdp",
        Model(_ByTokens, _MLP),
        [(LossWeighting, "_by_weight", lambda self, loss, weight, batch_idx: loss)],
    ),
    "a gradient of a gradient lacks terms": Defect(
        "tp", Model(GradientPenalty, _MLP), [(tensor, "refuse_second_backward", nothing)]
    ),
    "gradients of whole parameters are not added up": Defect(
        "tp:sequence_parallel=true",
        Model(_Tied, _TOKENS),
        [(tensor.TensorParallel, "_reduce_replicated_gradients", not_added_up)],
    ),
    "what a block leaves on itself is that of no batch": Defect(
        "pp", Model(_Stale, _MLP), [(attribute_writes.AttributeGuard, "_install", nothing)]
    ),
    "an optimizer with one norm for all has that of a stage": Defect(
        "pp",
        Model(_StepsByOneNorm, _MLP),
        [(strategy, "habits_of", lambda optimizer: Habits("steps each parameter by itself"))],
    ),
    "clipping by hand by the norm of a stage": Defect(
        "pp", Model(_ClipsByHand, _MLP), [(plan, "_may_know_gradient", lambda: True)]
    ),
    "BatchNorm of micro-batches": Defect("pp", _NORMED, [(run, "batch_norm_warning", nothing)]),
    "a spectral norm of micro-batches": Defect("pp", MODELS["spectral norm"], [(run, "buffers_warning", nothing)]),
    "a loss that compares the samples of a batch": Defect(
        "pp", MODELS["contrastive"], [(run, "loss_warning", nothing)]
    ),
    "what two stages hold is trained by each for itself": Defect(
        "pp", Model(_Tied, _TOKENS), [(gradients.StageGradients, "_sum", nothing)]
    ),
}
