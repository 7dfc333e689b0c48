"""The engine: a Lightning `Trainer` whose flags choose among Polyphase's parts. No training logic lives here."""

import copy
import dataclasses
import inspect
import os
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from . import verify as verification
from ._compat.lightning import _MultiProcessingLauncher
from .checkpoint import get_random_state, set_random_state
from .checkpoint.export import check_target, configuration_of
from .checkpoint.export import export as write_export
from .checks import check_arguments, checks_arguments
from .compression import COMM_HOOKS, make_comm_hook
from .compression.forecast import NUM_STEPS, ReportWriter, WireReport
from .config import EngineConfig, field_docs, method_with_arguments_of, with_arguments_of
from .data.batch_sizes import check_batch_sizes, check_loader
from .distributed.environment import environment_of_launcher, resolve_sizes
from .errors import RefusedError, check_checkpoint, check_nodes, check_writable, refusing
from .finetune import make_finetuning
from .flags import Layout, check_count, choose
from .initialization import check_shapes, read_stored
from .loggers.run_names import claim_log_folders, folders_written_to
from .loop.compile import check_cuda_graphs
from .loop.install import TrainerBase, defaults_from_environment, install_loops, survive_losses
from .loop.rank_loss_checks import check_may_lose_ranks, check_run_may_lose_ranks
from .loop.runs import check_callbacks, check_manual_optimization, quiet, reports_uncaught
from .precision import FLOAT8, OF_BLOCKS
from .reliability.nonfinite import NonFiniteWatch
from .reliability.signals import STOPPED
from .resume import from_checkpoint  # noqa: F401 - makes load_from_checkpoint open directories
from .select import check_module, default_run_callbacks, select, use_own_device, with_defaults
from .strategies import STRATEGIES, lists_devices, prepare_to_repeat
from .strategies.block_precision import check_blocks
from .strategies.float8 import check_float8
from .strategies.offload import OffloadActivations, choose_offload
from .strategies.recompute import RecomputeBlocks, blocks_to_recompute, check_recompute, kept_operators

__all__ = ["Engine", "fit"]

