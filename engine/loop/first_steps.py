"""Comparison of the first steps of a run whose module is split with the same steps in one process.

Phases, which all ranks enter together:
1. Before the module is split, rank 0 copies it. If it can't, it broadcasts the reason.
2. Before the first step, rank 0 gathers the weights.
3. In the first steps, each rank with different samples keeps its batches, random states and losses, and the norm
   of the gradients is computed (an all-reduce of one number, as for clipping).
4. After these steps, rank 0 gathers the weights again, and all that the ranks have kept. It repeats the steps with its
   copy (`unsplit.py`), while the other ranks wait, and broadcasts the difference.
Then everything is detached. Weights and random numbers of the run are bit for bit those of a run without the check.
"""

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat.torch import _ConvNd
from ..checkpoint import get_random_state, set_random_state
from ..distributed.object_group import WORLD
from ..initialization.materialize import has_meta_tensors, materialize
from ..initialization.stored_weights import read_stored
from ..strategies import adapt, capabilities_of, norm_of
from .unsplit import SETTINGS, MicroBatch, NeedsOtherRanks, Replay, Step, UnfitError, loss_of, paired_submodules

__all__ = ["FirstSteps", "FirstStepsError"]

_NUM_STEPS = 2
"""Two steps: a wrong state after the first one (a moving average, an attribute) shows in the second. If there are more
ranks than half of `_MAX_RANKS`, only one step is compared."""
_MAX_RANKS = 8
_MAX_BYTES = 2**30
"""The largest size of a module's parameters that "auto" copies; with Adam, rank 0 needs four times as much memory."""

_LOSS_TOLERANCE, _NORM_TOLERANCE = 1e-4, 1e-3
"""The largest relative differences in float32; a different order of summation changes 1e-6 or less."""
_ROUNDED_TOLERANCE = 3e-2
"""The largest relative difference of loss and norm if the precision, or TF32, rounds to 10 bits or less."""
_WEIGHTS_TOLERANCE = 3e-2
"""The largest difference of a weight, relative to the largest change in its tensor: Adam magnifies rounding errors."""

_CHANGING_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end")
_COPIED_TYPES = (bool, int, float, str, type(None))

log = logging.getLogger("polyphase.engine")


class FirstStepsError(RuntimeError):
    """The first steps of a run differ from the same steps in one process."""


