"""The flags of the command, readable without torch: name, kind of value, meaning, default and an example of each.

The flags of the engine are the arguments of `Engine`: the arguments of Lightning's `Trainer` and some more. A test
compares them. Flags without a group are shown by ``--help-all`` only.
"""

import dataclasses

__all__ = ["COMMANDS", "ENGINE_FLAGS", "GROUPS", "RUN_FLAGS", "FlagRow", "flags_of"]

COMMANDS = {
    "fit": "trains a model",
    "validate": "runs the validation loop of a model",
    "test": "runs its test loop",
    "predict": "runs its prediction loop",
    "verify": "checks that flags give the result of one process, or names the first tensor that differs",
    "bench-comm": "measures the network between the ranks, and forecasts a step under each compression",
}
"""Commands that run a model, with their descriptions."""

GROUPS = (
    "What to run",
    "How to run it",
    "How long",
    "Batches",
    "Optimization",
    "Checkpoints and resuming",
    "What is shown and logged",
)
"""Headings of the help, in order."""


@dataclasses.dataclass(frozen=True)
class FlagRow:
    """One flag of the command."""

    name: str
    """The name after ``--``."""
    kind: str
    """The kind of the value: a key of `check.KINDS`."""
    meaning: str
    default: str
    """The default as shown in the help; ``""`` for none."""
    example: str
    group: str = ""
    """One of `GROUPS`, or empty."""
    choices: tuple[str, ...] = ()
    """All possible values, if there are few."""
    commands: tuple[str, ...] = tuple(COMMANDS)
    """The commands that have this flag."""


_WHAT, _HOW, _LONG, _BATCHES, _STEP, _SAVING, _SHOWN = GROUPS
_STAGES = ("fit", "validate", "test", "predict")

RUN_FLAGS = (
    FlagRow("model", "model", "class of the model: package.Class, or one of polyphase.models", "", "MyModel", _WHAT),
    FlagRow("model.NAME", "any", "argument of its constructor; --model.help CLASS lists them", "", "", _WHAT),
    FlagRow("data", "data", "class of the data module, if the model has no loaders itself", "none", "Digits", _WHAT),
    FlagRow("data.NAME", "any", "argument of its constructor; --data.help CLASS lists them", "", "", _WHAT),
    FlagRow(
        "config", "config", "YAML file with any of these flags; later flags override it", "none", "run.yaml", _WHAT
    ),
    FlagRow("print_config", "bare", "print the whole configuration as such a file, and exit", "", "", _WHAT),
    FlagRow("seed_everything", "seed", "seed of all random numbers; true: any, false: none", "0", "1", _WHAT),
    FlagRow("optimizer", "any", "class of an optimizer, if the model configures none", "the model's", "Adam"),
    FlagRow("lr_scheduler", "any", "class of a learning-rate schedule, with --optimizer", "the model's", "StepLR"),
    FlagRow("ckpt_path", "any", "checkpoint to start from", "none", "snapshots/last", _SAVING, commands=_STAGES),
    FlagRow("weights_only", "bool", "unpickle only its tensors and plain values", "none", "true", commands=_STAGES),
    FlagRow("verbose", "bool", "print the results", "true", "false", commands=("validate", "test")),
    FlagRow("return_predictions", "bool", "keep the predictions in memory", "true", "false", commands=("predict",)),
    FlagRow("steps", "int", "optimizer steps that are compared", "5", "5", _WHAT, commands=("verify",)),
    FlagRow("tolerance", "number", "largest difference of a weight", "1e-05", "1e-4", _WHAT, commands=("verify",)),
    FlagRow(
        "compressions", "any", "the compressions to compare", "all", "[none,bf16]", _WHAT, commands=("bench-comm",)
    ),
)
"""Flags that are not arguments of the engine."""

_BAR = "show a progress bar"
_LIMIT = "batches of each epoch at most: a number, or a share such as 0.1"

