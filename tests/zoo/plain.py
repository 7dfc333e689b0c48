"""Modules of torch alone, of the kinds that people bring."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

from .model import Model, Zoo


def rows(width: int = 8, classes: int = 4) -> Any:
    return lambda size: (torch.randn(size, width), torch.arange(size) % classes)


def _mlp(width_in: int, width_out: int, blocks: int = 2) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(width_in, 16), nn.ReLU()]
    for _ in range(blocks):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, width_out))


class GAN(Zoo):
    """As in Lightning's documentation: two optimizers, toggled."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = _mlp(4, 8), _mlp(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, noise = batch
        ours, theirs = self.optimizers()
        self.toggle_optimizer(ours)
        fooled = self.discriminator(self.generator(noise))
        ours.zero_grad()
        self.manual_backward(binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled)))
        ours.step()
        self.untoggle_optimizer(ours)
        self.toggle_optimizer(theirs)
        theirs.zero_grad()
        self.manual_backward(self._judged(real, self.generator(noise).detach()))
        theirs.step()
        self.untoggle_optimizer(theirs)

    def _judged(self, real: Tensor, made: Tensor) -> Tensor:
        found, fooled = self.discriminator(real), self.discriminator(made)
        return binary_cross_entropy_with_logits(found, torch.ones_like(found)) + binary_cross_entropy_with_logits(
            fooled, torch.zeros_like(fooled)
        )

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.generator, self.discriminator)]


