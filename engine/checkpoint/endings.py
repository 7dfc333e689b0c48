"""The formats that a checkpoint can be exported as; torch is not needed to list them."""

__all__ = ["SUFFIXES"]

SUFFIXES = {
    ".ckpt": "a file of Lightning's, for ckpt_path= and load_from_checkpoint",
    ".safetensors": "the weights alone",
    ".pt": "the weights alone, for torch.load",
}
"""Formats by the ending of the file's name."""
