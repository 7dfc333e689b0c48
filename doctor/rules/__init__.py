"""The rules of the verdict: a table of causes with their thresholds, and one pure function for each, by topic."""

from . import device, host, network, ranks
from .finding import COSTLY_COMPRESSION, Finding, Rule

__all__ = ["MIN_STEPS", "RULES", "Finding", "Rule"]

MIN_STEPS = 10
"""Optimizer steps below which nothing is judged."""

RULES = (
    Rule(cause="slow_loader", threshold=0.10, find=host.slow_loader,
         of="share of the time in data wait: of one rank beyond the others, or of all"),
    Rule(cause="slow_copy", threshold=0.10, find=host.slow_copy, of="share of the time in copies to the device"),
    Rule(cause="slow_rank", threshold=0.15, find=ranks.slow_rank,
         of="share of a step that one rank computes longer than the median of the others; or `uneven_data`,"
            " `busy_neighbour`, if samples or the run queue explain it"),
    Rule(cause="unequal_stages", threshold=0.10, find=ranks.unequal_stages,
         of="share of a step that the slowest pipeline stage computes longer than the mean; or `busy_neighbour`"),
    Rule(cause="few_micro_batches", threshold=0.18, find=ranks.few_micro_batches,
         of="share of the time in the bubble of a pipeline, mean over ranks"),
    Rule(cause="slow_callback", threshold=0.05, find=ranks.slow_callback, of="share of the time in one class's hooks"),
    Rule(cause="slow_logging", threshold=0.05, find=ranks.slow_logging, of="share of the time in loggers"),
    Rule(cause="checkpoint_stall", threshold=0.05, find=ranks.checkpoint_stall, of="share of the time in saves"),
    Rule(cause="exposed_communication", threshold=0.05, find=ranks.exposed_communication,
         of="share of the time in exposed communication, on CPUs 0.15 or more; or `sync_while_accumulating`,"
            " `small_buckets` (below 1 MiB), `small_units` (8 gathers a step of less than 1 MB),"
            " `underused_link` (below 0.6 of a large all-reduce's rate)"),
    Rule(cause="costly_compression", threshold=COSTLY_COMPRESSION, find=network.costly_compression,
         of="share of a step by which gradients take longer with the compression than in a plain all-reduce"),
    Rule(cause="slow_link", threshold=0.4, find=network.slow_link,
         of="at most this share of the rate of fast links, between ranks on different hosts"),
    Rule(cause="device_reads", threshold=1, find=device.device_reads,
         of="reads of an accelerator in the `training_step` that was checked"),
    Rule(cause="unfused_optimizer", threshold=0.05, find=device.unfused_optimizer,
         of="share of the time in an optimizer's step that one kernel could do (`fused=True`)"),
    Rule(cause="host_bound", threshold=0.3, find=host.host_bound,
         of="share of the time that the calls of operators take, by the time of a minimal operator"),
    Rule(cause="thread_oversubscription", threshold=0.10, find=host.thread_oversubscription,
         of="share of the time without a CPU, if there are more threads than CPUs"),
    Rule(cause="cpu_shortage", threshold=0.15, find=host.cpu_shortage,
         of="the same on every rank, if there are no more threads than CPUs; or `busy_neighbour`, if there are no"
            " more ranks than CPUs either"),
    Rule(cause="full_memory", threshold=0.9, find=device.full_memory,
         of="largest allocated share of a device's memory; or torch had to free memory that it had reserved"),
    Rule(cause="large_logits", threshold=0.1, find=device.large_logits,
         of="share of the logits in the peak of a device's memory"),
    Rule(cause="unused_memory", threshold=0.7, find=device.unused_memory,
         of="largest allocated share of the devices' memory, below it, at less than 0.3 of the peak rate"),
    Rule(cause="full_shared_memory", threshold=0.9, find=host.full_shared_memory,
         of="largest used share of a host's `/dev/shm`"),
    Rule(cause="swapping", threshold=1.0, find=host.swapping,
         of="MB a second that a host reads back from swap during training"),
    Rule(cause="throttled_device", threshold=0.5, find=device.throttled_device,
         of="share of the reads through NVML in which a device was throttled for heat or power"),
    Rule(cause="padding", threshold=0.20, find=host.padding, of="share of padding among the tokens"),
    Rule(cause="uneven_data", threshold=0.05, find=host.uneven_data, of="share of filler batches on a rank"),
    Rule(cause="slow_validation", threshold=0.30, find=ranks.slow_validation, of="share of the time in validation"),
    Rule(cause="replicas_differ", threshold=1e-9, find=device.replicas_differ,
         of="relative difference between the checksums of parameters that ranks must have in common"),
    Rule(cause="gradient_spikes", threshold=20, find=device.gradient_spikes,
         of="a recorded gradient norm as a multiple of the rank's median"),
    Rule(cause="loss_scale_falls", threshold=64, find=device.loss_scale_falls,
         of="factor by which the loss scale has fallen below its largest value, and stayed there"),
    Rule(cause="dead_parameters", threshold=3, find=device.dead_parameters,
         of="readings in which a parameter has no gradient on any rank, without exception"),
    Rule(cause="lr_stands_still", threshold=3, find=device.lr_stands_still,
         of="times that a learning rate scheduler was due since its last step"),
    Rule(cause="memory_leak", threshold=0.1, find=host.memory_leak,
         of="relative growth of the memory of a rank's process, if it has not slowed down by half"),
    Rule(cause="unused_parameter_search", threshold=3, find=host.unused_parameter_search,
         of="readings under find_unused_parameters, in all of which every parameter has a gradient"),
    Rule(cause="varying_steps", threshold=0.15, find=ranks.varying_steps,
         of="share of the time in which even the rank that waits least waits for the others"),
    Rule(cause="low_compute", threshold=0.85, find=host.low_compute, is_last=True,
         of="share of a step in forward, backward and optimizer, below it and without any other finding"),
)  # fmt: skip
"""All causes; docs/reference/doctor.md has the same table."""
