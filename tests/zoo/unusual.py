"""Modules whose step does more than it returns: state on parameters, gradients by hand, buffers, hooks, memories."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from .model import Model, Zoo
from .plain import Block, rows

WIDTH = 16


class Blocks(Zoo):
    """Four residual blocks between a layer and a head: what all modules of this file are made of."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes = batch
        return cross_entropy(self(inputs), classes)


# --- what hangs on a parameter


class NewTokens(Zoo):
    """Trains only the rows of the embedding that were added, by a hook that masks its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(12, WIDTH), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 12)
        self.register_buffer("is_new", (torch.arange(12) >= 8).float().unsqueeze(1))
        self.embed.weight.register_hook(lambda gradient: gradient * self.is_new)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, following = batch
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), following.flatten())


class ClampedGradients(Blocks):
    """Each gradient is clamped as soon as it is there."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self._clamp)

    def _clamp(self, parameter: Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)  # type: ignore[union-attr]


class Attributes(Blocks):
    """As in Mamba and S4: a parameter says itself how it is to be trained."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter._no_weight_decay = True  # type: ignore[attr-defined]
        self.head.weight._lr = 0.2  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        groups = [
            {
                "params": [p],
                "lr": getattr(p, "_lr", 0.05),
                "weight_decay": 0.0 if hasattr(p, "_no_weight_decay") else 0.5,
            }
            for p in self.parameters()
        ]
        return torch.optim.SGD(groups, lr=0.05)


class EarlyLists(Blocks):
    """Lists of parameters that are made when the module is, and used by the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = [p for block in self.blocks for p in block.parameters()]
        self.fast = [*self.into.parameters(), *self.head.parameters()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": self.slow, "lr": 0.01}, {"params": self.fast}], lr=0.1, momentum=0.9)


# --- gradients by hand


class PerSample(Blocks):
    """Differentially private SGD without its noise: the gradient of each sample is clipped, and their mean assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, classes = batch
        weights = {name: p.detach() for name, p in self.named_parameters()}

        def loss(of: Any, x: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(torch.func.functional_call(self, of, (x[None],)), y[None])

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, inputs, classes)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (1 / norms).clamp(max=1)
        for name, parameter in self.named_parameters():
            parameter.grad = torch.einsum("n,n...->...", factors, gradients[name]) / len(inputs)
        self.optimizers().step()


class AutogradGrad(Blocks):
    """Gradients by `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        for parameter, gradient in zip(self.parameters(), torch.autograd.grad(loss, self.parameters()), strict=True):
            parameter.grad = gradient
        self.optimizers().step()


class StepsInBackward(Blocks):
    """Each parameter has an optimizer of its own, which steps as soon as the gradient is there, and drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        own = {p: torch.optim.SGD([p], lr=0.05) for p in self.parameters()}

        def step(parameter: Any) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(step)
        return list(own.values())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))


class StepsAtBatchEnd(Blocks):
    """Backward in the step, the optimizer's step in the hook after it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().step()


# --- optimizers


class OneNorm(torch.optim.SGD):
    """Divides by the norm of all gradients, as LAMB does before its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([gradient.norm() for gradient in gradients]).norm()
        torch._foreach_div_(gradients, total)
        super().step()
        return loss


class NormalisedDescent(Blocks):
    def configure_optimizers(self) -> Any:
        return OneNorm(self.parameters(), lr=0.05)


class SharpnessAware(torch.optim.SGD):
    """Two calls of the closure: the second one where the first gradient leads to."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        run = torch.enable_grad()(closure)
        loss = run()
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in own]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            p.add_(p.grad, alpha=float(0.05 / norm))
        run()
        for p, value in zip(own, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


class SAM(Blocks):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters(), lr=0.05)


class WarmUp(Blocks):
    """Sets the learning rate in `optimizer_step`, as in Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)


# --- buffers


class Codebook(nn.Module):
    """Vectors that follow the mean of what is nearest to them, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                one_hot = nn.functional.one_hot(nearest, 6).to(x)
                self.codes.lerp_((one_hot.T @ x + self.codes) / (one_hot.sum(0, keepdim=True).T + 1), 0.2)
        return x + (self.codes[nearest] - x).detach()


class VectorQuantised(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.codebook = Codebook()
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return mse_loss(self.decoder(self.codebook(self.encoder(batch[0]))), batch[0])


class Schedule(Blocks):
    """A buffer that counts steps and weighs the loss: the same on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_steps", torch.zeros(()), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) / (1 + self.num_steps)
        self.num_steps += 1
        return loss


# --- what blocks do besides returning


class Counting(Block):
    """Warms up by the number of its calls, which it keeps on itself."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x + min(1.0, self.num_calls / 4) * (super().forward(x) - x)


class Counts(Blocks):
    block = Counting


class ScaledBackward(Blocks):
    """Full backward hooks on blocks, which scale the gradient that passes through."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


class Appending(Block):
    def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        losses.append(x.square().mean())
        return x


class HandedList(Blocks):
    """Blocks append their auxiliary losses to a list that they are handed."""

    block = Appending

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        losses: list[Tensor] = []
        x = self.into(inputs)
        for block in self.blocks:
            x = block(x, losses)
        return cross_entropy(self.head(x), classes) + 0.1 * torch.stack(losses).sum()


class MaxNorm(Block):
    """Keeps the rows of a weight below a norm, each time before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.copy_(torch.renorm(self.up.weight, 2, 0, 0.4))
        return super().forward(x)


class MaxNorms(Blocks):
    block = MaxNorm


class Reentrant(Blocks):
    """torch's older kind of checkpointing, twice through the same blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        return cross_entropy(self(inputs), classes) + cross_entropy(self(-inputs), classes)


# --- state that changes as it trains


class Unfreezes(Blocks):
    """Trains its head first, and its blocks from the second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.blocks.requires_grad_(True)


class Remembers(Blocks):
    """Keeps its last loss on itself, and weighs the next one by it."""

    memory: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.memory = [*(self.memory or []), batch_idx]
        return super().training_step(batch, batch_idx) / len(self.memory)


class Summed(Blocks):
    """A sum over the samples, which is no mean of the sums of ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        return 0.1 * cross_entropy(self(inputs), classes, reduction="sum")


class ClampedActivations(Blocks):
    """Clamps the gradients of activations, which are larger in a mean over fewer samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RemembersLosses(Blocks):
    """Divides by an average of its losses, which it keeps on itself."""

    average: Any = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        weighed = loss / self.average
        self.average = 0.5 * self.average + 0.5 * float(loss)
        return weighed


class ChangesItsHook(Blocks):
    """Gives itself a hook in mid-epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.on_before_optimizer_step = self._halve  # type: ignore[method-assign]

    def _halve(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


def _tokens(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(12, (size, 6)), torch.randint(12, (size, 6))


MODELS = {
    "gradient mask": Model(NewTokens, _tokens, "a hook on a parameter"),
    "clamped gradients": Model(ClampedGradients, rows(), "post-accumulate hooks"),
    "parameters with attributes": Model(Attributes, rows(), "`_no_weight_decay`, `_lr`"),
    "lists of parameters": Model(EarlyLists, rows(), "made in `__init__`"),
    "per-sample gradients": Model(PerSample, rows(), "`vmap(grad)`, assigned by hand"),
    "autograd.grad": Model(AutogradGrad, rows(), "assigned by hand"),
    "steps in backward": Model(StepsInBackward, rows(), "an optimizer for each parameter"),
    "steps at the batch's end": Model(StepsAtBatchEnd, rows(), "in a hook, by hand"),
    "normalised descent": Model(NormalisedDescent, rows(), "one norm for all gradients"),
    "SAM": Model(SAM, rows(), "two calls of the closure"),
    "warm-up by hand": Model(WarmUp, rows(), "`optimizer_step`"),
    "codebook": Model(VectorQuantised, lambda n: (torch.randn(n, 8),), "buffers with statistics of the batch"),
    "counting buffer": Model(Schedule, rows(), "not persistent"),
    "counting blocks": Model(Counts, rows(), "an attribute of the block"),
    "backward hooks": Model(ScaledBackward, rows(), "on blocks"),
    "losses in a list": Model(HandedList, rows(), "handed to the blocks"),
    "max-norm": Model(MaxNorms, rows(), "a weight that is written in forward"),
    "reentrant checkpoints": Model(Reentrant, rows(), "two forwards"),
    "unfreezing": Model(Unfreezes, rows(), "in mid-epoch"),
    "memory": Model(Remembers, rows(), "a list on the module"),
    "summed loss": Model(Summed, rows(), "no mean over samples"),
    "clamped activations": Model(ClampedActivations, rows(), "gradients in backward"),
    "memory of losses": Model(RemembersLosses, rows(), "an average on the module"),
    "hook in mid-epoch": Model(ChangesItsHook, rows(), "given to itself"),
}
