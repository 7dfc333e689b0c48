"""Example modules and data modules, with real data that needs no download."""

from .digits import Digits, DigitsClassifier
from .gpt import SIZES, ByteGPT, TokenGPT, chunked_cross_entropy
from .python_source import PythonSource
from .transformer import Transformer

__all__ = [
    "SIZES",
    "ByteGPT",
    "Digits",
    "DigitsClassifier",
    "PythonSource",
    "TokenGPT",
    "Transformer",
    "chunked_cross_entropy",
]
