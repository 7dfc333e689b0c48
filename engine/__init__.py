"""How a module is run: one engine, every strategy by flag."""

from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .engine import Engine, fit

__all__ = ["Engine", "__version__", "fit"]


def __getattr__(name: str) -> Any:
    """Imports torch and Lightning when `Engine` or `fit` is first asked for: the command often needs neither."""
    if name in ("Engine", "fit"):
        from . import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