class WGANGP(GAN):
    """With a penalty on the norm of a gradient, which is differentiated in turn."""

    def _judged(self, real: Tensor, made: Tensor) -> Tensor:
        between = (0.3 * real + 0.7 * made).requires_grad_()
        (gradient,) = torch.autograd.grad(self.discriminator(between).sum(), between, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        return self.discriminator(made).mean() - self.discriminator(real).mean() + 10 * penalty


class GradientPenalty(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.net = _mlp(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        inputs = inputs.requires_grad_()
        losses = cross_entropy(self.net(inputs), classes, reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum(), inputs, create_graph=True)
        return losses.mean() + gradient.square().sum(1).mean()


class VAE(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _mlp(8, 8), _mlp(4, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, noise = batch
        mean, log_variance = self.encoder(inputs).chunk(2, dim=1)
        made = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return mse_loss(made, inputs) + divergence


class PackedLSTM(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(10, 8), nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, lengths, classes = batch
        packed = pack_padded_sequence(self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        return cross_entropy(self.head(hidden[-1]), classes)


class EMATeacher(Zoo):
    """A copy that follows the weights, updated in a hook, and taught from."""

    def __init__(self) -> None:
        super().__init__()
        self.student = _mlp(8, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        found = self.student(inputs)
        return cross_entropy(found, classes) + mse_loss(found, self.teacher(inputs))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for mean, value in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mean.lerp_(value, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.student.parameters(), lr=0.05)


class Classifier(Zoo):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        *inputs, classes = batch
        return cross_entropy(self.net(*inputs), classes)


def _normed(norm: Any) -> nn.Sequential:
    return nn.Sequential(*(norm(part) if isinstance(part, nn.Linear) else part for part in _mlp(8, 4)))


class SparseEmbedding(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.EmbeddingBag(20, 8, sparse=True), _mlp(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, classes = batch
        return cross_entropy(self.net(self.embed(tokens)), classes)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.net = _mlp(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(torch.fft.irfft(torch.fft.rfft(inputs) * self.filter, n=8))


class Mixed(nn.Module):
    """float64 before float32."""

    def __init__(self) -> None:
        super().__init__()
        self.exact, self.net = nn.Linear(8, 8, dtype=torch.float64), _mlp(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(self.exact(inputs.double()).float())


class Contrastive(Zoo):
    """Each sample against those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = _mlp(8, 8), _mlp(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = (nn.functional.normalize(net(side)) for net, side in zip((self.left, self.right), batch, strict=True))
        a, b = (self.all_gather(side, sync_grads=True).flatten(0, 1) for side in (a, b))
        logits = self.scale * a @ b.T
        targets = torch.arange(len(logits), device=logits.device)
        return (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class KeepsItsLoss(Block):
    """Leaves an auxiliary loss on itself, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.auxiliary = found.square().mean()
        return found


class Auxiliary(Zoo):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(8, 16), nn.ModuleList(KeepsItsLoss() for _ in range(4))
        self.head = nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), classes) + 0.1 * sum(block.auxiliary for block in self.blocks)


class Experts(nn.Module):
    """Each sample goes through one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.router = nn.Linear(8, 16), nn.Linear(16, 4)
        self.experts, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        weight, chosen = self.router(x).softmax(-1).max(-1)
        found = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = (chosen == index).nonzero().squeeze(-1)
            if len(mine):
                found = found.index_add(0, mine, expert(x[mine]) * weight[mine, None])
        return self.head(found)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            kept.append(x)
            x = layer(x).relu()
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1)).relu()
        return self.head(x)


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, elementwise_affine=False)
        self.modulate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulate(condition).chunk(2, -1)
        return x + self.down(nn.functional.gelu(self.up(self.norm(x) * (1 + scale) + shift)))


class DiT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.condition = nn.Linear(8, 16), nn.Linear(8, 16)
        self.blocks, self.head = nn.ModuleList(DiTBlock() for _ in range(4)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        condition, x = self.condition(x), self.into(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


class Translation(nn.Module):
    """torch's encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.net = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.net(self.embed(source), self.embed(target))).transpose(1, 2)


class GraphNet(nn.Module):
    """Messages between the nodes of a graph for each sample, by its adjacency."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = (adjacency @ layer(nodes)).relu() + nodes
        return self.head(nodes.mean(1))


def _convs() -> nn.Sequential:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def _classes(*make: Any) -> Any:
    return lambda size: (*(each(size) for each in make), torch.arange(size) % 4)


def _batch_normed() -> nn.Sequential:
    def block(width_in: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(width_in, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())

    return nn.Sequential(block(3), block(6), block(6), nn.Sequential(nn.Flatten(), nn.Linear(216, 4)))


MODELS = {
    "convolutions": Model(lambda: Classifier(_convs()), _classes(lambda n: torch.randn(n, 3, 6, 6))),
    "batch norm": Model(
        lambda: Classifier(_batch_normed()),
        _classes(lambda n: torch.randn(n, 3, 6, 6)),
        "convolutions, `sync_batchnorm=True`",
        sync_batchnorm=True,
    ),
    "GAN": Model(GAN, lambda n: (torch.randn(n, 8), torch.randn(n, 4)), "two optimizers, by hand, toggled"),
    "WGAN-GP": Model(WGANGP, lambda n: (torch.randn(n, 8), torch.randn(n, 4)), "and a gradient penalty"),
    "gradient penalty": Model(GradientPenalty, rows(), "`create_graph=True`"),
    "VAE": Model(VAE, lambda n: (torch.randn(n, 8), torch.randn(n, 4))),
    "LSTM": Model(
        PackedLSTM,
        _classes(lambda n: torch.randint(10, (n, 6)), lambda n: torch.randint(1, 7, (n,))),
        "packed sequences",
    ),
    "EMA teacher": Model(EMATeacher, rows(), "updated in a hook, taught from"),
    "weight norm": Model(lambda: Classifier(_normed(parametrizations.weight_norm)), rows()),
    "spectral norm": Model(lambda: Classifier(_normed(parametrizations.spectral_norm)), rows()),
    "sparse embedding": Model(SparseEmbedding, _classes(lambda n: torch.randint(20, (n, 5)))),
    "complex": Model(lambda: Classifier(Complex()), rows(), "a complex parameter beside real ones"),
    "mixed dtypes": Model(lambda: Classifier(Mixed()), rows(), "float64 and float32"),
    "contrastive": Model(
        Contrastive, lambda n: (torch.randn(n, 8), torch.randn(n, 8)), "`self.all_gather`, a 0-d scale"
    ),
    "auxiliary loss": Model(Auxiliary, rows(), "kept on the blocks"),
    "mixture of experts": Model(lambda: Classifier(Experts()), rows(), "one expert for a sample"),
    "U-Net": Model(lambda: Classifier(UNet()), rows(), "skip connections past blocks"),
    "DiT": Model(lambda: Classifier(DiT()), rows(), "one condition for all blocks"),
    "nn.Transformer": Model(
        lambda: Classifier(Translation()),
        lambda n: (torch.randint(12, (n, 5)), torch.randint(12, (n, 6)), torch.randint(12, (n, 6))),
        "encoder and decoder",
    ),
    "graph network": Model(
        lambda: Classifier(GraphNet()), _classes(lambda n: torch.randn(n, 5, 8), lambda n: torch.rand(n, 5, 5).round())
    ),
}
