"""`tp`, `fsdp+tp` and `hsdp+tp`: each layer split over ranks that have the same samples, by a plan.

torch's DTensor and `parallelize_module`
(https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html), by the plan of `plan.py`. With `fsdp` or
`hsdp`, the parts are cut into shards as well, over the ranks that have other samples: a mesh with the axis `tp`
innermost, where links are fastest.

Communication per micro-batch over the T ranks of `tp`, with activations of A bytes: 1. forward: an all-reduce of A for
each MLP, each attention, and the embedding; an all-gather of the logits; 2. backward: an all-reduce of A for each MLP,
each attention, and the output layer. Each waits: nothing else can be done meanwhile. With `sequence_parallel`, an
all-gather and a reduce-scatter in the place of each all-reduce. 3. per optimizer step: an all-reduce of the gradient of
each parameter that all ranks have whole and use for a part of the work (norms of heads; with `sequence_parallel` all
norms). Other parameters that are whole get the same gradient on all ranks. Then those of `fsdp` or `hsdp`, with 1/T of
the bytes.
"""

import contextlib
import logging
import traceback
import warnings
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

# torch: it begins to draw the numbers of DTensors with this, or else sets all ranks to the state of the first.
from torch.distributed.tensor._random import manual_seed
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from ...checkpoint import get_random_state, set_random_state
from ...choices import Axis
from ...compression import CommHook
from ...flags import Layout, check_count
from ..fsdp import FSDP
from ..options import FSDPTPOptions, HSDPTPOptions, TPOptions
from ..pipeline.absent import is_users
from .mixed_loss import give_plain_gradients
from .plan import Plan, make_plan
from .styles import refuse_second_backward, replicate, to_plain

# torch: it finds two all-gathers in a row worth a warning, where whole weights are asked for at the end of a run.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

__all__ = ["TensorParallel"]