ENGINE_FLAGS = (
    FlagRow("strategy", "strategy", "how work is split over devices: see polyphase strategies", "auto", "ddp", _HOW),
    FlagRow("devices", "devices", "devices on each node: a number, -1 for all, or a list [0,1]", "auto", "2", _HOW),
    FlagRow(
        "accelerator",
        "accelerator",
        "kind of device: cpu, gpu, cuda, mps or tpu",
        "auto",
        "cpu",
        _HOW,
        choices=("auto", "cpu", "gpu", "cuda", "mps", "tpu"),
    ),
    FlagRow("num_nodes", "int", "machines", "1", "2", _HOW),
    FlagRow(
        "precision", "precision", "number format: 32-true, bf16-mixed, 16-mixed, ...", "32-true", "bf16-mixed", _HOW
    ),
    FlagRow("compression", "compression", "how gradients are sent: see polyphase strategies", "none", "bf16", _HOW),
    FlagRow(
        "compile",
        "choice_or_bool",
        "run the steps through torch.compile",
        "false",
        "true",
        _HOW,
        choices=("default", "reduce-overhead", "max-autotune"),
    ),
    FlagRow(
        "activation_checkpointing",
        "choice",
        "activations that backward recomputes: none, full or selective",
        "none",
        "full",
        _HOW,
        choices=("none", "full", "selective"),
    ),
    FlagRow(
        "offload", "any", "what host memory keeps: activations, parameters, or a list", "none", "activations", _HOW
    ),
    FlagRow("max_epochs", "int", "epochs; -1 for no end", "1000", "5", _LONG),
    FlagRow("max_steps", "int", "optimizer steps; -1 for no end", "-1", "1000", _LONG),
    FlagRow("max_time", "any", "time: days:hours:minutes:seconds", "none", "00:08:00:00", _LONG),
    FlagRow("limit_train_batches", "number", _LIMIT, "1.0", "10", _LONG),
    FlagRow("limit_val_batches", "number", "as limit_train_batches, in validation", "1.0", "10", _LONG),
    FlagRow("fast_dev_run", "int_or_bool", "run this many batches of each loop, save nothing", "false", "true", _LONG),
    FlagRow("global_batch_size", "int", "samples of each optimizer step, over all ranks", "none", "256", _BATCHES),
    FlagRow("micro_batch_size", "int_or_auto", "samples of a rank's micro-batch, at most", "none", "8", _BATCHES),
    FlagRow("accumulate_grad_batches", "int", "micro-batches of each optimizer step", "1", "4", _BATCHES),
    FlagRow(
        "uneven",
        "choice",
        "if ranks have different numbers of batches: pad or drop",
        "pad",
        "drop",
        _BATCHES,
        choices=("pad", "drop"),
    ),
    FlagRow("seed_samples", "bool", "augment a sample alike on any rank and worker", "false", "true", _BATCHES),
    FlagRow("gradient_clip_val", "number", "largest norm of all gradients", "none", "1.0", _STEP),
    FlagRow(
        "gradient_clip_algorithm",
        "choice",
        "clip by norm or by value",
        "norm",
        "value",
        _STEP,
        choices=("norm", "value"),
    ),
    FlagRow(
        "nonfinite",
        "choice",
        "if a loss is NaN or infinite: warn, error, skip or ignore",
        "warn",
        "error",
        _STEP,
        choices=("warn", "error", "ignore"),
    ),
    FlagRow("check_first_steps", "any", "compare the first steps with one process", "auto", "false", _STEP),
    FlagRow("sync_batchnorm", "bool", "compute BatchNorm's statistics over all ranks", "false", "true", _STEP),
    FlagRow("deterministic", "bool_or_warn", "use only algorithms that repeat bit for bit", "false", "true", _STEP),
    FlagRow("resume", "any", "checkpoint to resume from; auto: the newest of this run", "none", "auto", _SAVING),
    FlagRow("default_root_dir", "any", "folder of logs and checkpoints", ".", "runs", _SAVING),
    FlagRow("enable_checkpointing", "bool", "save a checkpoint at the end of each epoch", "true", "false", _SAVING),
    FlagRow("async_checkpoints", "bool", "save snapshots while training continues", "true", "false", _SAVING),
    FlagRow(
        "checkpoint_format",
        "choice",
        "file or directory; auto: by the strategy",
        "auto",
        "file",
        _SAVING,
        choices=("auto", "file", "directory"),
    ),
    FlagRow("hang_timeout_s", "number", "seconds without progress before the run ends", "600", "60", _SAVING),
    FlagRow("name", "any", "folder of the logs, instead of version_0", "none", "my-run", _SHOWN),
    FlagRow("logger", "any", "class of a logger, or false", "TensorBoard", "CSVLogger", _SHOWN),
    FlagRow("log_every_n_steps", "int", "optimizer steps between two rows of the log", "50", "10", _SHOWN),
    FlagRow("callbacks", "any", "class of a callback; += adds another", "none", "MemoryMonitor", _SHOWN),
    FlagRow("check_val_every_n_epoch", "int", "epochs between validations", "1", "5", _SHOWN),
    FlagRow("val_check_interval", "any", "training batches between validations, or a share", "1.0", "0.25", _SHOWN),
    FlagRow("enable_progress_bar", "bool", _BAR, "true", "false", _SHOWN),
    FlagRow("profiler", "any", "where time goes: simple, advanced or pytorch", "none", "simple", _SHOWN),
    FlagRow("min_epochs", "int", "epochs at least", "none", "1"),
    FlagRow("min_steps", "int", "optimizer steps at least", "none", "100"),
    FlagRow("limit_test_batches", "number", "as limit_train_batches, in testing", "1.0", "10"),
    FlagRow("limit_predict_batches", "number", "as limit_train_batches, in prediction", "1.0", "10"),
    FlagRow("overfit_batches", "number", "train and validate on these few batches alone", "0.0", "2"),
    FlagRow("num_sanity_val_steps", "int", "validation batches before training", "2", "0"),
    FlagRow("enable_run_summary", "bool", "print what the run is, and where its results are", "true", "false"),
    FlagRow("enable_model_summary", "bool", "print the layers before training", "true", "false"),
    FlagRow("benchmark", "bool", "let cuDNN search for the fastest algorithms", "none", "true"),
    FlagRow("inference_mode", "bool", "evaluate under torch.inference_mode, else no_grad", "true", "false"),
    FlagRow("use_distributed_sampler", "bool", "deal the samples to the ranks", "true", "false"),
    FlagRow("detect_anomaly", "bool", "find the origin of NaN in backward, by torch", "false", "true"),
    FlagRow("barebones", "bool", "run the bare loop, to measure it", "false", "true"),
    FlagRow("plugins", "any", "classes of Lightning plugins", "none", "MyPlugin"),
    FlagRow("reload_dataloaders_every_n_epochs", "int", "epochs between new loaders", "0", "1"),
    FlagRow("enable_autolog_hparams", "bool", "log hyperparameters", "true", "false"),
    FlagRow("model_registry", "any", "name of the model for Lightning's registry", "none", "my-model"),
)
"""The arguments of the engine. Each may also be written ``--trainer.NAME``."""


def flags_of(command: str) -> tuple[FlagRow, ...]:
    """Returns all flags of a command."""
    return tuple(flag for flag in (*RUN_FLAGS, *ENGINE_FLAGS) if command in flag.commands)
