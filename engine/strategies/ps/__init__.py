"""An asynchronous parameter server: `ps`."""

from .strategy import PS

__all__ = ["PS"]
