"""The names that transformers gives to tensors of a file when it reads them into one of its models.

Files of older versions and of other authors have other names (`LayerNorm.gamma`, `language_model.model.` for
`model.language_model.`), and names of a base model lack a prefix, or have an additional one. transformers has a table
of them for each model (`transformers.conversion_mapping`). This module follows it for renamed tensors only: where
transformers merges several tensors into one (the experts of a Mixtral), each rank would have to read all of them.
"""

import importlib
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

__all__ = ["names_of_transformers"]


def names_of_transformers(module: nn.Module, keys: Collection[str], state: Collection[str]) -> dict[str, str | None]:
    """Maps each key in a file to its name in `module`, or None if transformers ignores it; {} for other modules.

    Args:
        module: a model of transformers, or any other.
        keys: all keys of the files.
        state: the names in the state of `module`.

    Raises:
        ValueError: transformers merges several tensors into one, or gives two the same name.
    """
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(module, library.PreTrainedModel):
        return {}
    try:
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    except (ImportError, AttributeError):  # before version 5
        return {}
    merging = library.core_model_loading.WeightConverter
    unexpected = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()  # transformers: PreTrainedModel
    names: dict[str, str | None] = {}
    for key in sorted(keys):  # in the order of transformers: the conversion of a name may depend on an earlier one
        name = key
        for transform in (entry for entry in mapping if not isinstance(entry, merging)):
            name, _ = transform.rename_source_key(name)
        name = _with_prefix(name, module.base_model_prefix, state)
        if name not in state:
            name = key if key in state else name
        if name not in state:
            _check_not_merged(module, key, name, [entry for entry in mapping if isinstance(entry, merging)])
        is_left_out = name not in state and any(re.search(pattern, name) for pattern in unexpected)
        names[key] = None if is_left_out else name
    _check_unique(module, names)
    return names


def _with_prefix(name: str, prefix: str, state: Collection[str]) -> str:
    """Adds the base model's prefix to a name, or takes it away, if that makes it a name of the module."""
    without = name.removeprefix(f"{prefix}.")
    if not prefix or name in state:
        return name
    return next((other for other in (without, f"{prefix}.{name}") if other in state), name)


def _check_not_merged(module: nn.Module, key: str, name: str, converters: Collection[Any]) -> None:
    for converter in converters:
        target, pattern = converter.rename_source_key(name)
        if pattern is not None:
            kind = type(module).__name__
            raise ValueError(
                f"transformers merges {key!r} and others into {target!r} of {kind} (pattern {pattern!r}), which a rank"
                " can't do for its part alone. Write the weights once with the module's own names, and read"
                f" those: {kind}.from_pretrained(folder).save_pretrained(other, save_original_format=False)."
            )


def _check_unique(module: nn.Module, names: Mapping[str, str | None]) -> None:
    seen: dict[str, str] = {}
    for key, name in names.items():
        if name is not None and seen.setdefault(name, key) != key:
            raise ValueError(
                f"{seen[name]!r} and {key!r} are both {name!r} of {type(module).__name__}: leave one of them out by"
                " `ignore`."
            )