class TensorParallel(FSDP):
    """Layers split over the axis `tp` of the mesh, and `fully_shard` on the others, if there are any.

    Args:
        options: `TPOptions` for the axis `tp` alone, `FSDPTPOptions` and `HSDPTPOptions` for two and three axes.
        launcher: suffix of the flag, see `flags.LAUNCHERS`.
        comm_hook: none; the registry says why.
    """

    options: Any
    why_no_repeat = "tensor parallelism"
    why_not_counted = "has its collectives made by DTensor"

    def __init__(self, options: Any, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        super().__init__(options, launcher, comm_hook)
        self._styles: dict[nn.Module, Any] = {}
        self._while_running = contextlib.ExitStack()
        self._is_inner = False
        self._whole: list[Any] = []

    def __repr__(self) -> str:
        name = {TPOptions: "tp", FSDPTPOptions: "fsdp+tp", HSDPTPOptions: "hsdp+tp"}[type(self.options)]
        return repr(f"{name}_{self.launcher_suffix}" if self.launcher_suffix else name)

    @property
    def _shards(self) -> bool:
        return not isinstance(self.options, TPOptions)

    def derive_layout(self, world_size: int) -> Layout:
        """The axis `tp` as the options have it, and the others as `fsdp` and `hsdp` have them."""
        options, tp = self.options, self.options.tp
        if isinstance(options, TPOptions):
            return Layout.derive(world_size, rest="tp", tp=tp)
        if tp is None:
            tp = world_size // self.num_nodes if self.num_nodes > 1 else min(2, world_size)
        check_count("the size of axis 'tp'", tp)
        if not isinstance(options, HSDPTPOptions):
            return Layout.derive(world_size, rest="shard", tp=tp)
        replicate = self.num_nodes if options.replicate is None and options.shard is None else options.replicate
        rest: Axis = "replicate" if replicate is None else "shard"
        return Layout.derive(world_size, rest=rest, replicate=replicate, shard=options.shard, tp=tp)

    def check_module(self, module: nn.Module) -> None:
        """Raises ValueError if `module` can't be split, before any process starts."""
        super().check_module(module)
        if next(module.parameters(), None) is not None:  # else it is built later, in `configure_model`
            self._make_plan(module)

    def _make_plan(self, module: nn.Module) -> Plan:
        options = self.options
        return make_plan(
            module,
            self.layout.tp,
            is_sharded=self._shards,
            loss_parallel=options.loss_parallel,
            by_sequence=options.sequence_parallel,
        )

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """See `MeshStrategy`."""
        return (*super().mesh_axes, "tp") if self._shards else ("tp",)

    def _shard_mesh(self) -> Any:
        return self.device_mesh[super().mesh_axes]

    def _is_laid_out(self, model: nn.Module) -> bool:
        return any(isinstance(p, DTensor) for p in model.parameters())

    def setup(self, trainer: Trainer) -> None:
        """Splits the module, unless an earlier `fit` has, and creates the optimizers on the parts."""
        super().setup(trainer)
        self._draw_alike()
        assert self.model is not None
        self.hand_out_data_group(self.model)
        parts = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        self._whole = [] if self._shards else [p for p in parts if p.placements == (Replicate(),)]
        if self.options.loss_parallel:
            self._while_running.enter_context(loss_parallel())

    def teardown(self) -> None:
        """Puts torch's settings back."""
        self._while_running.close()
        super().teardown()

    def _draw_alike(self) -> None:
        """Ranks with the same samples draw the same random numbers: what is whole on all of them stays the same."""
        if self.root_device.type == "cuda":
            torch.cuda.init()  # what follows takes its state along, if there is one
        state = [get_random_state()]
        if self.root_device.type == "cuda":
            # Else torch would have all ranks draw alike, whatever their samples. It seeds all that the state holds.
            manual_seed(0, self.device_mesh)
        else:  # torch: there it draws the numbers for a DTensor as for any tensor, which is what is wanted
            warnings.filterwarnings("ignore", message="DTensor random operators may not have complete support")
        group = self.device_mesh["tp"].get_group()
        dist.broadcast_object_list(state, group=group, group_src=0, device=self.root_device)
        set_random_state(state[0])

    def _shard(self, model: nn.Module) -> None:
        plan = self._make_plan(model)
        self._styles = {model.get_submodule(name): style for name, style in plan.styles.items()}
        rank_zero_info(str(plan))
        super()._shard(model)

    def _split(self, part: nn.Module) -> None:
        """Splits what the plan has of `part`; tied parameters stay tied."""
        before = [(sub, key, p) for sub in part.modules() for key, p in sub._parameters.items() if p is not None]
        styles = [(sub, self._styles.pop(sub)) for sub in part.modules() if sub in self._styles]
        for sub, style in reversed(styles):  # children first: what they leave whole is their parent's to care for
            # Every rank has the whole part: nothing is sent.
            parallelize_module(sub, self.device_mesh["tp"], style, src_data_rank=None)
            sub.register_forward_hook(refuse_second_backward)
        if self.options.sequence_parallel:
            # Each rank uses what is whole for a part of the sequence: their gradients are to be added up.
            replicate(part, self.device_mesh["tp"])
        split: dict[Any, Any] = {}
        for sub, key, whole in before:
            new = sub._parameters[key]
            if new is not whole:
                sub._parameters[key] = split.setdefault(whole, new)
                _check_tie(split[whole], new, sub)
        for sub, key, whole in before:
            if sub._parameters[key] is whole and whole in split:
                raise ValueError(f"{_tie(sub)} one of them is split and the other one is not.")

    def _fully_shard(self, part: nn.Module, is_last: bool) -> None:
        if self._shards:
            super()._fully_shard(part, is_last)

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        """Several blocks of rows in one tensor are cut by columns: no other cut of them has a name in DTensor."""
        if isinstance(parameter, DTensor) and any(hasattr(p, "split_factor") for p in parameter.placements):
            return Shard(1)
        return None

    def _marked(self, step: Callable[..., Any]) -> Callable[..., Any]:
        marked = super()._marked(step)

        def plain(*args: Any, **kwargs: Any) -> Any:
            with _replicating():
                result = marked(*args, **kwargs)
                give_plain_gradients(result)
                return to_plain(result)

        return plain

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As in the forward pass, the user's own tensors count as replicas."""
        give_plain_gradients(closure_loss)  # where the step optimizes by hand
        with _replicating():
            loss = super().backward(closure_loss, *args, **kwargs)
        if not self._is_inner:
            self._add_up()
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """With `fused` and `foreach`, parameters that are whole go beside those that are split."""
        with _replicating():
            return super().optimizer_step(*args, **kwargs)

    def _add_up(self) -> None:
        """Phase 3; FSDP2 does it itself."""
        for p in self._whole:
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)

    def _hook_units(self) -> None:
        """Nothing is compressed, and what DTensor sends goes through no wire that counts."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around an inner micro-batch: gradients stay where they are."""
        self._is_inner = True
        try:
            with super().block_backward_sync() if self._shards else contextlib.nullcontext():
                yield
        finally:
            self._is_inner = False


_depth = [0]


@contextlib.contextmanager
def _replicating() -> Generator[None, None, None]:
    """Tensors that meet a DTensor count as replicas: masks, say, that the user's code makes within a region."""
    with contextlib.nullcontext() if _depth[0] else implicit_replication():  # torch's own can't be nested
        _depth[0] += 1
        try:
            yield
        except Exception as error:
            if (place := _where_dtensor_failed(error)) is None:
                raise
            raise RuntimeError(
                f"{place} can't be done with what a layer that is split over the tensor-parallel ranks has returned:"
                f" {type(error).__name__}: {error}. Name other layers in tensor_parallel_plan(), or choose another"
                " strategy, such as 'fsdp'."
            ) from error
        finally:
            _depth[0] -= 1


def _where_dtensor_failed(error: Exception) -> str | None:
    """The line of the user's from which torch's DTensor was called that raised `error`; None if another one did."""
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_by = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    if not raised_by.startswith("torch.distributed.tensor.") or isinstance(error, torch.OutOfMemoryError):
        return None
    of_user = [frame for frame in frames if is_users(frame[0])] or frames[:1]
    [place] = traceback.StackSummary.extract(iter(of_user[-1:]))
    return f'{place.filename}:{place.lineno} in {place.name}: "{place.line}"'


def _check_tie(first: Any, second: Any, sub: nn.Module) -> None:
    if first.placements != second.placements:
        raise ValueError(f"{_tie(sub)} one is split as {first.placements}, the other one as {second.placements}.")


def _tie(sub: nn.Module) -> str:
    return (
        f"tensor_parallel_plan() must split layers that share a parameter, such as this {type(sub).__name__}, in the"
        " same way (the rows of an embedding, RowwiseParallel, are those of an output layer, ColwiseParallel), but"
    )
