"""How a module is run: one engine, every strategy by flag."""

from .engine import Engine, fit
from .version import __version__

__all__ = ["Engine", "__version__", "fit"]
