"""Base of the strategies whose ranks form a mesh of several axes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ..launch.process_launchers import end_group_at_exit
from .compressing import CommHookMixin
from .layout import DistributedStrategy
from .whole_steps import as_whole, whole_in_hooks

__all__ = ["MeshStrategy", "never_flatten"]


class MeshStrategy(DistributedStrategy, CommHookMixin, ModelParallelStrategy):
    """Ranks on a mesh with some of the layout's axes."""

    capabilities = dataclasses.replace(
        DistributedStrategy.capabilities, splits_module=True, unsupported_counting=None, unsupported_repeat=None
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._undo_hooks: Callable[[], None] | None = None

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the axes, outermost first, including those of size 1."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        """Starts the process groups, and creates the mesh from them."""
        # Lightning: the setup_environment of ModelParallelStrategy's base, without its own mesh.
        self.accelerator.setup_device(self.root_device)  # type: ignore[union-attr]
        self._connect_ranks()
        self._setup_distributed()
        end_group_at_exit()
        sizes = tuple(self.layout.axes[axis] for axis in self.mesh_axes)
        self._device_mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=self.mesh_axes)
        for axis in self.mesh_axes:  # torch: some of a mesh's groups have another default, of 10 or 30 minutes
            self._device_mesh.get_group(axis).set_timeout(self._timeout or default_pg_timeout)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # Lightning: LightningModule.device_mesh reads it
        self.start_data_group()

    def _call_hooks_on_whole(self, trainer: Trainer) -> None:
        """Has hooks compute with split parameters as if these were whole, until `teardown`."""
        assert self.model is not None
        self._restore_hooks()
        if any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            self._undo_hooks = whole_in_hooks(trainer)

    def _restore_hooks(self) -> None:
        if self._undo_hooks is not None:
            self._undo_hooks()
            self._undo_hooks = None

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Steps as if parameters were whole; see `as_whole`."""
        mode, closure = as_whole(optimizer, closure)
        with mode:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns all weights on rank 0, in host memory, and nothing on the others; all ranks call it."""
        # torch: `get_model_state_dict` looks each key up as an attribute, but a module's hooks may have renamed it.
        assert self.model is not None
        state: dict[str, Any] = {}
        for name, value in self.model.state_dict().items():
            if isinstance(value, DTensor):
                on_device: Any = value.to(self.root_device)
                value = on_device.full_tensor()
            if self.global_rank == 0:
                state[name] = value.cpu() if isinstance(value, Tensor) else value
        return state

    def teardown(self) -> None:
        """Restores hooks and recurrent layers."""
        self._restore_hooks()
        if self.model is not None:
            _flatten_again(self.model)
        super().teardown()


def never_flatten(model: nn.Module) -> None:
    """Makes recurrent layers leave their weights in the memory into which they were gathered, until `_flatten_again`.

    On CUDA an `nn.LSTM` moves weights that it has not seen before into one piece of memory. FSDP2 would gather the next
    step's weights into the former memory, and the layer would continue with the old weights.
    """
    for layer in _recurrent(model):
        layer.flatten_parameters = _nothing  # type: ignore[method-assign]


def _flatten_again(model: nn.Module) -> None:
    """Ends `never_flatten`."""
    for layer in _recurrent(model):
        vars(layer).pop("flatten_parameters", None)


def _recurrent(model: nn.Module) -> list[nn.RNNBase]:
    return [part for part in model.modules() if isinstance(part, nn.RNNBase)]


def _nothing() -> None:
    pass
