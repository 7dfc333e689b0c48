"""A gradient of a gradient on a device, whose thread of autograd is another one than the host's."""

import pytest

from tests.pairs import nightly
from tests.zoo.plain import MODELS
from tests.zoo.run import run

from . import in_a_child, install

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute


def _equals_the_plain_loop(strategy: str, name: str, devices: int) -> None:
    install().set_num_devices(devices)
    found = run(MODELS[name], strategy, "sim", devices)
    assert found.kind == "equal", found


@pytest.mark.parametrize(("strategy", "name", "devices"), [("fsdp", "WGAN-GP", 2), *nightly(("fsdp", "WGAN-GP", 1))])
def test_no_gradient_comes_too_late_to_be_reduced(strategy, name, devices):
    in_a_child(_equals_the_plain_loop, strategy, name, devices)
