"""Digits and their classifier: a fixed split, and the accuracy it is for."""

import builtins

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from polyphase.models import Digits, DigitsClassifier


def test_the_split_is_fixed_disjoint_and_complete():
    one, two = Digits(), Digits()
    one.setup("fit")
    two.setup("fit")
    images = torch.cat([one.parts[part].tensors[0] for part in ("train", "val", "test")])
    assert images.shape == (1797, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    for part in one.parts:
        assert torch.equal(one.parts[part].tensors[0], two.parts[part].tensors[0])
        shares = one.parts[part].tensors[1].bincount(minlength=10) / len(one.parts[part])
        assert shares.min() > 0.08
    # Pixels sum to the same as those of the whole set: nothing is lost or doubled.
    from sklearn.datasets import load_digits

    assert images.double().sum().item() * 16 == pytest.approx(load_digits().images.sum())


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ModuleNotFoundError("No module named 'sklearn'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "polyphase\[examples\]"'):
        Digits().prepare_data()


def test_it_learns():
    seed_everything(0)
    flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", max_epochs=10, enable_model_summary=False, **flags)
    model, data = DigitsClassifier(), Digits()
    trainer.fit(model, datamodule=data)
    (result,) = trainer.test(model, datamodule=data, verbose=False)
    assert result["test/accuracy"] >= 0.97
    classes = torch.cat(trainer.predict(model, datamodule=data))
    share = (classes == data.parts["test"].tensors[1]).float().mean().item()
    assert share == pytest.approx(result["test/accuracy"], abs=1e-6)
