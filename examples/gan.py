"""A GAN of two optimizers that take turns, by manual optimization; at the end it draws some digits as text.

python examples/gan.py --strategy ddp --devices 2 --accelerator cpu
"""

import argparse

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional

from polyphase import Engine
from polyphase.models import Digits

NOISE = 16


class GAN(LightningModule):
    def __init__(self, width: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))),
        )
        self.critic = nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(width, 1)),
        )

    def forward(self, num_images: int) -> Tensor:
        return self.generator(torch.randn(num_images, NOISE, device=self.device))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images = batch[0]
        of_generator, of_critic = self.optimizers()
        # The parameters of the other optimizer are frozen meanwhile, and left out of the average over ranks.
        with of_critic.toggle_model():
            loss = functional.softplus(-self.critic(images)).mean()
            loss = loss + functional.softplus(self.critic(self(len(images)).detach())).mean()
            self._step(of_critic, loss, "critic")
        with of_generator.toggle_model():
            self._step(of_generator, functional.softplus(-self.critic(self(len(images)))).mean(), "generator")

    def _step(self, optimizer: torch.optim.Optimizer, loss: Tensor, name: str) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log(f"{name}/loss", loss.detach(), prog_bar=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.generator, self.critic)
        return [torch.optim.Adam(part.parameters(), lr=self.hparams["lr"], betas=(0.5, 0.999)) for part in parts]


def drawn(images: Tensor) -> str:
    """The images side by side, as text."""
    rows = images.squeeze(1).clamp(0, 0.999).mul(5).int().permute(1, 0, 2).tolist()
    return "\n".join("  ".join("".join(" .+#@"[level] * 2 for level in line) for line in row) for row in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto", help="single, ddp, fsdp, zero1, ...")
    parser.add_argument("--devices", default="auto", help="devices per node")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ...")
    parser.add_argument("--max_epochs", type=int, default=100)
    seed_everything(0)
    engine, module = Engine(**vars(parser.parse_args()), limit_val_batches=0, log_every_n_steps=100), GAN()
    engine.fit(module, datamodule=Digits())
    with torch.no_grad():
        images = module(4)  # on all ranks: where weights are sharded, each has a part
    if engine.is_global_zero:
        print(drawn(images.cpu()))
