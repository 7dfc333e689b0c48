"""The engine: a Lightning `Trainer` whose flags choose among Polyphase's parts. No training logic lives here."""

import copy
import math
import signal
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from . import verify as verification
from .compression import COMM_HOOKS, make_comm_hook
from .data import UNEVEN, check_batch_sizes, check_loader
from .environment import resolve_sizes
from .flags import Layout, check_count, check_number, choose
from .loop import CompileSteps, LoopTrainer, NonFiniteWatch, attach, compile_mode, defaults_from_environment
from .preflight import check_module
from .refusal import RefusedError, check_checkpoint, check_nodes, refusing
from .strategies import STRATEGIES, LayoutStrategy, check_join, prepare_to_repeat, select
from .wire import NUM_STEPS, ReportWriter, WireReport

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

_SPREADING = {
    "async_checkpoints",
    "callbacks",
    "compile",
    "compression",
    "devices",
    "global_batch_size",
    "hang_timeout_s",
    "micro_batch_size",
    "nonfinite",
    "num_nodes",
    "plugins",
    "precision",
    "resume",
    "strategy",
    "sync_batchnorm",
    "uneven",
}
"""Flags that `Engine.verify` compares against their absence."""


class Engine(LoopTrainer):
    """A `lightning.pytorch.Trainer` that runs any module under any strategy, with the same result.

    Every argument of `Trainer` keeps its name, default and meaning; those below are new or can do more.

    Args:
        strategy: ``"single"``, ``"ddp"``, ``"fsdp"``, ``"hsdp:replicate=2,shard=4"``, ...: see `polyphase strategies`.
            A suffix ``_spawn``, ``_fork`` or ``_notebook`` chooses how processes start. Lightning's own names and
            strategy objects are taken as well. ``"auto"``: ``single`` on one device, else ``ddp``.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"`` or ``"64-true"``,
            on every device and under every strategy, but for ``"16-mixed"`` under ``ps`` and those with ``pp``.
        compression: how gradients are sent: ``"none"``, ``"bf16"``, ``"int8"``, ``"powersgd:4"``, ``"topk:0.01"``,
            ``"sign"``, ``"powersgd:4+fp16"``, ...: see `polyphase strategies`. ``"auto"``: what is fastest here, found
            in the first steps.
        global_batch_size: samples of each optimizer step, over all ranks and micro-batches, whatever their number; the
            accumulation follows from it. None: the DataLoader's ``batch_size`` x ranks x `accumulate_grad_batches`.
        micro_batch_size: how many of them a rank takes at once, at most. None: the DataLoader's ``batch_size``.
            ``"auto"``: its whole share; where a rank runs out of memory, the step is done again with half as many.
        uneven: what happens where ranks have different numbers of training batches of their own (streams): an epoch
            ends with the last rank (``"pad"``, ``"join"``: those that are through count for nothing), or with the first
            (``"drop"``).
        resume: checkpoint to go on from, if `fit` is given none. ``"auto"``: the newest one of this run that is not
            damaged, or a fresh start; brings a `Snapshot` callback where there is none, and keeps the global batch if
            the number of processes changes. ``"fresh"``: the same, but none, whatever is there.
        async_checkpoints: save while training goes on; a step waits until its state is copied.
        compile: run the module's steps through `torch.compile`, in the mode named (True: ``"default"``).
        hang_timeout_s: how long a rank may stay at one batch and phase; then the run ends, with the culprit and all
            stacks named. Three times as long before the second batch. None: for ever.
        nonfinite: what to do about a loss or gradient norm that is infinite or NaN: ``"warn"``, ``"error"`` or
            ``"ignore"``.
        **trainer_flags: all other arguments of `Trainer`.

    Raises:
        ValueError: a flag that is unknown or can't be honoured, before any process starts.
    """

    @defaults_from_environment
    def __init__(
        self,
        *,
        accelerator: str | Any = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: str | int | None = None,
        compression: str = "none",
        compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = False,
        resume: str | Path | None = None,
        async_checkpoints: bool = True,
        hang_timeout_s: float | None = 600.0,
        nonfinite: Literal["warn", "error", "ignore"] = "warn",
        callbacks: list[Callback] | Callback | None = None,
        enable_progress_bar: bool | None = None,
        accumulate_grad_batches: int = 1,
        global_batch_size: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        uneven: Literal["pad", "join", "drop"] = "pad",
        gradient_clip_val: int | float | None = None,
        plugins: Any | list[Any] | None = None,
        sync_batchnorm: bool = False,
        barebones: bool = False,
        **trainer_flags: Any,
    ) -> None:
        named = {name: value for name, value in locals().items() if name not in ("self", "trainer_flags", "__class__")}
        self._flags = {**named, **trainer_flags}
        check_count("accumulate_grad_batches", accumulate_grad_batches)
        if isinstance(gradient_clip_val, (int, float)):  # of anything else Lightning says that it should be one
            check_number("gradient_clip_val", gradient_clip_val, most=math.inf)
        if hang_timeout_s is not None:
            check_number("hang_timeout_s", hang_timeout_s, above=0)
        devices, num_nodes = resolve_sizes(devices, num_nodes)
        choose("value of uneven", uneven, UNEVEN)
        watch = NonFiniteWatch(nonfinite)
        mode = compile_mode(compile)
        parts = select(
            strategy=strategy,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            compression=compression,
            sync_batchnorm=sync_batchnorm,
            plugins=_as_list(plugins),
        )
        given = _as_list(callbacks)
        default_bar: Callback | None = None
        if enable_progress_bar is not False and not barebones and not any(isinstance(c, ProgressBar) for c in given):
            given.append(default_bar := _progress_bar())
        if resume in ("auto", "fresh") and not any(hasattr(callback, "snapshot_folder") for callback in given):
            given.append(_snapshot())
        if mode is not None:
            given.insert(0, CompileSteps(mode))
        self._parts = parts
        super().__init__(
            accelerator=accelerator,
            strategy=parts.strategy,
            devices=parts.devices,
            num_nodes=num_nodes,
            precision=parts.precision,
            callbacks=given,
            enable_progress_bar=enable_progress_bar,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            plugins=parts.plugins,
            sync_batchnorm=sync_batchnorm,
            barebones=barebones,
            **trainer_flags,
        )
        self._resume = resume
        attach(
            self,
            watch,
            default_bar,
            hang_timeout_s=hang_timeout_s,
            async_checkpoints=async_checkpoints,
            keeps_global_batch=resume in ("auto", "fresh"),
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            uneven=uneven,
        )
        if uneven == "join" and self.world_size > 1:
            check_join(self.strategy)
        if micro_batch_size == "auto" and self.world_size > 1:
            prepare_to_repeat(self.strategy, sync_batchnorm=sync_batchnorm)
        check_batch_sizes(
            global_batch_size,
            micro_batch_size,
            num_ranks=self.data_size,
            accumulate_grad_batches=accumulate_grad_batches,
        )

    @property
    def layout(self) -> Layout:
        """Sizes of the device mesh by axis; all processes are replicas under Lightning's own strategies."""
        return getattr(self.strategy, "layout", None) or Layout(replicate=self.world_size)

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of all gradients at the last step, before clipping (0-d, on the device); None without norm clipping."""
        return getattr(self.precision_plugin, "grad_norm", None)

    @property
    def bytes_compressed(self) -> int | None:
        """Bytes that this rank's comm hook has sent; None without one."""
        hook = self._parts.comm_hook
        return None if hook is None else hook.num_bytes

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
        """
        resume = self._resume if ckpt_path is None else ckpt_path
        with refusing():
            self._check_fit(model, train_dataloaders)
            check_checkpoint(resume, self.strategy.checkpoint_io)
        try:
            super().fit(model, train_dataloaders, val_dataloaders, datamodule, resume, weights_only)
        except SIGTERMException as stopped:
            stopped.code = 128 + signal.SIGTERM  # as shells have it; Lightning's 0 looks like success
            raise

    def _check_fit(self, model: LightningModule, train_dataloaders: Any) -> None:
        check_nodes(self.num_nodes, getattr(self.strategy, "cluster_environment", None))
        if isinstance(model, LightningModule):  # else Lightning says what it expects
            check_module(model, precision=str(self.precision), comm_hook=self._parts.comm_hook)
            if isinstance(self.strategy, LayoutStrategy):
                self.strategy.check_module(model)
                self.strategy.check_run(compiles=bool(self._flags["compile"]))
                self.strategy.check_loader(train_dataloaders)
        global_batch_size = self._flags["global_batch_size"]
        if global_batch_size is not None and isinstance(train_dataloaders, DataLoader):
            check_loader(train_dataloaders, global_batch_size, self._flags["micro_batch_size"])

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
        quiet = {**_A_FEW_STEPS, "max_steps": steps}
        # The reference gets all flags but those that are ours, or that say how the run is spread.
        shared = {key: value for key, value in self._flags.items() if key not in _SPREADING}
        loader = train_dataloaders if datamodule is None else datamodule.train_dataloader()
        generator: Any = getattr(getattr(loader, "sampler", None), "generator", None)
        order = generator.get_state() if generator is not None else None
        with tempfile.TemporaryDirectory() as folder:
            recorder = verification.Recorder(Path(folder) / "states.pt")
            engine = type(self)(**{**self._flags, **quiet, "callbacks": [recorder], "resume": None})
            engine.fit(copy.deepcopy(model), train_dataloaders, datamodule=datamodule)
            certificate: Any = None  # on the other ranks, which wait for it below
            if engine.is_global_zero:
                ours = torch.load(recorder.path, weights_only=True)
                if order is not None:
                    generator.set_state(order)  # a generator of the user's has been drawn from
                reference = verification.reference_steps(
                    copy.deepcopy(model),
                    loader,
                    self._flags["global_batch_size"] or (loader.batch_size or 0) * engine.data_size,
                    {**shared, **quiet},
                )
                flag = None if verification.is_to_equal(engine.strategy) else str(self._flags["strategy"])
                certificate = verification.certify(ours, reference, tolerance, differs_by=flag)
        self.certificate: verification.Certificate = engine.strategy.broadcast(certificate)
        rank_zero_info(str(self.certificate))
        return self.certificate

    def wire(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        compressions: list[str] | None = None,
    ) -> WireReport:
        """Measures the wire between this engine's ranks, and forecasts a step of `model` under each compression.

        Args:
            model: left as it is; a copy takes a few steps.
            train_dataloaders: one DataLoader; or give `datamodule`.
            datamodule: whose `train_dataloader()` is used.
            compressions: flags, those that change less of the gradients first; None for all methods and ``"none"``.

        Returns:
            The report, on every rank; it is printed as well.

        Raises:
            RefusedError: the strategy can't take a step under each compression.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.json"
            flags = {"compression": "auto", "max_steps": NUM_STEPS, "callbacks": [ReportWriter(path)], "resume": None}
            try:
                engine = type(self)(**{**self._flags, **_A_FEW_STEPS, **flags})
            except ValueError as error:  # of all these flags only "auto" can be one that the strategy refuses
                *names, last = (name for name, row in STRATEGIES.items() if "auto" in row.compressions)
                raise RefusedError(
                    f"wire can't forecast under strategy {self._flags['strategy']!r}: choose {', '.join(names)} or"
                    f" {last}."
                ) from error
            for flag in compressions or ():
                make_comm_hook(flag)  # says what is wrong with it
            every_method = ["none", *(name for name in COMM_HOOKS if name != "auto")]
            engine._parts.comm_hook.candidates = list(compressions or every_method)  # type: ignore[union-attr]
            engine.fit(copy.deepcopy(model), train_dataloaders, datamodule=datamodule)
            report = WireReport.read(path) if engine.is_global_zero else None
        self.report: WireReport = engine.strategy.broadcast(report)  # type: ignore[assignment]
        rank_zero_info(str(self.report))
        return self.report


def fit(module: LightningModule, data: LightningDataModule | DataLoader, **flags: Any) -> Engine:
    """Builds an `Engine` from `flags`, trains `module` on `data`, and returns the engine.

    Args:
        module: changed in place.
        data: a data module, or the DataLoader to train on.
        **flags: arguments of `Engine`.
    """
    engine = Engine(**flags)
    engine.fit(module, datamodule=data) if isinstance(data, LightningDataModule) else engine.fit(module, data)
    return engine


def _as_list(given: Any) -> list[Any]:
    return [] if given is None else list(given) if isinstance(given, Iterable) else [given]


# Callbacks import the engine, never the other way round; these two are the exception, and by name.
def _progress_bar() -> Callback:
    from polyphase.callbacks import default_progress_bar

    return default_progress_bar()


def _snapshot() -> Callback:
    from polyphase.callbacks import default_snapshot

    return default_snapshot()
