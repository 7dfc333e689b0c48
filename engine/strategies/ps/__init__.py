"""An asynchronous parameter server: `ps`."""

from .strategy import PS, PSOptions

__all__ = ["PS", "PSOptions"]
