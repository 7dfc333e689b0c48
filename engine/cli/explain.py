"""The structure that strategies find in a model: the units that are sharded together, and the layers that are split."""

import importlib
import os
import sys

import torch
from lightning.pytorch import LightningModule

from ..flags import choose
from ..strategies import describe_units, make_plan

__all__ = ["explained"]

_MOST_RANKS = 64


def explained(name: str) -> str:
    """The units and the tensor-parallel plan of a model that is built without arguments and without memory.

    Args:
        name: name of a class of `polyphase.models`, or an import path such as ``package.Class``.

    Raises:
        ValueError: there is no such class, it can't be built, or no part of it can be split.
    """
    model = _build(name)
    lines = [describe_units(model), ""]
    sizes = []
    refused: ValueError | None = None
    for size in range(2, _MOST_RANKS + 1):
        try:
            make_plan(model, size)
            sizes.append(size)
        except ValueError as error:
            refused = refused or error
    if not sizes:
        assert refused is not None
        return "\n".join([*lines, f"No tensor parallelism: {refused}"])
    fits = f"tp can be {', '.join(map(str, sizes))} (of up to {_MOST_RANKS})."
    return "\n".join([*lines, str(make_plan(model, sizes[0])), "", fits])


def _build(name: str) -> LightningModule:
    sys.path.insert(0, os.getcwd())  # as in the other commands
    package, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(package or "polyphase.models")
    except ImportError as error:
        raise ValueError(f"can't import {package!r}, where {class_name!r} should be: {error}.") from None
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, LightningModule)
    }
    model_class = classes[choose("model", class_name, classes)]
    try:
        with torch.device("meta"):
            model = model_class()
            model.configure_model()
    except Exception as error:
        raise ValueError(f"{name} can't be built without arguments, so it can't be described: {error}") from error
    return model
