"""The table of the flag `finetune`, and the options after its colon. Torch is not needed to read or check them."""

import dataclasses

__all__ = ["ALL_LINEAR", "FINETUNES", "LoRAOptions"]

FINETUNES = {
    "none": "the module is trained as it is",
    "lora": "all of it is frozen, and two small matrices beside each linear layer are trained",
}
"""Values of the flag by name, with what each trains."""

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """The options of ``lora``."""

    rank: int = 8
    """Number of rows of A and columns of B. `lora:8` is short for `lora:rank=8`."""
    alpha: int | None = None
    """The change of a layer is multiplied by alpha / rank. None: twice the rank."""
    dropout: float = 0.0
    """Share of the inputs of A that are dropped in training."""
    targets: str = ALL_LINEAR
    """Names of the layers that get adapters, with a + in between: `q_proj+v_proj`, or longer ones, from their end.
    `"all-linear"`: the linear layers of the repeated blocks; without blocks, all."""
