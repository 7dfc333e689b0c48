"""What a person sees who runs the demo in a terminal of 80 or 120 columns, when it is over."""

import re
import sys

import pytest

from tests.distributed import ROOT
from tests.pairs import nightly
from tests.terminal import Terminal

SCREEN = """\
Seed set to 0
┏━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━┓
┃   ┃ Name          ┃ Type               ┃ Params ┃ Mode  ┃
┡━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━┩
│ 0 │ net           │ Sequential         │ 0 K │ train │
│ 0 │ val_accuracy  │ MulticlassAccuracy │      0 │ train │
│ 0 │ test_accuracy │ MulticlassAccuracy │      0 │ train │
└───┴───────────────┴────────────────────┴────────┴───────┘
0 K parameters, 0 K trainable, 0 MB; 0 modules in train mode, 0 in eval mode
polyphase 0 | ddp_fork, replicate=0 on cpu | 0-true | global batch 0 = 0 x 0 x 0 | seed 0 | \
logs: lightning_logs/version_0
BatchNorm normalises by the samples of each rank alone, as in any DDP; sync_batchnorm=True: by those of all.
epoch 0/0  0 s  train/loss 0  val/loss 0*  val/accuracy 0
`Trainer.fit` stopped: `max_epochs=0` reached.
epoch 0/0  0 s  train/loss 0  val/loss 0*  val/accuracy 0
0 steps in 0 s, 0% of it waiting for data; 0 samples/s, peak memory 0 MB (largest rank)
logs: lightning_logs/version_0   checkpoints: lightning_logs/version_0/checkpoints
to load it elsewhere:
    DigitsClassifier.load_from_checkpoint('lightning_logs/version_0/checkpoints/epoch=0-step=0.ckpt')
Testing  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  0/0  0:0:0  0 it/s
test accuracy 0
curves: python -m tensorboard.main --logdir lightning_logs/version_0
"""
"""Its numbers are 0."""


@pytest.mark.parametrize("columns", [80, *nightly(120)])
def test_the_last_screen_of_the_demo(columns, tmp_path):
    words = [sys.executable, ROOT / "examples" / "digits.py", "--strategy", "ddp_fork", "--devices", "2"]
    shown = Terminal(columns).run([*words, "--accelerator", "cpu", "--max_epochs", "2"], folder=tmp_path, timeout_s=150)
    assert shown.returncode == 0, shown.rows
    assert max(map(len, shown.rows)) <= columns
    # The terminal breaks full lines, also between words: then a blank is not there.
    text = (
        "".join(row if len(row) == columns else f"{row}\n" for row in shown.rows)
        .replace(f"{tmp_path}/", "")
        .replace(sys.executable, "python")
    )
    assert re.sub(r"\d[\d.,]*\d|\d", "0", text).split() == SCREEN.split(), text
