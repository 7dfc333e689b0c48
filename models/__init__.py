"""Modules and data to start from: real data, nothing to download."""

from .digits import Digits, DigitsClassifier
from .gpt import SIZES, ByteGPT
from .python_source import PythonSource
from .transformer import Transformer

__all__ = ["SIZES", "ByteGPT", "Digits", "DigitsClassifier", "PythonSource", "Transformer"]
