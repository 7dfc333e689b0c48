"""Training methods as the code of their papers has them: inner loops, teachers, norms, penalties, losses by hand."""

import copy
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear, mse_loss

from .model import Model, Zoo
from .plain import GAN, Block, rows
from .unusual import WIDTH, Blocks

# --- gradients of gradients, and gradients by hand


class MAML(Blocks):
    """Each sample is a task: a step on its own loss, whose gradient is differentiated, and the loss after this step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = dict(self.named_parameters())
        losses = []
        for x, y in zip(*(tensor.split(1) for tensor in batch), strict=True):
            loss = cross_entropy(functional_call(self, weights, (x,)), y)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            adapted = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
            losses.append(cross_entropy(functional_call(self, adapted, (x,)), y))
        return torch.stack(losses).mean()


class HeadOfTask(Blocks):
    """The same for its head alone (ANIL), of a gradient that is not differentiated."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        x = self.into(inputs)
        for block in self.blocks:
            x = block(x)
        wrong = self.head(x).softmax(1) - nn.functional.one_hot(classes, 4)
        weights = self.head.weight - 0.1 * wrong.detach()[:, :, None] * x.detach()[:, None]
        return cross_entropy(torch.einsum("noi,ni->no", weights, x) + self.head.bias, classes)


class Adversarial(Blocks):
    """Trains on samples that were moved along the sign of their gradient (FGSM)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        moved = inputs.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(self(moved), classes), moved)
        return cross_entropy(self(inputs), classes) + cross_entropy(self(inputs + 0.1 * gradient.sign()), classes)


class Surgery(Blocks):
    """Two losses, of whose gradients the second loses what works against the first (PCGrad)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, classes = batch
        optimizer = self.optimizers()
        found = []
        for loss in (cross_entropy(self(inputs), classes), self(inputs).square().mean()):
            optimizer.zero_grad()
            self.manual_backward(loss)
            found.append([p.grad.clone() for p in self.parameters()])
        for p, a, b in zip(self.parameters(), *found, strict=True):
            against = (a * b).sum().clamp(max=0) / a.square().sum().clamp(min=1e-12)
            p.grad = a + b - against * a
        optimizer.step()


class EverySecond(Blocks):
    """Accumulates two batches by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class Critic(GAN):
    """A Wasserstein GAN: two steps of the critic for one of the generator, and its weights are clipped."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        ours, theirs = self.optimizers()
        for _ in range(2):
            self.toggle_optimizer(theirs)
            theirs.zero_grad()
            made = self.generator(noise).detach()
            self.manual_backward(self.discriminator(made).mean() - self.discriminator(real).mean())
            theirs.step()
            self.untoggle_optimizer(theirs)
            with torch.no_grad():
                for p in self.discriminator.parameters():
                    p.clamp_(-0.1, 0.1)
        self.toggle_optimizer(ours)
        ours.zero_grad()
        fooled = self.discriminator(self.generator(noise))
        self.manual_backward(binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled)))
        ours.step()
        self.untoggle_optimizer(ours)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.3 * gradient


