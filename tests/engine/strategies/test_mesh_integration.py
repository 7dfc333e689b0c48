"""The groups of a mesh, as the flags ask for them."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from polyphase.engine import Engine
from tests.engine.parity import QUIET, build, loader


class Timeouts(Callback):
    """Fails where a group of the mesh waits for another time than `expected`."""

    def __init__(self, expected: timedelta) -> None:
        self.expected = expected

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        mesh = trainer.strategy.device_mesh
        groups = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names}
        cpu = torch.device("cpu")
        # torch: ProcessGroup._get_backend has the options with which its collectives run.
        found = {axis: group._get_backend(cpu).options._timeout for axis, group in groups.items()}
        assert found == dict.fromkeys(groups, self.expected)


@pytest.mark.parametrize("flag", ["hsdp_fork:replicate=2,shard=1", "fsdp+tp_fork:tp=2", "pp+fsdp_fork:pipeline_size=2"])
def test_all_groups_of_a_mesh_wait_as_long_as_the_flag_says(flag):
    engine = Engine(
        strategy=f"{flag},timeout_s=77", accelerator="cpu", devices=2, max_steps=1,
        callbacks=[Timeouts(timedelta(seconds=77))], **QUIET,
    )  # fmt: skip
    engine.fit(build("mlp"), loader("mlp", 1))
    assert engine.global_step == 1
