"""What strategies share whose ranks form a mesh of several axes."""

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh

from .compressing import CompressingStrategy
from .launch import end_group_at_exit
from .layout import LayoutStrategy

__all__ = ["MeshStrategy"]


class MeshStrategy(LayoutStrategy, CompressingStrategy, ModelParallelStrategy):
    """Ranks on a mesh with some of the layout's axes."""

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Their names, outermost first, those of one rank included."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        """Starts the process groups and lays the mesh over them."""
        # Lightning: the setup_environment of ModelParallelStrategy's base, without its own mesh.
        self.accelerator.setup_device(self.root_device)  # type: ignore[union-attr]
        self.meet()
        self._setup_distributed()
        end_group_at_exit()
        sizes = tuple(self.layout.axes[axis] for axis in self.mesh_axes)
        self._device_mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=self.mesh_axes)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # Lightning: LightningModule.device_mesh reads it
        self.start_data_group()