class Reversal(Blocks):
    """A second head, against which the features are trained (DANN)."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        x = self.into(inputs)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), classes) + cross_entropy(self.domain(_Reversed.apply(x)), classes % 2)


# --- teachers, centres and codebooks


class SelfDistilled(Blocks):
    """Taught by its own average, around a centre of what the teacher says on all ranks (DINO)."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(nn.Sequential(self.into, *self.blocks, self.head)).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, _ = batch
        with torch.no_grad():
            said = self.teacher(inputs + 0.1)
            mean = self.all_gather(said.mean(0)).view(-1, 4).mean(0)
        loss = cross_entropy(self(inputs), ((said - self.centre) / 0.1).softmax(1))
        self.centre.lerp_(mean, 0.5)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        student = nn.Sequential(self.into, *self.blocks, self.head)
        with torch.no_grad():
            for mean, value in zip(self.teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(value, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class SharedCodes(Zoo):
    """A codebook of averages (VQ-VAE) whose sums are those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("sizes", torch.ones(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.encoder(batch[0])
        nearest = torch.cdist(x, self.codes).argmin(1)
        codes = self.codes[nearest]
        with torch.no_grad():
            one_hot = nn.functional.one_hot(nearest, 6).to(x)
            sums = torch.cat([one_hot.T @ x, one_hot.sum(0)[:, None]], 1)
            sums = self.all_gather(sums).view(-1, 6, WIDTH + 1).sum(0)
            self.codes.mul_(self.sizes[:, None]).lerp_(sums[:, :-1], 0.2)
            self.sizes.lerp_(sums[:, -1], 0.2)
            self.codes.div_(self.sizes[:, None])
        return mse_loss(self.decoder(x + (codes - x).detach()), batch[0]) + 0.25 * mse_loss(x, codes)


class CentreLoss(Blocks):
    """Pulls what it says to the sum over all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        x = self(inputs)
        total = self.all_gather(x.detach().sum(0)).view(-1, 4).sum(0)
        return cross_entropy(x, classes) + (x - total / 8).square().mean()


class Imitates(Blocks):
    """Compares features with those of a frozen teacher, collected by forward hooks on the blocks of both."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)
        self.seen: dict[str, list[Tensor]] = {"blocks": [], "teacher": []}
        for name, blocks in (("blocks", self.blocks), ("teacher", self.teacher)):
            for block in blocks:
                block.register_forward_hook(lambda module, args, out, name=name: self.seen[name].append(out))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        x = taught = self.into(inputs)
        for block, teacher in zip(self.blocks, self.teacher, strict=True):
            x, taught = block(x), teacher(taught)
        loss = cross_entropy(self.head(x), classes)
        loss = loss + sum(mse_loss(a, b.detach() * 0.5) for a, b in zip(*self.seen.values(), strict=True))
        for seen in self.seen.values():
            seen.clear()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


# --- weights that are computed or written


class Quantised(nn.Module):
    """Three values for the weights of a layer, by their mean size, with the gradient of the weights (BitNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + linear(nn.functional.gelu(linear(x, self._few(self.up))), self._few(self.down))

    @staticmethod
    def _few(layer: nn.Linear) -> Tensor:
        scale = layer.weight.abs().mean()
        few = (layer.weight / scale).round().clamp(-1, 1) * scale
        return layer.weight + (few - layer.weight).detach()


class Ternary(Blocks):
    block = Quantised


class LowRank(nn.Module):
    """A frozen weight and the product of two small ones, added up in each forward (LoRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) / 4), nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + linear(x, self.base.weight + self.b @ self.a, self.base.bias).tanh()


class Adapted(Blocks):
    block = LowRank

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Generated(Blocks):
    """The weights of its head are what another layer makes of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.make = nn.Parameter(torch.randn(4)), nn.Linear(4, 4 * WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        x = self.into(inputs)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x) + linear(x, self.make(self.condition).view(4, WIDTH)), classes)


class Decaying(Block):
    """Shrinks its weight each time before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.mul_(0.9)
        return super().forward(x)


class Decays(Blocks):
    block = Decaying


class Clamped(Blocks):
    """Replaces the data of its head after each step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for p in self.head.parameters():
            p.data = p.data.clamp(-0.1, 0.1)


class FirstBatch(nn.Module):
    """A scale that is set by the first batch it sees (ActNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("is_set", torch.zeros(()))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.is_set.fill_(True)
        return x + self.linear(x * self.scale).tanh()


class ActNorm(Blocks):
    block = FirstBatch


class OldWeightNorm(Blocks):
    """torch's older weight norm: a pre-hook that sets a plain attribute in place of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            nn.utils.weight_norm(block.up)


class Universal(Zoo):
    """One block, called four times; its embedding is its output layer (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.out = nn.Embedding(12, WIDTH), Block(), nn.Linear(WIDTH, 12, bias=False)
        self.out.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, following = batch
        x = self.embed(tokens)
        for _ in range(4):
            x = self.block(x)
        return cross_entropy(self.out(x).flatten(0, 1), following.flatten())


class BuiltLate(Blocks):
    """Makes its blocks in `configure_model`, with random numbers of their own."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.blocks = nn.ModuleList(Block() for _ in range(4))


# --- losses


class Gated(nn.Module):
    """Experts that all compute, mixed by a router, which returns how unevenly it chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, uneven: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        made = torch.stack([expert(x).tanh() for expert in self.experts], -1)
        chosen = nn.functional.one_hot(shares.argmax(-1), 3).float()
        return x + (made * shares[:, None]).sum(-1), uneven + 3 * (shares.mean(0) * chosen.mean(0)).sum()


class Routed(Blocks):
    block = Gated

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        x, uneven = self.into(inputs), inputs.new_zeros(())
        for block in self.blocks:
            x, uneven = block(x, uneven)
        return cross_entropy(self.head(x), classes) + 0.1 * uneven


class WritesAMapping(Block):
    def forward(self, x: Tensor, *, losses: dict[int, Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        losses[id(self)] = x.square().mean()
        return x


class Mapped(Blocks):
    """Blocks write their losses into a dict that they are handed by its name."""

    block = WritesAMapping

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        x, losses = self.into(inputs), {}
        for block in self.blocks:
            x = block(x, losses=losses)
        return cross_entropy(self.head(x), classes) + 0.1 * sum(losses.values())


_captured: ContextVar[Any] = ContextVar("_captured", default=None)


class Captured(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if _captured.get() is not None:
            _captured.get().append(x.square().mean())
        return x


class Captures(Blocks):
    """Blocks append their losses to a list in a context variable, as transformers collects router logits."""

    block = Captured

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        token = _captured.set([])
        found = self(inputs)
        losses = _captured.get()
        _captured.reset(token)
        return cross_entropy(found, classes) + 0.1 * sum(losses)


class Supervised(Blocks):
    """One head after each block."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, classes = batch
        x, losses = self.into(inputs), []
        for block in self.blocks:
            x = block(x)
            losses.append(cross_entropy(self.head(x), classes))
        return torch.stack(losses).mean()


class Uncertain(Blocks):
    """Two tasks, weighed by two 0-d parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.ParameterList(nn.Parameter(torch.tensor(value)) for value in (0.0, 0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        found = self(inputs)
        losses = cross_entropy(found, classes), found.square().mean()
        return sum(loss * (-log).exp() + log for loss, log in zip(losses, self.logs, strict=True))


class Orthogonal(Blocks):
    """A penalty on all matrices."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = sum((w @ w.T - torch.eye(len(w))).square().mean() for w in self.parameters() if w.dim() > 1)
        return super().training_step(batch, batch_idx) + 0.1 * penalty


# --- optimizers


class TrustRatio(torch.optim.SGD):
    """Each tensor moves by a part of its own norm (LARS), which is read as a number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.mul_(0.1 * float(p.norm()) / float(p.grad.norm()))
        super().step()
        return loss


class LooksAhead(torch.optim.SGD):
    """The extragradient method: the gradient of a step is that at the place to which all parameters would move."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        known = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [0.5 * p.grad for p in known]
        for p, move in zip(known, moves, strict=True):
            p.sub_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(known, moves, strict=True):
            p.add_(move)
        super().step()
        return loss


class Extragradient(Blocks):
    def configure_optimizers(self) -> Any:
        return LooksAhead(self.parameters(), lr=0.05)


class LARS(Blocks):
    def configure_optimizers(self) -> Any:
        return TrustRatio(self.parameters(), lr=0.05)


class Averaging(torch.optim.SGD):
    """Keeps an average of the weights, and swaps it with them when it is asked to (schedule-free)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for p, state in self._held():
            state.setdefault("mean", p.clone()).lerp_(p, 0.5)
        return loss

    @torch.no_grad()
    def swap(self) -> None:
        for p, state in self._held():
            if "mean" in state:
                now = p.clone()
                p.copy_(state["mean"])
                state["mean"].copy_(now)

    def _held(self) -> Any:
        return ((p, self.state[p]) for group in self.param_groups for p in group["params"])


class ScheduleFree(Blocks):
    def configure_optimizers(self) -> Any:
        return Averaging(self.parameters(), lr=0.05)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._swap()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._swap()

    def _swap(self) -> None:
        optimizer = self.optimizers()
        getattr(optimizer, "optimizer", optimizer).swap()  # Lightning's wrapper has the optimizer


class Centralised(Blocks):
    """Gradients without their mean, and clipped by the norm of each row's weights (adaptive clipping)."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None and p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))
                limit = 0.01 * p.detach().norm(dim=1, keepdim=True)
                p.grad.mul_((limit / p.grad.norm(dim=1, keepdim=True).clamp(min=1e-6)).clamp(max=1))


class Groups(Zoo):
    """Decays no weight of a BatchNorm, which it knows by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        return cross_entropy(self.net(inputs), classes)

    def configure_optimizers(self) -> Any:
        norms = [p for part in self.modules() if isinstance(part, nn.BatchNorm1d) for p in part.parameters()]
        others = [p for part in self.modules() if isinstance(part, nn.Linear) for p in part.parameters()]
        return torch.optim.SGD([{"params": norms}, {"params": others, "weight_decay": 0.5}], lr=0.05)


def _tokens(size: int) -> tuple[Tensor, Tensor]:
    return torch.randint(12, (size, 6)), torch.randint(12, (size, 6))


def _images_and_noise(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 4)


MODELS = {
    "MAML": Model(MAML, rows(), "`functional_call`, `create_graph=True`"),
    "ANIL": Model(HeadOfTask, rows(), "a head for each sample"),
    "FGSM": Model(Adversarial, rows(), "the gradient of the input"),
    "PCGrad": Model(Surgery, rows(), "two backwards, `p.grad` by hand"),
    "accumulation by hand": Model(EverySecond, rows(), "a step every second batch"),
    "WGAN": Model(Critic, _images_and_noise, "toggled, two steps of the critic, clipped weights"),
    "DANN": Model(Reversal, rows(), "a reversed gradient"),
    "DINO": Model(SelfDistilled, rows(), "an averaged teacher, a centre over all ranks"),
    "VQ-VAE": Model(SharedCodes, lambda n: (torch.randn(n, 8),), "a codebook of sums over all ranks"),
    "centre loss": Model(CentreLoss, rows(), "a sum over all ranks"),
    "feature distillation": Model(Imitates, rows(), "forward hooks that collect in lists"),
    "BitNet": Model(Ternary, rows(), "weights of three values, by their mean"),
    "LoRA by hand": Model(Adapted, rows(), "frozen weights, summed in forward"),
    "hypernetwork": Model(Generated, rows(), "weights that a layer makes"),
    "decay in forward": Model(Decays, rows(), "written through `data`"),
    "clamped data": Model(Clamped, rows(), "`p.data = ...` in a hook"),
    "ActNorm": Model(ActNorm, rows(), "a parameter that the first batch sets"),
    "weight norm, old": Model(OldWeightNorm, rows(), "`nn.utils.weight_norm`"),
    "ALBERT": Model(Universal, _tokens, "one block, tied embeddings"),
    "built late": Model(BuiltLate, rows(), "blocks of `configure_model`"),
    "router loss": Model(Routed, rows(), "which is no mean over samples", is_mean=False),
    "losses in a dict": Model(Mapped, rows(), "handed to the blocks by name"),
    "losses in a context": Model(Captures, rows(), "a `ContextVar`"),
    "deep supervision": Model(Supervised, rows(), "one head after each block"),
    "uncertainty weights": Model(Uncertain, rows(), "0-d parameters"),
    "orthogonal penalty": Model(Orthogonal, rows(), "over all matrices"),
    "extragradient": Model(Extragradient, rows(), "gradients at the place ahead"),
    "LARS": Model(LARS, rows(), "norms that are read as numbers"),
    "schedule-free": Model(ScheduleFree, rows(), "weights swapped in hooks"),
    "adaptive clipping": Model(Centralised, rows(), "gradients of rows, in a hook"),
    "groups by class": Model(Groups, rows(), "`isinstance(part, nn.BatchNorm1d)`", sync_batchnorm=True),
}
