"""The version of the package, alone in its file so that the build reads it without importing torch."""

__version__ = "0.2.0"
