"""Splits experts whose weights are 3-D parameters, [expert, out, in], such as those of Mixtral in transformers.

Every rank has some hidden units of each expert: rows of both halves of ``gate_up_proj`` (gate and up projection, side
by side), and columns of ``down_proj``. It runs the module's own forward on these, as plain tensors; the outputs of the
ranks are summed. Communication: one all-reduce in forward, and one in backward for each input that has a gradient.

The shapes do not show in which order such parameters hold their elements (some models interleave gate and up), so they
are split only where the model says so: by the `_tp_plan` that transformers gives to its models.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ParallelStyle

# torch: the placement of several blocks of rows on each rank.
# torch: runs a module with other tensors in the place of its parameters.
from ..._compat.torch import _reparametrize_module, _StridedShard, tree_map_only
from .styles import dtensor_parameter, to_plain, to_replica

__all__ = ["Experts", "find_experts"]

_UP, _DOWN = "gate_up_proj", "down_proj"
_STYLES = {_UP: "packed_colwise", _DOWN: "rowwise"}
"""The styles of transformers' plans that are split here."""


class Experts(ParallelStyle):
    """Splits a module with ``gate_up_proj`` [experts, 2 hidden, in] and ``down_proj`` [experts, out, hidden].

    Args:
        by_sequence: activations between the split layers are DTensors, and so is the output.
    """

    def __init__(self, by_sequence: bool = False) -> None:
        super().__init__()
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        rank, size = device_mesh.get_local_rank(), device_mesh.size()
        up, down = module.get_parameter(_UP), module.get_parameter(_DOWN)
        own_rows = up.detach().unflatten(1, (2, size, -1))[:, :, rank].flatten(1, 2).clone()
        own_columns = down.detach().unflatten(2, (size, -1))[:, :, rank].clone()
        module.register_parameter(_UP, dtensor_parameter(up, own_rows, device_mesh, _StridedShard(1, split_factor=2)))
        module.register_parameter(_DOWN, dtensor_parameter(down, own_columns, device_mesh, Shard(2)))
        module.forward = functools.partial(self._forward, module, module.forward, device_mesh)
        return module

    def _forward(
        self, module: nn.Module, forward: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any
    ) -> Any:
        def local_input(tensor: Tensor) -> Tensor:
            replica = to_replica(tensor, mesh)
            return replica.to_local(grad_placements=[Partial()]) if isinstance(replica, DTensor) else replica

        args, kwargs = tree_map_only(Tensor, local_input, (args, kwargs))
        parameters: Any = module.named_parameters()  # DTensors
        local_parameters = {name: parameter.to_local() for name, parameter in parameters}
        with _reparametrize_module(module, local_parameters):
            output = forward(*args, **kwargs)
        whole = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return to_replica(whole, mesh) if self.by_sequence else to_plain(whole)


def find_experts(module: nn.Module, num_ranks: int) -> Iterator[tuple[str, str]]:
    """Yields the names of the expert modules in transformers' plans, each with the reason not to split it, or ""."""
    for path, model in module.named_modules():
        plan = getattr(model, "_tp_plan", None)
        if not isinstance(plan, Mapping):
            continue
        for pattern in (key for key, style in plan.items() if style == "moe_tp_experts"):
            for name, submodule in model.named_modules():
                if fnmatchcase(name, pattern):
                    yield f"{path}.{name}".lstrip("."), _why_whole(submodule, plan, pattern, num_ranks)


def _why_whole(submodule: nn.Module, plan: Mapping[str, Any], pattern: str, num_ranks: int) -> str:
    shapes = {key: parameter.shape for key, parameter in submodule.named_parameters()}
    styles = {key: plan.get(f"{pattern}.{key}") for key in shapes}
    if styles != _STYLES or any(len(shape) != 3 for shape in shapes.values()):
        plan_text = ", ".join(f"{key} {style!r}" for key, style in styles.items())
        return f"transformers' plan for its parameters is not known here ({plan_text})"
    hidden = shapes[_DOWN][2]
    if shapes[_UP][1] != 2 * hidden:
        return f"{_UP} has {shapes[_UP][1]} rows for {hidden} hidden units"
    return f"{hidden} hidden units are no multiple of {num_ranks}" if hidden % num_ranks else ""
