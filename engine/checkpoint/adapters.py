"""The adapters of LoRA (arXiv:2106.09685) among the weights of a checkpoint: merged, or as a folder of peft's.

A layer with an adapter has its own weight as ``layer.base_layer.weight``, and the two matrices of the adapter as
``layer.lora_A.default.weight`` [rank, in] and ``layer.lora_B.default.weight`` [out, rank]: peft's names. Nothing here
needs peft, whose format is public: ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["STATE_KEY", "Adapters", "Weights", "as_peft", "merged"]

STATE_KEY = "FineTuning"
"""The entry among the states of callbacks that has the `Adapters` of a checkpoint."""

Weights = dict[str, tuple[Tensor, Callable[[], Tensor]]]
"""Tensors without content by name, each with the function that reads it."""

_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a module; plain values, which a checkpoint has."""

    rank: int
    alpha: int
    """The product of an adapter's matrices is multiplied by alpha / rank."""
    dropout: float
    names: tuple[str, ...]
    """Names of layers that the user has chosen; empty: all of the repeated blocks."""
    layers: Mapping[str, bool]
    """The name of each layer with an adapter, and whether its weight is [in, out], as that of transformers' Conv1D."""

    @classmethod
    def of(cls, state: Any) -> "Adapters | None":
        """The adapters in the state of a checkpoint's callbacks; None if it has none."""
        plain = state.get(STATE_KEY) if isinstance(state, Mapping) else None
        return None if plain is None else cls(**{**plain, "names": tuple(plain["names"])})

    @property
    def as_plain(self) -> dict[str, Any]:
        """A dictionary of numbers, texts and lists."""
        return {**vars(self), "names": list(self.names), "layers": dict(self.layers)}


def merged(weights: Weights, adapters: Adapters) -> Weights:
    """Returns the weights of the module without adapters, whose effect is added to them; none is read."""
    names = {f"{layer}.base_layer.": f"{layer}." for layer in adapters.layers}
    adapted = {f"{layer}{part}" for layer in adapters.layers for part in (_DOWN, _UP)}
    plain: Weights = {}
    for key, entry in weights.items():
        path, base, last = key.rpartition(".base_layer.")
        layer = f"{path}{base}"
        if layer not in names:
            plain.update({} if key in adapted else {key: entry})
        elif last == "weight":
            plain[f"{names[layer]}{last}"] = entry[0], _sum(weights, path, adapters)
        else:
            plain[f"{names[layer]}{last}"] = entry
    return plain


def _sum(weights: Weights, layer: str, adapters: Adapters) -> Callable[[], Tensor]:
    """Returns the function that reads a layer's weight and its adapter, and adds them in float32 at least."""
    base, down, up = (weights[f"{layer}{part}"][1] for part in (".base_layer.weight", _DOWN, _UP))

    def read() -> Tensor:
        weight = base()
        if not weight.is_floating_point():
            raise ValueError(f"{layer} has a quantised weight ({weight.dtype}), which can't have its adapter merged.")
        dtype = torch.promote_types(weight.dtype, torch.float32)
        change = up().to(dtype) @ down().to(dtype) * (adapters.alpha / adapters.rank)
        return (weight.to(dtype) + (change.T if adapters.layers[layer] else change)).to(weight.dtype)

    return read


def as_peft(weights: Weights, adapters: Adapters, root: str, base: str | None) -> tuple[Weights, dict[str, str]]:
    """Returns the adapters alone by the names that peft gives them in files, and the content of the other file.

    Args:
        weights: all weights of the module.
        adapters: those of the module.
        root: name of the sub-module that peft is to add them to again, "" for the whole module.
        base: name of the model that was fine-tuned, if it has one.

    Raises:
        ValueError: `root` has no adapters, or not all of them.
    """
    prefix = f"{root}." if root else ""
    layers = [layer for layer in adapters.layers if layer.startswith(prefix)]
    if len(layers) < len(adapters.layers):
        outside = next(layer for layer in adapters.layers if layer not in layers)
        raise ValueError(
            f"adapters={root!r} would leave out the adapter of {outside}: give the name of the sub-module that has all"
            " layers with adapters, or '' for the whole module."
        )
    chosen = {
        f"base_model.model.{key.removeprefix(prefix).replace('.default.', '.')}": weights[key]
        for layer in layers
        for key in (f"{layer}{_DOWN}", f"{layer}{_UP}")
    }
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": any(adapters.layers.values()),
        "inference_mode": True,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "peft_type": "LORA",
        "r": adapters.rank,
        "target_modules": _targets(weights, layers, prefix),
        "task_type": None,
    }
    return chosen, {"adapter_config.json": json.dumps(config, indent=2)}


def _targets(weights: Weights, layers: list[str], prefix: str) -> list[str]:
    """The last parts of the layers' names, which other programs read, too; whole names if other modules have them."""
    last = {layer.rpartition(".")[2] for layer in layers}
    owners = {key.rpartition(".")[0].removesuffix(".base_layer") for key in weights if key.startswith(prefix)}
    alike = {owner for owner in owners if owner.rpartition(".")[2] in last and ".lora_" not in owner}
    return sorted(last) if alike == set(layers) else sorted(layer.removeprefix(prefix) for layer in layers)
