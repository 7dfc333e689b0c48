"""The closed sets of the engine's flags as types: what an editor completes, and what the flags are checked against.

Where a flag may have options after its name (``"hsdp:shard=4"``, ``"powersgd:4"``), or other names can be registered,
the engine's argument is annotated as one of these ``| str``.
"""

from typing import Literal

__all__ = [
    "AcceleratorName",
    "ActivationCheckpointing",
    "Axis",
    "CheckpointFormat",
    "ClipAlgorithm",
    "CompileMode",
    "CompressionName",
    "NonFinitePolicy",
    "Offload",
    "PrecisionName",
    "ProfilerName",
    "StrategyName",
    "UnevenPolicy",
]

Axis = Literal["pp", "replicate", "shard", "tp", "cp"]
"""Axes of the device mesh, outermost first."""

StrategyName = Literal[
    "auto",
    "single",
    "dp",
    "ddp",
    "zero1",
    "fsdp",
    "hsdp",
    "tp",
    "fsdp+tp",
    "hsdp+tp",
    "cp",
    "ddp+cp",
    "fsdp+cp",
    "hsdp+cp",
    "pp",
    "pp+ddp",
    "pp+fsdp",
    "local_sgd",
    "diloco",
    "ps",
]
"""Strategies without the suffix of a launcher and without options."""

AcceleratorName = Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"]
"""Lightning's own accelerators; others can be registered with Lightning."""

PrecisionName = Literal[
    "32-true",
    "bf16-mixed",
    "16-mixed",
    "bf16-true",
    "16-true",
    "64-true",
    "transformer-engine",
    "transformer-engine-float16",
    "16",
    "bf16",
    "32",
    "64",
    16,
    32,
    64,
]
"""Precisions as Lightning takes them; `transformer-engine` with single, ddp and its own strategies."""

CompressionName = Literal["none", "auto", "bf16", "fp16", "int8", "powersgd", "sign", "topk"]
"""Compressions without options."""

CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
"""Modes of `torch.compile`."""

ActivationCheckpointing = Literal["none", "full", "selective"]
"""How much of its activations a block computes again in backward, rather than keeping them."""

Offload = Literal["activations", "optimizer", "parameters"]
"""State that can be kept in host memory; `optimizer` only with `parameters`."""

NonFinitePolicy = Literal["warn", "error", "skip", "ignore"]
"""Responses to a loss or gradient norm that is infinite or NaN."""

UnevenPolicy = Literal["pad", "drop"]
"""Ways to end an epoch in which ranks have different numbers of batches."""

CheckpointFormat = Literal["auto", "file", "directory"]
"""Forms in which a checkpoint is written."""

ClipAlgorithm = Literal["norm", "value"]
"""Methods of gradient clipping."""

ProfilerName = Literal["simple", "advanced", "pytorch", "xla"]
"""Lightning's profilers by name."""
