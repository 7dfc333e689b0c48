"""Keeps torch's recurrent layers from moving weights that FSDP2 has gathered."""

from torch import nn

__all__ = ["flatten_again", "never_flatten"]


def never_flatten(model: nn.Module) -> None:
    """Makes recurrent layers leave their weights in the memory into which they were gathered, until `flatten_again`.

    On CUDA an `nn.LSTM` moves weights that it has not seen before into one piece of memory. FSDP2 would gather the next
    step's weights into the former memory, and the layer would continue with the old weights.
    """
    for layer in _recurrent(model):
        layer.flatten_parameters = _nothing  # type: ignore[method-assign]


def flatten_again(model: nn.Module) -> None:
    """Ends `never_flatten`."""
    for layer in _recurrent(model):
        vars(layer).pop("flatten_parameters", None)


def _recurrent(model: nn.Module) -> list[nn.RNNBase]:
    return [part for part in model.modules() if isinstance(part, nn.RNNBase)]


def _nothing() -> None:
    pass
