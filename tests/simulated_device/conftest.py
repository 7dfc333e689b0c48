import pytest

from . import install


@pytest.fixture(scope="session", autouse=True)
def device():
    """The compiled device, of which a process that has it can't be rid: these tests run in one of their own."""
    compiled = install()
    compiled.set_num_devices(8)
    return compiled