class FirstSteps:
    """The check of a trainer's runs.

    A difference is a warning under ``"auto"``: code with a random generator of its own, or a callback that changes
    weights, makes a difference that is no error, and by default a correct run must not end. With True it is an error.

    Args:
        trainer: the trainer whose runs are checked.
        policy: ``"auto"``: check if it costs little; True: check also if it costs more; False: never check.
    """

    duration_s = 0.0
    """The seconds that this rank has spent on the check so far, including its wait for rank 0."""

    def __init__(self, trainer: Any, policy: bool | Literal["auto"]) -> None:
        self._trainer, self._policy = trainer, policy
        self._reset()
        if policy is not False and capabilities_of(trainer.strategy).splits_module:
            trainer.strategy.before_split = self.copy_module

    def _reset(self) -> None:
        self._copy: LightningModule | None = None
        self._is_due = False
        self._steps: list[Step] = []
        self._weights_before: dict[str, Tensor] | None = None
        self._problem: str | None = None
        self._handles: list[Any] = []

    # --- before

    def copy_module(self, module: LightningModule) -> None:
        """Phase 1: copies the module on rank 0; called on all ranks before the module is split."""
        self._reset()
        start_s = perf_counter()
        reason = self._reason_to_skip(module)
        if reason is None:
            problem = None
            if self._trainer.global_rank == 0:
                try:
                    memo = {id(part): part for part in (self._trainer, self._trainer.datamodule) if part is not None}
                    self._copy = copy.deepcopy(module, memo)
                except Exception as error:
                    problem = f"{type(module).__name__} can't be copied ({type(error).__name__}: {error})"
            reason = WORLD.broadcast_object(problem)
        self._is_due = reason is None
        if reason is not None:
            self._report_skipped(reason)
        self.duration_s = perf_counter() - start_s

    def _reason_to_skip(self, module: LightningModule) -> str | None:
        trainer, strategy = self._trainer, self._trainer.strategy
        num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        if trainer.world_size == 1:
            return "there is one rank"
        if self._policy == "auto" and trainer.world_size > _MAX_RANKS:
            return f"one process would do the work of {trainer.world_size} ranks, more than {_MAX_RANKS}"
        if self._policy == "auto" and num_bytes > _MAX_BYTES:
            return f"the parameters have {num_bytes / 2**20:,.0f} MiB, more than {_MAX_BYTES / 2**20:,.0f}"
        if adapt(strategy).comm_hook is not None:
            return "a compression changes the gradients"
        if trainer.fit_loop.epoch_loop.automatic_optimization.out_of_memory is not None:
            return "micro_batch_size='auto' may do a step again"
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            return "a loss scaler leaves steps out"
        return None

    def _report_skipped(self, reason: str) -> None:
        text = f"the first steps are not compared with those of one process: {reason}."
        if self._policy is True:
            rank_zero_warn(text)
        elif self._trainer.is_global_zero:
            log.info(text)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Context manager around an epoch of training, entered when everything is restored."""
        if not self._is_due:
            yield
            return
        try:
            self._begin()
            yield
            self._compare()
        finally:
            self._end()

    def _begin(self) -> None:
        trainer: Any = self._trainer
        strategy = trainer.strategy
        is_torchs = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in strategy.optimizers)
        if trainer.global_step or not is_torchs:
            self._is_due = False
            self._report_skipped("the run is resumed" if is_torchs else "its optimizers are not torch's")
            return
        self._reports_batches = trainer.global_rank % strategy.layout.tp == 0
        self._reports_batches &= trainer.global_rank < strategy.data_size * strategy.layout.tp
        self._step: Step | None = None
        if strategy.capabilities.runs_own_schedule:
            strategy.run_schedule = self._recorded(strategy.run_schedule, is_schedule=True)
        else:
            strategy.training_step = self._recorded(strategy.training_step, is_schedule=False)
        self._handles = [optimizer.register_step_post_hook(self._record_step) for optimizer in strategy.optimizers]

    # --- in the steps

    def _recorded(self, run: Any, is_schedule: bool) -> Any:
        def run_recorded(*args: Any, **kwargs: Any) -> Any:
            kept = self._record_batch(*(args[0] if is_schedule else args))
            output = run(*args, **kwargs)
            loss = output[0] if is_schedule else loss_of(output)
            kept.loss = None if loss is None else loss.detach().clone()
            return output

        return run_recorded

    def _record_batch(self, batch: Any, batch_idx: int | None = None, *_: Any) -> MicroBatch:
        """Phase 3: keeps a batch; before the first step, also phase 2."""
        start_s, trainer = perf_counter(), self._trainer
        if self._weights_before is None:
            self._weights_before = {}
            state = trainer.strategy.lightning_module_state_dict()
            if self._copy is not None:
                self._attempt(lambda: self._fill_copy(state))
        if self._step is None:
            self._step = Step(trainer.global_step, trainer.current_epoch)
            self._steps.append(self._step)
        if batch_idx is None:
            batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        samples = trainer._data_connector.sizes.samples(batch_idx).local
        kept = MicroBatch(trainer.global_rank, None, batch_idx, samples, get_random_state())
        if self._reports_batches:
            self._attempt(lambda: setattr(kept, "batch", _host_copy(batch)))
        self._step.micro_batches.append(kept)
        self.duration_s += perf_counter() - start_s
        return kept

    def _fill_copy(self, state: dict[str, Any]) -> None:
        """Copies the present weights, and the attributes that hooks have set, to the copy of the module."""
        own, module = self._copy, self._trainer.lightning_module
        assert own is not None
        if has_meta_tensors(own):
            random = get_random_state()
            materialize(own)
            read_stored(own)
            set_random_state(random)
        for part, its_copy in paired_submodules(module, own):
            its_copy.training = part.training
            for name, value in vars(part).items():
                if name.startswith("_") or callable(value):
                    continue
                if type(value) in _COPIED_TYPES or name not in vars(its_copy):
                    vars(its_copy)[name] = copy.deepcopy(value)
        trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        for name, parameter in own.named_parameters():
            parameter.requires_grad_(trained.get(name, parameter.requires_grad))
        own.load_state_dict(state, strict=False)
        self._trainer.precision_plugin.convert_module(own)
        self._weights_before = {name: value.detach().clone() for name, value in own.state_dict().items()}

    def _attempt(self, function: Any) -> None:
        """Calls `function`; keeps its error until phase 4, so that all ranks stay in step."""
        try:
            function()
        except Exception as error:
            self._problem = self._problem or f"{type(error).__name__}: {error}"

    def _record_step(self, optimizer: Any, *_: Any) -> None:
        if self._step is None:
            return
        start_s = perf_counter()
        settings = [
            {key: _as_number(group[key]) for key in SETTINGS if key in group} for group in optimizer.param_groups
        ]
        norm_here = getattr(self._trainer.precision_plugin, "norm_of", None) or norm_of
        own = [p for group in optimizer.param_groups for p in group["params"]]
        norm = norm_here([p for p in own if p.grad is None or not p.grad.is_sparse])
        self._step.groups.append(settings)
        self._step.norms.append(norm)  # type: ignore[arg-type]  # read after the steps
        self.duration_s += perf_counter() - start_s

    # --- after

    def end_step(self) -> None:
        """Ends a step; after the last one that is checked, compares them."""
        if self._is_due and self._step is not None:
            self._step = None
            if len(self._steps) == (_NUM_STEPS if self._trainer.world_size <= _MAX_RANKS // 2 else 1):
                self._compare()
                self._end()

    def _compare(self) -> None:
        """Phase 4, for the steps that were recorded: an epoch may have fewer steps than are planned."""
        if not self._is_due or not self._steps:
            return
        start_s, trainer = perf_counter(), self._trainer
        for step in self._steps:
            step.norms = [float(norm) for norm in step.norms]
            for micro_batch in step.micro_batches:
                micro_batch.loss = None if micro_batch.loss is None else micro_batch.loss.cpu()
        state = trainer.strategy.lightning_module_state_dict()
        reports = WORLD.gather_object((self._problem, self._steps if self._reports_batches else None))
        verdict: tuple[str | None, str | None] = None, None
        if self._copy is not None:
            problem = next((problem for problem, _ in reports if problem is not None), None)
            steps = [steps for _, steps in reports if steps is not None]
            verdict = problem, None
            if problem is None:
                try:
                    verdict = None, self._describe_difference(steps, state)
                except UnfitError as unfit:
                    verdict = str(unfit), None
                except Exception as error:
                    verdict = f"it does not run in one process ({type(error).__name__}: {error})", None
        reason, difference = WORLD.broadcast_object(verdict)
        self.duration_s += perf_counter() - start_s
        if reason is not None:
            self._report_skipped(reason)
        if difference is None:
            return
        if self._policy is True:
            raise FirstStepsError(difference)
        rank_zero_warn(f"{difference} Training continues; `check_first_steps=True` ends it there.")

    def _end(self) -> None:
        """Removes the hooks and the replaced methods, and drops all that was recorded."""
        vars(self._trainer.strategy).pop("run_schedule", None)
        vars(self._trainer.strategy).pop("training_step", None)
        for handle in self._handles:
            handle.remove()
        self._reset()

    def _describe_difference(self, ranks: list[list[Step]], state: dict[str, Any]) -> str | None:
        """Compares the ranks' first steps with one process; returns a description of the difference, or None.

        Raises:
            UnfitError: the steps can't be compared.
        """
        trainer = self._trainer
        strategy, module = trainer.strategy, self._copy
        assert module is not None
        # Under fsdp a rank draws the same numbers for its samples as one process with the same random state.
        draws_same_numbers = strategy.layout.tp == strategy.layout.pp == 1
        joins_batches = not module.automatic_optimization or strategy._layer_sync is not None
        steps = list(zip(*ranks, strict=True))
        replay = Replay(module, trainer, strategy.root_device, joins_batches, draws_same_numbers)
        try:
            replay.run(steps)
        except NeedsOtherRanks:  # for example by `self.all_gather`
            module.load_state_dict(self._weights_before or {}, strict=False)
            replay = Replay(module, trainer, strategy.root_device, True, draws_same_numbers)
            replay.run(steps)
        differences = self._differences(
            replay, {name: value.detach() for name, value in module.state_dict().items()}, state
        )
        if not differences:
            log.info("the first %d steps are those of one process.", len(ranks[0]))
            return None
        callbacks = [type(c).__name__ for c in trainer.callbacks if _may_change_training(c)]
        also = f" (Callbacks take no part in that: {', '.join(callbacks)}.)" if callbacks else ""
        return (
            f"the first {len(ranks[0])} step(s) of {type(trainer.lightning_module).__name__} under strategy"
            f" {strategy!r} are not those of one process: {'; '.join(differences)}.{also} `polyphase verify`, with the"
            " same model, data and strategy, compares all tensors after each step. Where the module is known to differ,"
            " `check_first_steps=False` leaves this out."
        )

    def _differences(self, replay: Replay, expected: dict[str, Tensor], state: dict[str, Any]) -> list[str]:
        has_low_precision = self._has_low_precision
        differences = []
        for numbers, tolerance in ((replay.losses, _LOSS_TOLERANCE), (replay.norms, _NORM_TOLERANCE)):
            for quantity, actual, reference in numbers:
                if actual is None or reference is None:
                    continue
                a, b = float(actual), float(reference)
                if abs(a - b) > (_ROUNDED_TOLERANCE if has_low_precision else tolerance) * max(abs(a), abs(b)) + 1e-6:
                    differences.append(f"the {quantity} is {a:.7g}, not {b:.7g}")
        if has_low_precision:
            return differences[:3]
        worst = (0.0, "")
        assert self._weights_before is not None
        for name, value in expected.items():
            if name in state and name in self._weights_before and value.is_floating_point():
                difference, moved = _difference(
                    state[name], value, self._weights_before[name], replay.above_rounding.get(name)
                )
                if difference > _WEIGHTS_TOLERANCE * moved:
                    text = f"{name!r} has moved by {moved:.2e} there, and differs by {difference:.2e}"
                    worst = max(worst, (difference / moved if moved else torch.inf, text))
        return differences[:3] + ([worst[1]] if worst[1] else [])

    @property
    def _has_low_precision(self) -> bool:
        """Whether products are computed with fewer bits than float32 has."""
        if self._trainer.strategy.root_device.type == "cuda":
            backends, kinds = torch.backends, (_ConvNd, nn.RNNBase)
            uses_cudnn = any(isinstance(part, kinds) for part in self._trainer.lightning_module.modules())
            if backends.cuda.matmul.allow_tf32 or (uses_cudnn and backends.cudnn.allow_tf32):
                return True
        return str(self._trainer.precision) not in ("32-true", "64-true")


def _difference(actual: Tensor, expected: Tensor, before: Tensor, above_rounding: Tensor | None) -> tuple[float, float]:
    """Returns the largest difference of comparable elements, above rounding, and the largest change of an element."""
    if actual.shape != expected.shape:
        return torch.inf, 0.0
    actual, expected, before = (tensor.to("cpu", torch.float64) for tensor in (actual, expected, before))
    differs, moved = (actual - expected).abs(), (expected - before).abs()
    if above_rounding is not None:
        differs, moved = differs[above_rounding.cpu()], moved[above_rounding.cpu()]
    if not differs.numel() or not bool(expected.isfinite().all()):
        return 0.0, 0.0
    rounding = 1e-5 * float(expected.abs().max()) + 1e-7
    return max(0.0, float(differs.nan_to_num(torch.inf).max()) - rounding), float(moved.max())


def _host_copy(batch: Any) -> Any:
    """Returns a copy in host memory, which the step can't change; views are copied without their base."""
    own = apply_to_collection(batch, Tensor, lambda t: t.detach().to("cpu", copy=True).requires_grad_(t.requires_grad))
    pickle.dumps(own)  # raises an error here, not later when the other ranks wait
    return own


def _as_number(setting: Any) -> Any:
    if isinstance(setting, DTensor):
        setting = setting.full_tensor()
    return float(setting) if isinstance(setting, Tensor) else setting


def _may_change_training(callback: Any) -> bool:
    is_stock = type(callback).__module__.startswith(("lightning.", "polyphase."))
    return not is_stock and any(is_overridden(hook, callback, Callback) for hook in _CHANGING_HOOKS)
