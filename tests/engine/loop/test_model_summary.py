import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import RichModelSummary
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine


class Layers(LightningModule):
    def __init__(self, example=None):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 300), torch.nn.Linear(300, 1)
        self.second.requires_grad_(False)
        self.example_input_array = example

    def forward(self, x):
        return self.second(self.first(x))

    def training_step(self, batch, batch_idx):
        return self(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


QUIET = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


def shown(capsys, module, **flags):
    engine = Engine(accelerator="cpu", devices=1, max_steps=1, **QUIET, **flags)
    engine.fit(module, DataLoader(TensorDataset(torch.ones(1, 4))))
    return capsys.readouterr().out


def test_what_is_not_known_is_left_out(capsys):
    text = shown(capsys, Layers())
    assert "FLOPs" not in text
    assert "first" in text
    assert "Linear" in text
    assert "1.8 K parameters, 1.5 K trainable, 0.0072 MB; 2 modules in train mode, 0 in eval mode" in text
    assert not [line for line in text.splitlines() if line.endswith(" ")]


def test_what_is_known_is_lightnings_own_table(capsys):
    text = shown(capsys, Layers(torch.ones(1, 4)))
    assert "Total FLOPs: 3.0 K" in text.replace("[bold]", "")


def test_a_summary_of_the_users_own_stays_as_it_is(capsys):
    mine = RichModelSummary(max_depth=2)
    assert "Total FLOPs: 0" in shown(capsys, Layers(), callbacks=[mine])
    assert not shown(capsys, Layers(), enable_model_summary=False)
