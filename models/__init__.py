"""Example modules and data modules, with real data that needs no download."""

from .digits import Digits, DigitsClassifier
from .gpt import SIZES, ByteGPT
from .python_source import PythonSource
from .transformer import Transformer

__all__ = ["SIZES", "ByteGPT", "Digits", "DigitsClassifier", "PythonSource", "Transformer"]