_A_FEW_STEPS = {
    "max_epochs": -1,
    "limit_val_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Flags of a run that is to measure or compare something and leaves nothing behind."""

_OURS = frozenset(inspect.signature(EngineConfig).parameters) - frozenset(inspect.signature(Trainer).parameters)
"""Arguments that `Trainer` does not have."""

_SILENT = {"enable_run_summary": False, "check_first_steps": False}
"""Arguments that `Trainer` does not have, of a run that leaves nothing behind."""

_DISTRIBUTION_FLAGS = _OURS | {
    "callbacks",
    "devices",
    "num_nodes",
    "plugins",
    "precision",
    "strategy",
    "sync_batchnorm",
}
"""Flags that `Engine.verify` compares against their absence."""


class Engine(TrainerBase):
    """A `lightning.pytorch.Trainer` that runs any module under any strategy, with the same result.

    Every argument of `Trainer` keeps its name, default and meaning.

    Its arguments are the fields of `EngineConfig`.

    Raises:
        ArgumentError: an unknown argument, or one of the wrong type or range. A `TypeError`, and like all of these
            a `ValueError` and a `MisconfigurationException`.
        RefusedError: flags that can't be honoured, before any process starts.
    """

    @defaults_from_environment
    @checks_arguments
    @method_with_arguments_of(EngineConfig)
    def __init__(self, **flags: Any) -> None:
        self.config = config = EngineConfig(**flags)
        check_arguments(config.changed)
        watch = NonFiniteWatch(config.nonfinite, config.skip_spikes)
        num_nodes = self._choose_parts(config)
        users, default_bar = with_defaults(_as_list(config.callbacks), config)
        super().__init__(
            **{name: value for name, value in config.arguments.items() if name not in _OURS}
            | {
                "strategy": self._parts.strategy,
                "devices": self._parts.devices,
                "num_nodes": num_nodes,
                "precision": self._parts.precision,
                "callbacks": users,
                "plugins": self._parts.plugins,
            }
        )
        use_own_device(self, config.strategy)
        self._save_memory(config)
        self._finetuning = make_finetuning(config.finetune)
        if self._finetuning is not None:
            if config.precision in OF_BLOCKS:
                raise ValueError(
                    f"finetune={config.finetune!r} has not been tried with precision={config.precision!r}: choose"
                    " 'bf16-mixed'."
                )
            self.callbacks.insert(0, self._finetuning)  # type: ignore[attr-defined]
        install_loops(self, config, watch, default_bar, default_run_callbacks(config, users))
        check_cuda_graphs(config.compile_mode, self.layout, offloads="activations" in (config.offload or ()))
        self._check_batches(config)

    def _choose_parts(self, config: EngineConfig) -> int:
        """Chooses the parts that honour the flags; returns the number of nodes, which a launcher may have set."""
        plugins = _as_list(config.plugins)
        devices, num_nodes = resolve_sizes(config.devices, config.num_nodes, plugins)
        if config.devices == "auto" and lists_devices(config.strategy):
            devices = "auto"  # the strategy's object has the list
        plugins = [*plugins, *environment_of_launcher(plugins, num_nodes)]
        self._parts = select(config, devices=devices, num_nodes=num_nodes, plugins=plugins)
        return num_nodes

    def _save_memory(self, config: EngineConfig) -> None:
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        self._recomputes = check_recompute(self.strategy, self._parts.options, config.activation_checkpointing)
        if self._recomputes != "none":
            callbacks.insert(0, RecomputeBlocks(self._recomputes))
        if choose_offload(self.engine_strategy, config.offload):
            callbacks.insert(0, OffloadActivations())

    def _check_batches(self, config: EngineConfig) -> None:
        if config.nonfinite == "skip":
            if self.strategy.handles_gradient_accumulation:
                raise ValueError(
                    f"nonfinite='skip' can't leave out steps under {type(self.strategy).__name__}, which takes them"
                    " itself: choose 'warn' or 'error', or one of the engine's strategies."
                )
            self.engine_strategy.may_leave_out()
        if config.micro_batch_size == "auto" and self.world_size > 1:
            prepare_to_repeat(self.strategy, sync_batchnorm=config.sync_batchnorm)
        check_batch_sizes(
            config.global_batch_size,
            config.micro_batch_size,
            num_ranks=self.data_size,
            accumulate_grad_batches=config.accumulate_grad_batches,
        )
        if config.on_rank_loss == "continue":
            check_may_lose_ranks(self, config)

    @property
    def layout(self) -> Layout:
        """Sizes of the device mesh by axis; all processes are replicas under Lightning's own strategies."""
        return self.engine_strategy.layout

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients at the last step, before clipping (0-d, on the device); None without norm clipping."""
        return getattr(self.precision_plugin, "grad_norm", None)

    @property
    def bytes_compressed(self) -> int | None:
        """Bytes that this rank's comm hook has sent; None without one."""
        hook = self._parts.comm_hook
        return None if hook is None else hook.num_bytes

    @reports_uncaught
    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Trains `model`; see `lightning.pytorch.Trainer.fit` for the arguments.

        Raises:
            RefusedError: the module can't be trained in this way, or there is no such checkpoint; before any process
                starts. A `ValueError` and a `MisconfigurationException`.
            SIGTERMException: the process was sent SIGTERM; all ranks stop after the same step, with exit code 143.
            SystemExit: after Ctrl-C, in the same way, with exit code 130.
        """
        resume = self.config.resume if ckpt_path is None else ckpt_path
        with refusing():
            self._check_fit(model, train_dataloaders)
            check_checkpoint(resume, self.strategy.checkpoint_io)
            check_writable(folders_written_to(self))
        self._checkpoint_connector.logs.adopt(resume)  # type: ignore[attr-defined]
        if self.is_global_zero and not self.fast_dev_run and isinstance(model, LightningModule):  # type: ignore[attr-defined]
            claim_log_folders(self.loggers)
            self._checkpoint_connector.logs.note_created()  # type: ignore[attr-defined]
        try:
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, resume, weights_only)
        except SIGTERMException as stopped:
            stopped.code = STOPPED  # Lightning's 0 looks like success
            raise

    def _check_fit(self, model: LightningModule, train_dataloaders: Any) -> None:
        strategy = self.engine_strategy
        check_nodes(self.num_nodes, strategy.cluster_environment)
        if isinstance(model, LightningModule):  # otherwise Lightning raises an error that says what it expects
            if self._finetuning is not None:
                # Lightning: the launchers of workers, which get copies.
                copies = isinstance(self.strategy.launcher, _MultiProcessingLauncher)
                self._finetuning.prepare(model, is_copied=copies)
            check_module(model, precision=str(self.precision), comm_hook=self._parts.comm_hook)
            if self.precision in FLOAT8:
                check_float8(model, str(self.precision), compiles=bool(self.config.compile))
            elif self.precision in OF_BLOCKS and not is_overridden("configure_model", model):
                check_blocks(model, str(self.precision))
            check_manual_optimization(self, model)
            if self._recomputes != "none" and not is_overridden(
                "configure_model", model
            ):  # else it is not complete yet
                blocks_to_recompute(model)
            if self._recomputes == "selective":
                kept_operators(model)
            is_complete = not is_overridden("configure_model", model) and not is_overridden("setup", model)
            if is_complete and strategy.layout.world_size > 1:  # which else looks once it has been built
                check_shapes(model)
            strategy.check_module(model)
            if self.config.on_rank_loss == "continue":
                check_run_may_lose_ranks(self, model)
                survive_losses(self)
            strategy.check_run(compiles=bool(self.config.compile), callbacks=self.callbacks)  # type: ignore[attr-defined]
            strategy.check_loader(train_dataloaders)
        global_batch_size = self.config.global_batch_size
        check_callbacks(self.callbacks, launcher=self.strategy.launcher, global_batch_size=global_batch_size)  # type: ignore[attr-defined]
        if global_batch_size is not None and isinstance(train_dataloaders, DataLoader):
            check_loader(train_dataloaders, global_batch_size, self.config.micro_batch_size)

    def export(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        huggingface: str | None = None,
        adapters: str | None = None,
    ) -> None:
        """Writes the weights of the module that was trained, whole under every strategy; all ranks call it.

        After a run with ``finetune="lora"`` they are the module's own weights, with the adapters merged into them.

        Args:
            path: ``.safetensors``, or ``.pt`` for `torch.load`; local or an fsspec URL. Names are those of the module's
                `state_dict`; only its tensors are written.
            overwrite: a file of that name may be replaced.
            huggingface: name of the sub-module that is a model of transformers, such as ``"model"``. `path` is a new
                folder then, which `from_pretrained` reads: files of at most 5 GB and the model's configuration.
            adapters: name of the sub-module that was fine-tuned, such as ``"model"``; "" for the whole module. `path`
                is a new folder then, with the adapters alone, which peft's `PeftModel.from_pretrained` reads.

        Raises:
            ValueError: another ending, a target that exists already, or no module yet.
        """
        is_folder = huggingface is not None or adapters is not None
        if not is_folder:
            choose("ending", os.path.splitext(path)[1], (".safetensors", ".pt"))
        if huggingface is not None and adapters is not None:
            raise RefusedError("huggingface and adapters write different folders: give one of them.")
        if self.model is None:
            raise RefusedError("export has no weights to write: call fit, validate, test or predict first.")
        added = None if self._finetuning is None else self._finetuning.adapters
        if adapters is not None and added is None:
            raise RefusedError(f"adapters={adapters!r} has nothing to write: the run had no finetune='lora'.")
        self.on_rank_zero(lambda: check_target(os.fspath(path), overwrite=overwrite, is_folder=is_folder))
        configuration = (
            {} if huggingface is None else configuration_of(self.lightning_module.get_submodule(huggingface))
        )
        peft = None
        if adapters is not None:
            tuned = self.lightning_module.get_submodule(adapters)
            peft = adapters, getattr(getattr(tuned, "config", None), "_name_or_path", None)
        folder, name = os.path.split(os.fspath(path).rstrip("/"))
        shards = os.path.join(folder, f".exporting-{name}")
        self.save_checkpoint(shards, weights_only=True)
        try:
            self.on_rank_zero(
                lambda: write_export(
                    shards,
                    os.fspath(path),
                    overwrite=overwrite,
                    huggingface=huggingface,
                    configuration=configuration,
                    adapters=added,
                    peft=peft,
                )
            )
        finally:
            if self.is_global_zero:
                self.remove_checkpoint(shards)

    def verify(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        steps: int = 5,
        tolerance: float = 1e-5,
    ) -> verification.Certificate:
        """Trains copies of `model` for a few steps in one process and under this engine's flags, and compares them.

        Args:
            model: left as it is.
            train_dataloaders: one DataLoader; or give `datamodule`.
            datamodule: whose `train_dataloader()` is used.
            steps: number of optimizer steps.
            tolerance: largest absolute difference of a weight that counts as equal.

        Returns:
            The certificate, on every rank; it is printed as well.
        """
        check_count("steps", steps)
        a_few = {**_A_FEW_STEPS, "max_steps": steps}
        # The reference gets all flags that `Trainer` has too, but not those that distribute the run.
        shared = {key: value for key, value in self.flags.items() if key not in _DISTRIBUTION_FLAGS}
        data_of_reference = copy.deepcopy(datamodule)
        generator: Any = getattr(getattr(train_dataloaders, "sampler", None), "generator", None)
        order = generator.get_state() if generator is not None else None
        numbers = get_random_state()
        with tempfile.TemporaryDirectory() as folder, verification.exact_arithmetic():
            recorder = verification.Recorder(Path(folder) / "states.pt")
            engine = type(self)(**{**self.flags, **a_few, **_SILENT, "callbacks": [recorder], "resume": None})
            engine.is_trial = True
            engine.fit(copy.deepcopy(model), train_dataloaders, datamodule=datamodule)
            certificate: Any = None  # stays None on the other ranks, which wait for it below
            if engine.is_global_zero:
                states, num_optimizers = torch.load(recorder.path, weights_only=True)
                if order is not None:
                    generator.set_state(order)  # the engine's run has drawn from the user's generator
                set_random_state(numbers)
                whole = copy.deepcopy(model)
                if engine._finetuning is not None:
                    engine._finetuning.prepare(whole, is_copied=False)
                read_stored(whole)
                loader = train_dataloaders
                if data_of_reference is not None:
                    data_of_reference.prepare_data()
                    data_of_reference.setup("fit")
                    loader = data_of_reference.train_dataloader()
                batch_size = self.config.global_batch_size or (loader.batch_size or 0) * engine.data_size
                with quiet(is_trial=True):
                    make = partial(type(self), check_first_steps=False) if num_optimizers > 1 else None
                    of_trainer = {**shared, **a_few}
                    reference, rounding = verification.reference_steps(whole, loader, batch_size, of_trainer, make)
                flag = None if engine.engine_strategy.expects_parity else str(self.config.strategy)
                certificate = verification.certify(states, reference, tolerance, rounding, flag)
        self.certificate: verification.Certificate = engine.strategy.broadcast(certificate)
        rank_zero_info(str(self.certificate))
        return self.certificate

    def bench_comm(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        compressions: list[str] | None = None,
    ) -> WireReport:
        """Measures the network between this engine's ranks, and forecasts a step of `model` under each compression.

        Args:
            model: left as it is; a copy takes a few steps.
            train_dataloaders: one DataLoader; or give `datamodule`.
            datamodule: whose `train_dataloader()` is used.
            compressions: flags, those that change gradients least first; None for all methods and ``"none"``.

        Returns:
            The report, on every rank; it is printed as well.

        Raises:
            RefusedError: the strategy can't take a step under each compression.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.json"
            flags = {"compression": "auto", "max_steps": NUM_STEPS, "callbacks": [ReportWriter(path)], "resume": None}
            try:
                engine = type(self)(**{**self.flags, **_A_FEW_STEPS, **_SILENT, **flags})
            except ValueError as error:  # of all these flags, the strategy can refuse only "auto"
                *names, last = (name for name, row in STRATEGIES.items() if "auto" in row.compressions)
                raise RefusedError(
                    f"bench-comm can't forecast under strategy {self.config.strategy!r}: choose {', '.join(names)} or"
                    f" {last}."
                ) from error
            for flag in compressions or ():
                make_comm_hook(flag)  # raises an error that says what is wrong with the model
            every_method = ["none", *(name for name in COMM_HOOKS if name != "auto")]
            engine.is_trial = True
            engine._parts.comm_hook.candidates = list(compressions or every_method)  # type: ignore[union-attr]
            engine.fit(copy.deepcopy(model), train_dataloaders, datamodule=datamodule)
            report = WireReport.read(path) if engine.is_global_zero else None
        self.report: WireReport = engine.strategy.broadcast(report)  # type: ignore[assignment]
        rank_zero_info(str(self.report))
        return self.report


Engine.__doc__ = "\n".join(
    [inspect.cleandoc(Engine.__doc__ or ""), "", "Args:"]
    + [f"    {name}: {text}" for name, text in field_docs(EngineConfig).items()]
)


@dataclasses.dataclass(frozen=True, eq=False)
class _FitArguments(EngineConfig):
    module: LightningModule
    data: LightningDataModule | DataLoader[Any]


@with_arguments_of(_FitArguments)
def fit(module: LightningModule, data: LightningDataModule | DataLoader[Any], **flags: Any) -> Engine:
    """Builds an `Engine` from `flags`, trains `module` on `data`, and returns the engine.

    Args:
        module: changed in place.
        data: a data module, or the DataLoader to train on.
        **flags: arguments of `Engine`.
    """
    engine = Engine(**flags)
    engine.fit(module, datamodule=data) if isinstance(data, LightningDataModule) else engine.fit(module, data)
    return engine


def _as_list(values: Any) -> list[Any]:
    return [] if values is None else list(values) if isinstance(values, Iterable) else [values]
