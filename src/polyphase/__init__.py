"""Train a LightningModule on any number of devices: one flag per strategy, the same result under each."""

from typing import TYPE_CHECKING, Any

from polyphase.engine.version import __version__

if TYPE_CHECKING:
    from polyphase.engine import Engine, fit

__all__ = ["Engine", "__version__", "fit"]


def __getattr__(name: str) -> Any:
    """Imports the engine, and with it torch and Lightning, when `Engine` or `fit` is first asked for."""
    if name in ("Engine", "fit"):
        import polyphase.engine

        return getattr(polyphase.engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
