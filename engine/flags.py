"""The grammar of the flags, their closed sets and error messages: pure functions of strings, no `torch.distributed`.

A flag is ``name[_launcher][:argument,...]``: ``"fsdp"``, ``"ddp_spawn:static_graph=true"``,
``"hsdp:replicate=2,shard=4"``, ``"powersgd:2,start=100"``. Every error names the value, the allowed values and, if
one is similar, the closest match.
"""

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

__all__ = [
    "ARGUMENTS",
    "LAUNCHERS",
    "VALUES",
    "AcceleratorName",
    "ActivationCheckpointing",
    "Axis",
    "CheckpointFormat",
    "ClipAlgorithm",
    "CompileMode",
    "CompressionName",
    "FinetuneName",
    "Flag",
    "Layout",
    "NonFinitePolicy",
    "Offload",
    "PrecisionName",
    "ProfilerName",
    "RankLossPolicy",
    "StrategyName",
    "UnevenPolicy",
    "as_flag",
    "check_count",
    "check_number",
    "choose",
    "did_you_mean",
    "parse_flag",
    "parse_options",
    "split_launcher",
]

# The closed sets of the engine's flags as types: what an editor completes, and what the flags are checked against.
#
# Where a flag may have options after its name (``"hsdp:shard=4"``, ``"powersgd:4"``), or other names can be registered,
# the engine's argument is annotated as one of these ``| str``.

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
    "bf16-blocks",
    "float8",
    "float8-rowwise",
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

FinetuneName = Literal["none", "lora"]
"""Methods of fine-tuning without options."""

CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
"""Modes of `torch.compile`."""

ActivationCheckpointing = Literal["none", "full", "selective"]
"""How much of its activations a block computes again in backward, rather than keeping them."""

Offload = Literal["activations", "optimizer", "parameters"]
"""State that can be kept in host memory; `optimizer` only with `parameters`."""

NonFinitePolicy = Literal["warn", "error", "skip", "ignore"]
"""Responses to a loss or gradient norm that is infinite or NaN."""

RankLossPolicy = Literal["stop", "continue"]
"""Responses to the end of a rank's process by a signal."""

UnevenPolicy = Literal["pad", "drop"]
"""Ways to end an epoch in which ranks have different numbers of batches."""

CheckpointFormat = Literal["auto", "file", "directory"]
"""Forms in which a checkpoint is written."""

ClipAlgorithm = Literal["norm", "value"]
"""Methods of gradient clipping."""

ProfilerName = Literal["simple", "advanced", "pytorch", "xla"]
"""Lightning's profilers by name."""


LAUNCHERS: Mapping[str, Literal["popen", "spawn", "fork"]] = {
    "": "popen",
    "spawn": "spawn",
    "fork": "fork",
    "notebook": "fork",
}
"""Start method by suffix of the strategy's name; without a suffix the script is run once per device."""


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

_OptionsT = TypeVar("_OptionsT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the device mesh by axis, outermost first; every synchronous strategy is one of these."""

    pp: int = 1
    """Number of pipeline stages."""
    replicate: int = 1
    """Number of full copies of the (sharded) model."""
    shard: int = 1
    """Number of shards that parameters, gradients and optimizer state are cut into."""
    tp: int = 1
    """Number of devices that share one tensor-parallel layer."""
    cp: int = 1
    """Number of devices that share the sequences of their samples."""

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            check_count(f"the size of axis {axis!r}", size)

    @property
    def axes(self) -> dict[str, int]:
        """Size by axis name, outermost axis first."""
        return dataclasses.asdict(self)

    @property
    def split_axes(self) -> dict[str, int]:
        """Size by axis name, without the axes of size 1."""
        return {axis: size for axis, size in self.axes.items() if size > 1}

    @property
    def world_size(self) -> int:
        """Number of processes: the product of all axes."""
        return math.prod(self.axes.values())

    @property
    def num_sharing(self) -> int:
        """Number of processes, one after the other, that have the same samples: those of the axes `tp` and `cp`."""
        return self.tp * self.cp

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.split_axes.items()) or "one device"

    @classmethod
    def derive(cls, world_size: int, *, rest: Axis, **sizes: int | None) -> "Layout":
        """The layout of `world_size` processes with the given axis sizes; axis `rest` gets the remaining factor.

        Raises:
            ValueError: the sizes do not multiply to `world_size`.
        """
        fixed = {axis: size for axis, size in sizes.items() if size is not None}
        for axis, size in fixed.items():
            check_count(f"the size of axis {axis!r}", size)
        product = math.prod(fixed.values())
        if rest not in fixed and world_size % product == 0:
            fixed[rest] = world_size // product
        layout = cls(**fixed)
        if layout.world_size != world_size:
            factors = " x ".join(f"{axis}={size}" for axis, size in fixed.items())
            remedy = "change the sizes, or `devices` and `num_nodes`, so that the product is the number of processes"
            raise ValueError(
                f"the layout {factors} = {product} does not fit {world_size} process(es): {remedy}"
                + (f", or leave out {rest!r} to have it derived." if sizes.get(rest) is not None else ".")
            )
        return layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag taken apart: ``name:value,key=text,...``."""

    name: str
    """The text before the colon."""
    value: str | None = None
    """The one bare argument, such as the rank in ``powersgd:2``."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The ``key=text`` arguments, not yet converted."""


