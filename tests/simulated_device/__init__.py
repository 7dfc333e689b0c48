"""A simulated accelerator, `sim`: see device.cpp for what it does, and `install` for how a test gets it.

Importing this changes nothing. `install` compiles the device once (a minute) and registers it with torch and Lightning.
"""

from .device import SimulatedAccelerator, in_a_child, install

__all__ = ["SimulatedAccelerator", "in_a_child", "install"]
