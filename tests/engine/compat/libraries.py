"""What torch, Lightning and torchmetrics are made of in this process, to see what was replaced in them."""

import sys
from typing import Any

import torch.distributed.tensor


def contents() -> dict[tuple[str, ...], Any]:
    """The attributes of all imported modules, of their classes, and the rules of DTensor, by where they stand."""
    found: dict[tuple[str, ...], Any] = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] not in ("torch", "lightning", "torchmetrics", "lightning_fabric"):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            # torch: `isinstance` asks for `__class__`, at which a deprecated `reduce_op` warns.
            if issubclass(type(value), type) and value.__module__ == name:
                found |= {(name, key, k): v for k, v in list(vars(value).items()) if not k.startswith("__")}
    dispatcher: Any = torch.distributed.tensor.DTensor._op_dispatcher
    for kind, table in (
        ("handlers", dispatcher._custom_op_handlers),
        ("rules", dispatcher.sharding_propagator.op_strategy_funcs),
    ):
        found |= {(kind, str(operator)): rule for operator, rule in table.items()}
    return found


def replaced(before: dict[tuple[str, ...], Any], after: dict[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """What was there before, and is another object after."""
    return sorted(key for key, value in before.items() if after.get(key, value) is not value)


def rules_added(before: dict[tuple[str, ...], Any], after: dict[tuple[str, ...], Any]) -> list[tuple[str, ...]]:
    """The operators to which DTensor has come to have a rule."""
    return sorted(key for key in after.keys() - before.keys() if key[0] in ("handlers", "rules"))