def choose(kind: str, text: str, allowed: Collection[str]) -> str:
    """`text` itself if it is allowed.

    Args:
        kind: noun for the message, such as "strategy".
        text: written by the user.
        allowed: all allowed texts.

    Raises:
        ValueError: it is not; the message lists `allowed` and names the closest one.
    """
    if isinstance(text, str) and text in allowed:
        return text
    by_lower = {name.lower(): name for name in allowed}
    hint = did_you_mean(str(text).lower(), by_lower, lambda name: repr(by_lower[name]), cutoff=0.5, kind=kind)
    raise ValueError(f"unknown {kind} {text!r}.{hint} Allowed: {', '.join(sorted(allowed)) or 'none'}.")


def did_you_mean(
    text: str,
    allowed: Iterable[str],
    shown: Callable[[str], str] = repr,
    *,
    cutoff: float = 0.6,
    kind: str = "",
) -> str:
    """Returns a hint to append to an error: a space and "Did you mean ...?"; empty if none of `allowed` is similar.

    Args:
        text: written by the user.
        allowed: the valid names.
        shown: formats the closest one.
        cutoff: least similarity, from 0 to 1.
        kind: of `synonyms.meaning`: a word of another tool is answered with ours, however it is spelled.
    """
    meant = _meaning(kind, text)
    if meant is not None:
        return f" Did you mean {meant}?"
    near = difflib.get_close_matches(text, list(allowed), n=1, cutoff=cutoff)
    return f" Did you mean {shown(near[0])}?" if near else ""


def check_count(name: str, value: Any, *, least: int = 1, most: float = math.inf) -> int:
    """`value` itself if it is a whole number from `least` to `most`.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bound = "" if math.isinf(most) else f" and at most {most}"
        raise ValueError(f"{name} must be a whole number of at least {least}{bound}, but got {value!r}.")
    return value


def check_number(name: str, value: Any, *, above: float | None = None, most: float = 1e9) -> float:
    """`value` itself if it is a number from 0, or greater than `above`, to `most`.

    Raises:
        ValueError: it is not.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most or (above is not None and value <= above):
        least = "at least 0" if above is None else f"greater than {above:g}"
        bound = "" if math.isinf(most) or not is_number or not value > most else f" and at most {most:g}"
        raise ValueError(f"{name} must be {least}{bound}, but got {value!r}.")
    return value


def parse_flag(text: str, kind: str = "the flag") -> Flag:
    """Takes ``name:value,key=text`` apart.

    Raises:
        ValueError: an empty name, an argument without a value, a second bare value, or a key given twice.
    """
    if not isinstance(text, str):
        raise ValueError(f"{kind} must be a text such as 'name' or 'name:key=value', but got {text!r}.")
    name, _, arguments = text.strip().partition(":")
    if not name:
        raise ValueError(f"{kind} {text!r} has no name; write name or name:key=value,...")
    value: str | None = None
    options: dict[str, str] = {}
    for argument in filter(None, (part.strip() for part in arguments.split(","))):
        key, equals, word = (part.strip() for part in argument.partition("="))
        if not equals and value is None and not options:
            value = key
        elif not equals or not key or not word:
            raise ValueError(f"can't read {argument!r} in the flag {text!r}; write name:key=value,key=value")
        elif key in options:
            raise ValueError(f"{key!r} stands twice in the flag {text!r}; give it once.")
        else:
            options[key] = word
    return Flag(name=name, value=value, options=options)


def split_launcher(name: str) -> tuple[str, str]:
    """``"fsdp_spawn"`` -> ``("fsdp", "spawn")``; the launcher is ``""`` where the name has no suffix for one."""
    for suffix in LAUNCHERS:
        if suffix and name.endswith(f"_{suffix}"):
            return name[: -len(suffix) - 1], suffix
    return name, ""


