"""The runs that `on_rank_loss="continue"` refuses before a process starts, each by name and with the remedy."""

import inspect
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch import LightningModule

from ..config import EngineConfig
from ..distributed.environment import is_elastic, is_in_survivors_folder, job_secret
from ..errors import RefusedError
from ..loggers.continuation import kind_of
from ..strategies import adapt

__all__ = ["check_may_lose_ranks", "check_run_may_lose_ranks", "refusal"]


def check_may_lose_ranks(trainer: Any, config: EngineConfig) -> None:
    """Checks, before any process starts, that training can go on without a rank.

    Raises:
        ValueError: the flags, or the strategy, can't; the message says why, and what does the same by a restart.
    """
    strategy = adapt(trainer.strategy)
    why_not = _why_not_strategy(trainer, strategy) or _why_not_flags(config, strategy)
    if why_not is not None:
        raise ValueError(refusal(*why_not))
    strategy.survives_losses = True


def refusal(reason: str, remedy: str) -> str:
    """Returns the message for a run that can't go on without a rank."""
    return (
        f"on_rank_loss='continue' can't go on in the same processes here: {reason}. {remedy}, or leave the flag out and"
        " restart the run from its Snapshot with resume='auto'."
    )


_CHOOSE = "Choose strategy 'ddp_spawn' or 'ddp_fork', or start the script by `polyphase launch`"


def _why_not_strategy(trainer: Any, strategy: Any) -> tuple[str, str] | None:
    if trainer.world_size == 1:
        return "one process has no other to go on with", "Give several devices"
    if (clause := adapt(trainer.strategy).capabilities.unsupported_rank_loss) is not None:
        return f"strategy {strategy!r} {clause}", _CHOOSE
    if trainer.num_nodes > 1 and (why_not := _why_not_nodes(trainer.num_nodes, strategy)) is not None:
        return why_not
    if is_elastic() and not is_in_survivors_folder():
        return "torchrun ends all processes when one of them was killed", _CHOOSE
    if not (strategy.launcher.outlives_ranks or is_elastic()):
        return (
            f"the store of the job that strategy {strategy!r} starts, or that SLURM or MPI has started, is in the"
            " process of rank 0, and would be lost with it",
            _CHOOSE,
        )
    if type(strategy.cluster_environment) is not (TorchElasticEnvironment if is_elastic() else LightningEnvironment):
        name = type(strategy.cluster_environment).__name__
        return f"the ranks have the numbers that {name} has given them", "Leave that plugin out"
    if strategy.root_device.type != "cpu":
        kind = strategy.root_device.type
        return f"the communicators of {kind!r} devices were not tried", "Give accelerator='cpu'"
    return None


def _why_not_nodes(num_nodes: int, strategy: Any) -> tuple[str, str] | None:
    if not (is_elastic() and is_in_survivors_folder()):
        reason = f"num_nodes={num_nodes}, where only `polyphase launch` of node 0 has a store that outlives other nodes"
        launch = f"`polyphase launch --nnodes {num_nodes} --node-rank N --master-addr HOST --master-port PORT`"
        return reason, f"Start the script on each node by {launch}, without --rdzv-backend"
    if strategy.returns_to_snapshot is not None or strategy.capabilities.steps_alone:
        return f"strategy {strategy!r} was not tried on several nodes", "Choose strategy 'ddp', or one node"
    if job_secret() is None:
        reason = f"the ranks of {num_nodes} nodes would read from the job's store what anybody may have written"
        return reason, "Give all nodes one secret word, in the variable POLYPHASE_JOB_SECRET"
    return None


def _why_not_flags(config: EngineConfig, strategy: Any) -> tuple[str, str] | None:
    if config.global_batch_size is None:
        return (
            "the samples of a step are those of the ranks together, and would be fewer",
            "Give global_batch_size, which fewer ranks keep",
        )
    for untried in ("overfit_batches", "reload_dataloaders_every_n_epochs"):
        if value := getattr(config, untried):
            return f"{untried}={value!r} was not tried with ranks that become fewer", f"Leave {untried} out"
    # Ranks that step apart have no snapshot between two exchanges that holds what each of them has.
    if strategy.capabilities.steps_alone and (name := _kept_in_step(config)) is not None:
        reason = f"under strategy {strategy!r} {name} keeps a part of a step that a lost rank would take along"
        return reason, f"Leave {name.partition('=')[0]} out"
    return None


def _kept_in_step(config: EngineConfig) -> str | None:
    """Returns a flag that keeps something of a step which a lost rank takes along, or which can't be undone."""
    others = {
        "micro_batch_size": config.micro_batch_size == "auto",
        "compression": config.compression != "none",
        "nonfinite": config.nonfinite in ("error", "skip"),
        "sync_batchnorm": config.sync_batchnorm,
        "compile": bool(config.compile),
    }
    return next((f"{name}={getattr(config, name)!r}" for name, is_set in others.items() if is_set), None)


def _why_not_again(trainer: Any) -> str | None:
    """Returns why a step of the run can't be made again from its beginning."""
    strategy = adapt(trainer.strategy)
    if strategy.averages_buffers and not strategy.capabilities.steps_alone:
        return "average_buffers=true changes the module after the step was made"
    if (name := _kept_in_step(trainer.config)) is not None:
        return f"{name} keeps a part of a step that a lost rank would take along"
    return None


def check_run_may_lose_ranks(trainer: Any, module: LightningModule) -> None:
    """Checks, before any process starts, that ranks can go on: from a step of `module`, or from a snapshot.

    Raises:
        RefusedError: the module steps, or reads its batches, by itself; a logger is of a kind that is not known; or a
            step can't be made again, and nothing saves snapshots.
    """
    strategy = adapt(trainer.strategy)
    reason = type(strategy).returns_to_snapshot or _why_not_again(trainer)
    if reason is not None and strategy.capabilities.steps_alone:
        raise RefusedError(refusal(reason, "Choose strategy 'ddp', which returns to a snapshot then"))
    if reason is not None and trainer.num_nodes > 1:
        raise RefusedError(refusal(f"{reason}, and a return to a snapshot was not tried on several nodes", "Give one"))
    if reason is not None and trainer.snapshots_path is None:
        reason = f"under strategy {strategy!r} {reason}, and nothing saves snapshots"
        raise RefusedError(refusal(reason, "Give callbacks=[Snapshot()], to which the others return"))
    strategy.returns_to_snapshot = reason
    for logger in trainer.loggers:
        if (kind := kind_of(logger)) is None or not kind.may_be_taken_over:
            reason = f"no other process is known to go on in the log of {type(logger).__name__} without rank 0"
            raise RefusedError(refusal(reason, "Use TensorBoardLogger or CSVLogger"))
    if not module.automatic_optimization:
        reason = "steps by hand take the whole share of a rank at once, which grows when ranks are lost"
        raise RefusedError(refusal(reason, "Use automatic optimization"))
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise RefusedError(
            refusal("`training_step` reads its batches itself, by `dataloader_iter`", "Take batches as its argument")
        )
