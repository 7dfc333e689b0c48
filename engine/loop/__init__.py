"""The hot path, and what else of Lightning's loops is done differently; coupled to Lightning 2.6's private names."""

from .attach import attach, defaults_from_environment
from .nonfinite import NonFiniteError, NonFiniteWatch

__all__ = ["NonFiniteError", "NonFiniteWatch", "attach", "defaults_from_environment"]