def parse_options(kind: str, cls: type[_OptionsT], options: Mapping[str, str]) -> _OptionsT:
    """Makes a `cls`, a dataclass or any class, converting texts to its constructor's arguments by their types.

    Raises:
        ValueError: an unknown key, or a text that is not of the field's type.
    """
    types = {name: type_ for name, type_ in typing.get_type_hints(cls.__init__).items() if name != "return"}
    values = {
        choose(f"option of {kind}", key, types): _convert(f"{kind}:{key}", text, types[key])
        for key, text in options.items()
    }
    return cls(**values)


def _convert(name: str, text: str, type_: Any) -> Any:
    choices = [option for option in typing.get_args(type_) if option is not type(None)] or [type_]
    if typing.get_origin(type_) is Literal:
        return choose(f"value of {name}", text, choices)
    target = choices[0]
    if target is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError(f"{name} must be true or false, but got {text!r}.")
    try:
        return target(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}.get(target, target.__name__)
        raise ValueError(f"{name} must be {kind}, but got {text!r}.") from None


# --- the names of other tools for our flags: the hints of errors, and the tables of the page "coming from"


ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "Hugging Face's Trainer": {
        "bf16": "precision='bf16-mixed'",
        "bf16_full_eval": "precision='bf16-true'",
        "dataloader_num_workers": "DataLoader(num_workers=...)",
        "eval_steps": "val_check_interval",
        "eval_strategy": "check_val_every_n_epoch",
        "evaluation_strategy": "check_val_every_n_epoch",
        "fp16": "precision='16-mixed'",
        "gradient_accumulation_steps": "accumulate_grad_batches",
        "gradient_checkpointing": "activation_checkpointing='full'",
        "learning_rate": "configure_optimizers() of the module",
        "load_best_model_at_end": "fit(...), then validate(ckpt_path='best')",
        "logging_dir": "default_root_dir",
        "logging_steps": "log_every_n_steps",
        "lr_scheduler_type": "configure_optimizers() of the module",
        "max_grad_norm": "gradient_clip_val",
        "num_train_epochs": "max_epochs",
        "output_dir": "default_root_dir",
        "per_device_eval_batch_size": "DataLoader(batch_size=...)",
        "per_device_train_batch_size": "micro_batch_size",
        "report_to": "logger",
        "resume_from_checkpoint": "resume",
        "run_name": "logger=TensorBoardLogger('.', version=...)",
        "save_steps": "callbacks=[Snapshot(every_n_steps=500)]",
        "save_strategy": "callbacks=[Snapshot(every_n_steps=500)]",
        "save_total_limit": "callbacks=[Snapshot(keep_last=3)]",
        "seed": "seed_everything(...)",
        "torch_compile": "compile",
        "warmup_steps": "configure_optimizers() of the module",
        "weight_decay": "configure_optimizers() of the module",
    },
    "Accelerate and DeepSpeed": {
        "cpu_offload": "offload='parameters'",
        "deepspeed": "strategy='zero1'",
        "fsdp": "strategy='fsdp'",
        "gradient_clipping": "gradient_clip_val",
        "mixed_precision": "precision",
        "num_machines": "num_nodes",
        "num_processes": "devices",
        "offload_optimizer": "offload",
        "offload_param": "offload='parameters'",
        "train_batch_size": "global_batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "zero_stage": "strategy='zero1'",
    },
    "torch and torchrun": {
        "amp": "precision='16-mixed'",
        "backend": "strategy",
        "batch_size": "global_batch_size",
        "compile_model": "compile",
        "distributed_backend": "strategy",
        "epochs": "max_epochs",
        "find_unused_parameters": "strategy='ddp:find_unused_parameters=true'",
        "n_gpus": "devices",
        "nnodes": "num_nodes",
        "nproc_per_node": "devices",
        "num_gpus": "devices",
        "num_workers": "DataLoader(num_workers=...)",
        "use_amp": "precision='16-mixed'",
        "world_size": "devices",
    },
    "Lightning before 2.0": {
        "amp_backend": "precision",
        "auto_scale_batch_size": "micro_batch_size='auto'",
        "auto_select_gpus": "devices='auto'",
        "checkpoint_callback": "enable_checkpointing",
        "gpus": "devices",
        "progress_bar_refresh_rate": "enable_progress_bar",
        "replace_sampler_ddp": "use_distributed_sampler",
        "sync_bn": "sync_batchnorm",
        "tpu_cores": "devices",
        "weights_save_path": "default_root_dir",
        "weights_summary": "enable_model_summary",
    },
    "peft": {
        "lora_alpha": "finetune='lora:alpha=16'",
        "lora_dropout": "finetune='lora:dropout=0.1'",
        "lora_r": "finetune='lora:rank=8'",
        "lora_rank": "finetune='lora:rank=8'",
        "peft_config": "finetune='lora:rank=8'",
        "target_modules": "finetune='lora:targets=q_proj+v_proj'",
        "use_lora": "finetune='lora:rank=8'",
        "use_peft": "finetune='lora:rank=8'",
    },
    "Keras and Composer": {
        "grad_accum": "accumulate_grad_batches",
        "max_duration": "max_epochs",
        "save_folder": "default_root_dir",
        "save_interval": "callbacks=[Snapshot(every_n_steps=500)]",
        "train_microbatch_size": "micro_batch_size",
        "device_train_microbatch_size": "micro_batch_size",
    },
}
"""Tool -> argument -> the argument of `Engine`, with its value where the tool has another, or what to write."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "precision": {
        "amp": "16-mixed",
        "amp_bf16": "bf16-mixed",
        "amp_fp16": "16-mixed",
        "bfloat16": "bf16-mixed",
        "double": "64-true",
        "float16": "16-mixed",
        "float32": "32-true",
        "float64": "64-true",
        "fp16": "16-mixed",
        "fp32": "32-true",
        "fp64": "64-true",
        "float8_rowwise": "float8-rowwise",
        "fp8": "float8",
        "full": "32-true",
        "half": "16-true",
        "mixed": "16-mixed",
        "mixed_bfloat16": "bf16-mixed",
        "mixed_float16": "16-mixed",
        "no": "32-true",
    },
    "strategy": {
        "data_parallel": "dp",
        "ddp2": "ddp",
        "ddp_sharded": "zero1",
        "ddpstrategy": "ddp",
        "deepspeed": "fsdp",
        "context_parallel": "cp",
        "deepspeed_stage_1": "zero1",
        "deepspeed_stage_2": "fsdp:reshard_after_forward=false",
        "deepspeed_stage_2_offload": "fsdp:reshard_after_forward=false",
        "deepspeed_stage_3": "fsdp",
        "deepspeed_stage_3_offload": "fsdp",
        "distributed": "ddp",
        "distributeddataparallel": "ddp",
        "fsdp2": "fsdp",
        "fsdpstrategy": "fsdp",
        "full_shard": "fsdp",
        "fullyshardeddataparallel": "fsdp",
        "horovod": "ddp",
        "hybrid_shard": "hsdp",
        "modelparallelstrategy": "fsdp",
        "pipeline": "pp",
        "shard_grad_op": "fsdp:reshard_after_forward=false",
        "tensor_parallel": "tp",
        "zero": "zero1",
        "zero2": "fsdp:reshard_after_forward=false",
        "zero3": "fsdp",
    },
}
"""Flag -> value of other tools, in lower case -> ours."""

_ARGUMENTS = {word: target for words in ARGUMENTS.values() for word, target in words.items()}


def _meaning(kind: str, word: str) -> str | None:
    """Returns what a word of another tool means here, as it is shown in a message; None if it is no such word.

    Args:
        kind: ``"argument"`` of `Engine`, ``"flag"`` of the command, or the flag whose value it is.
        word: written by the user.
    """
    key = word.lower().replace("-", "_").removeprefix("trainer.")
    target = _ARGUMENTS.get(key) if kind in ("argument", "flag") else VALUES.get(kind, {}).get(key)
    if target is None and kind == "strategy":  # zero3_fork
        name, launcher = split_launcher(key)
        head, *options = VALUES[kind].get(name, "").split(":")
        target = ":".join([f"{head}_{launcher}", *options]) if head not in ("", "dp") else None
    if target is None or (kind == "argument" and not target.isidentifier()):
        return target
    return as_flag(target) if kind == "flag" else repr(target)


def as_flag(target: str) -> str:
    """``precision='16-mixed'`` -> ``--precision 16-mixed``; what is no flag stays as it is."""
    callback = re.fullmatch(r"callbacks=\[(\w+)\((?:(\w+)=(\w+))?\)\]", target)
    if callback:
        name, argument, value = callback.groups()
        return f"--callbacks+={name}{f' --callbacks.{argument} {value}' if argument else ''}"
    flag = re.fullmatch(r"([a-z]\w*)(?:='(.*)'|\(\.\.\.\))?", target)
    return target if flag is None else f"--{flag[1]}{f' {flag[2]}' if flag[2] else ''}"
