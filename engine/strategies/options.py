"""The options that may follow the colon of each strategy's flag. Torch is not needed to read or check them."""

import dataclasses
from typing import Any, Literal

from ..flags import check_count, check_number

__all__ = [
    "DEFAULT_BUCKET_MB",
    "DDPOptions",
    "DiLoCoOptions",
    "FSDPOptions",
    "FSDPTPOptions",
    "HSDPOptions",
    "HSDPTPOptions",
    "LocalSGDOptions",
    "NoOptions",
    "PPDDPOptions",
    "PPFSDPOptions",
    "PPOptions",
    "PSOptions",
    "TPOptions",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The options of a strategy that has none."""


DEFAULT_BUCKET_MB = 25.0
"""Size of buckets unless a flag says otherwise, in MiB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """The options of the `ddp` flag, which follow its colon."""

    find_unused_parameters: bool | None = None  # as Lightning has it: false among DDP's arguments if it was given
    """Search the graph at each step for parameters without a gradient; needed if some are unused, slower if not."""
    static_graph: bool = False
    """The same parameters are used at every step; allows some reuse, such as re-entrant checkpointing."""
    bucket_cap_mb: float | None = None
    """Size of the gradient buckets, in MiB; default: 25, or 200 with a compression on a GPU."""
    gradient_as_bucket_view: bool = True
    """Gradients are views into the buckets: saves a copy of all gradients in memory and in time."""
    broadcast_buffers: bool = True
    """Send rank 0's buffers (BatchNorm's statistics) to all ranks before each forward."""
    average_buffers: bool = False
    """After each step, average the floating-point buffers that the module updates itself (running means, codebooks)
    over the ranks, each by its samples. Not those of norm layers: see `sync_batchnorm`."""
    timeout_s: float = 1800.0
    """Seconds that a collective may wait for the other ranks."""

    def __post_init__(self) -> None:
        if self.bucket_cap_mb is not None:
            check_number("ddp:bucket_cap_mb", self.bucket_cap_mb, above=0)
        check_number("ddp:timeout_s", self.timeout_s, above=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _UnitOptions:
    """The options of strategies that process a module unit by unit."""

    activation_checkpointing: bool = False
    """Keep only each unit's input for backward and compute its forward again."""
    meta_init: bool = False
    """Run `configure_model()` without allocating, and create each unit's weights when it is sharded or split."""
    rank0_init: bool = False
    """Run `configure_model()` without allocating, except on rank 0, which sends its weights to the others."""
    timeout_s: float = 1800.0
    """Seconds that a collective may wait for the other ranks."""

    def __post_init__(self) -> None:
        check_number("timeout_s", self.timeout_s, above=0)
        if self.meta_init and self.rank0_init:
            raise ValueError(
                "meta_init=true and rank0_init=true can't both be: with the first all ranks draw each unit's weights"
                " when it is sharded, with the second rank 0 has all weights before that. Leave one of them out."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPOptions(_UnitOptions):
    """The options of the `fsdp` flag, which follow its colon."""

    reshard_after_forward: bool = True
    """Free each unit's whole parameters after its forward and gather them again for backward: least memory. False
    keeps them: one all-gather less per micro-batch."""
    no_sync: bool | None = None
    """While accumulating, keep whole gradients and send nothing on the inner micro-batches. False reduces each
    micro-batch to shards at once: less memory, more bytes. Default: false on accelerators of one node, unless shards
    are compressed."""
    units: Literal["layers", "blocks", "module"] = "layers"
    """The parts that are gathered as one. `layers`: each repeated block, a large embedding, a large output layer;
    `blocks`: the blocks alone; `module`: everything, which a step may then use in any way (penalties on weights)."""
    extra_overlap: bool = False
    """Gather the next unit earlier, and reduce over separate connections and two buffers: more memory, for networks
    that are slower than the computing."""
    average_buffers: bool = False
    """After each step, average the floating-point buffers that the module updates itself (running means, codebooks)
    over the ranks, each by its samples. Not those of norm layers: see `sync_batchnorm`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HSDPOptions(FSDPOptions):
    """The options of the `hsdp` flag, which follow its colon: the sizes of the mesh, and all of `fsdp`'s options."""

    replicate: int | None = None
    """Number of replica groups; default: all ranks divided by `shard`, or the number of nodes."""
    shard: int | None = None
    """Number of shards in each group; default: all ranks divided by `replicate`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGDOptions:
    """The options of the `local_sgd` flag, which follow its colon."""

    sync_every: int = 16
    """H: optimizer steps from one exchange to the next."""
    fragments: int = 1
    """Parts of the parameters, each with an exchange of its own every H steps, at evenly spaced steps."""
    overlap_steps: int = 0
    """Steps that a rank takes while an exchange is under way, before it uses the result; 0: it waits."""
    warmup: int = 0
    """Optimizer steps at the start of training in which gradients are averaged, as under ddp."""
    find_unused_parameters: bool | None = None
    """In the warm-up: see ddp. After it, parameters may be unused."""
    bucket_cap_mb: float = DEFAULT_BUCKET_MB
    """Size of the buckets that are exchanged, in MiB."""
    timeout_s: float = 1800.0
    """Seconds that a collective may wait for the other ranks."""

    def __post_init__(self) -> None:
        check_count("sync_every", self.sync_every)
        check_count("fragments", self.fragments, most=self.sync_every)
        check_count("overlap_steps", self.overlap_steps, least=0, most=self.sync_every - 1)
        check_count("warmup", self.warmup, least=0)
        check_number("bucket_cap_mb", self.bucket_cap_mb, above=0)
        check_number("timeout_s", self.timeout_s, above=0)

    @property
    def outer(self) -> dict[str, Any]:
        """Arguments of the outer `torch.optim.SGD`."""
        return {"lr": 1.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiLoCoOptions(LocalSGDOptions):
    """The options of the `diloco` flag, which follow its colon."""

    outer_lr: float = 0.7
    """Learning rate of the outer SGD."""
    outer_momentum: float = 0.9
    """Its momentum."""
    nesterov: bool = True
    """Whether the momentum is Nesterov's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("outer_lr", self.outer_lr, above=0)
        check_number("outer_momentum", self.outer_momentum, most=1)
        if self.nesterov and self.outer_momentum == 0:
            raise ValueError("nesterov=true needs an outer_momentum greater than 0: set it, or nesterov=false.")

    @property
    def outer(self) -> dict[str, Any]:
        """See `LocalSGDOptions`."""
        return {"lr": self.outer_lr, "momentum": self.outer_momentum, "nesterov": self.nesterov}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOptions:
    """The options of the `pp` flag, which follow its colon."""

    pipeline_size: int | None = None
    """Number of ranks in a pipeline; default: all processes, or these divided by `replicate` or `shard`, or 2."""
    microbatches: int | None = None
    """Number of equal parts of a batch; default: the largest divisor of the batch up to 2 x `pipeline_size`, or 1 for
    one stage."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = "1f1b"
    """Order of the micro-batches' forwards and backwards."""
    virtual_stages: int | None = None
    """Stages on each rank; default: 2 for `interleaved` and 1 for all others."""
    timeout_s: float = 1800.0
    """Seconds that a collective may wait for the other ranks."""

    def __post_init__(self) -> None:
        check_number("pp:timeout_s", self.timeout_s, above=0)
        for name in ("pipeline_size", "microbatches", "virtual_stages"):
            if getattr(self, name) is not None:
                check_count(f"pp:{name}", getattr(self, name))
        if self.schedule in ("1f1b", "gpipe") and self.virtual_stages not in (None, 1):
            raise ValueError(
                f"pp:virtual_stages={self.virtual_stages} needs schedule=interleaved or zero-bubble:"
                f" {self.schedule} has one stage on each rank."
            )

    @property
    def stages_per_rank(self) -> int:
        """The value of `virtual_stages`, or its default."""
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPDDPOptions(PPOptions):
    """The options of the `pp+ddp` flag, which follow its colon: `pp`'s options, with `replicate`."""

    replicate: int | None = None
    """Number of pipelines with different samples; default: all ranks divided by `pipeline_size`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPFSDPOptions(PPOptions):
    """The options of the `pp+fsdp` flag, which follow its colon: `pp`'s options, with `shard`."""

    shard: int | None = None
    """Number of shards of each stage, with different samples; default: all ranks divided by `pipeline_size`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stages_per_rank > 1 or self.schedule == "zero-bubble":
            raise ValueError(
                f"strategy 'pp+fsdp' can't do schedule={self.schedule}: with sharded stages it does 1f1b and gpipe."
                " Choose one of them, or pp+ddp."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SplitOptions:
    """The options that the flags `tp`, `fsdp+tp` and `hsdp+tp` share."""

    tp: int | None = None
    """Number of ranks that share each layer; default: all under `tp`, else those of a node, or 2 on one node."""
    loss_parallel: bool = False
    """In training steps, keep the logits sharded by the vocabulary: their `cross_entropy` needs no gather."""
    sequence_parallel: bool = False
    """Between the blocks (norms, dropout, residuals), shard activations by the sequence. Less memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPOptions(_SplitOptions, _UnitOptions):
    """The options of the `tp` flag, which follow its colon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPTPOptions(_SplitOptions, FSDPOptions):
    """The options of the `fsdp+tp` flag, which follow its colon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HSDPTPOptions(_SplitOptions, HSDPOptions):
    """The options of the `hsdp+tp` flag, which follow its colon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SequenceOptions:
    """The options that the flags `cp`, `ddp+cp`, `fsdp+cp` and `hsdp+cp` share."""

    cp: int | None = None
    """Number of ranks that share each sequence; default: all under `cp`, else those of a node, or 2 on one node."""
    attention: Literal["ulysses", "ring"] = "ulysses"
    """How attention sees the whole of a sequence. `ulysses`: ranks exchange parts of the time for heads, or samples;
    `ring`: keys and values go round the ranks, however few heads there are; without masks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CPOptions(_SequenceOptions, _UnitOptions):
    """The options of the `cp` flag, which follow its colon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPCPOptions(_SequenceOptions, FSDPOptions):
    """The options of the `fsdp+cp` flag, which follow its colon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HSDPCPOptions(_SequenceOptions, HSDPOptions):
    """The options of the `hsdp+cp` flag, which follow its colon."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPCPOptions(HSDPCPOptions):
    """The options of the `ddp+cp` flag, which follow its colon: `hsdp+cp`'s, with whole parameters on each rank."""

    shard: int | None = 1
    """Number of shards in each group, 1: `hsdp+cp` has more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shard != 1:
            raise ValueError(f"ddp+cp:shard={self.shard} would shard the parameters: choose hsdp+cp, or leave it out.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PSOptions:
    """The options of the `ps` flag, which follow its colon."""

    staleness: int = 0
    """Number of steps that a rank may be ahead of the slowest; 0 for synchronous training."""
    patience: float = 0.5
    """With staleness > 0: how long a rank waits for the step with its own gradient before it continues with older
    parameters, as a share of the time that its forward and backward take."""
    servers: int | None = None
    """Number of ranks (the first ones) that each serve a share of the parameters; default: all. They train as well."""
    address: str | None = None
    """IP address, network or interface on which the ranks listen; default: loopback, so this machine only."""
    timeout_s: float = 1800.0
    """Seconds that a rank may wait for the others."""

    def __post_init__(self) -> None:
        check_count("ps:staleness", self.staleness, least=0)
        if self.servers is not None:
            check_count("ps:servers", self.servers)
        check_number("ps:patience", self.patience)
        check_number("ps:timeout_s", self.timeout_s, above=0)
