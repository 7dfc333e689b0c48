"""Base of the strategies whose ranks form a mesh of several axes."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh

from ..launch.process_launchers import end_group_at_exit
from .compressing import CommHookMixin
from .layout import DistributedStrategy
from .recurrent import flatten_again
from .whole_steps import as_whole

__all__ = ["MeshStrategy"]


class MeshStrategy(DistributedStrategy, CommHookMixin, ModelParallelStrategy):
    """Ranks on a mesh with some of the layout's axes."""

    capabilities = dataclasses.replace(
        DistributedStrategy.capabilities, splits_module=True, unsupported_counting=None, unsupported_repeat=None
    )

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

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Steps as if parameters were whole; see `as_whole`."""
        mode, closure = as_whole(optimizer, closure)
        with mode:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def teardown(self) -> None:
        """Restores recurrent layers: ends `never_flatten`."""
        if self.model is not None:
            flatten_again(self.model)
        super().teardown()
