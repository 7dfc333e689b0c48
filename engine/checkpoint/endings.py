"""The formats of `polyphase ckpt export`; listing them does not import torch."""

__all__ = ["SUFFIXES"]

SUFFIXES = {
    ".ckpt": "a Lightning checkpoint, for ckpt_path= and load_from_checkpoint",
    ".safetensors": "the weights alone",
    ".pt": "the weights alone, for torch.load",
}
"""Describes each format by its file extension."""
