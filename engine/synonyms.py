"""The names of other tools for our flags: the hints of errors, and the tables of the page "coming from"."""

import re
from collections.abc import Mapping

__all__ = ["ARGUMENTS", "VALUES", "as_flag", "meaning"]

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
        "run_name": "name",
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
        "fp8": "transformer-engine",
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


def meaning(kind: str, word: str) -> str | None:
    """Returns what a word of another tool means here, as it is shown in a message; None if it is no such word.

    Args:
        kind: ``"argument"`` of `Engine`, ``"flag"`` of the command, or the flag whose value it is.
        word: written by the user.
    """
    key = word.lower().replace("-", "_").removeprefix("trainer.")
    target = _ARGUMENTS.get(key) if kind in ("argument", "flag") else VALUES.get(kind, {}).get(key)
    if target is None or (kind == "argument" and not target.isidentifier()):
        return target
    return as_flag(target) if kind == "flag" else repr(target)


def as_flag(target: str) -> str:
    """``precision='16-mixed'`` -> ``--precision 16-mixed``; what is no flag stays as it is."""
    callback = re.fullmatch(r"callbacks=\[(\w+)\((\w+)=(\w+)\)\]", target)
    if callback:
        return "--callbacks+={} --callbacks.{} {}".format(*callback.groups())
    flag = re.fullmatch(r"([a-z]\w*)(?:='(.*)'|\(\.\.\.\))?", target)
    return target if flag is None else f"--{flag[1]}{f' {flag[2]}' if flag[2] else ''}"
