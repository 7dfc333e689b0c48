"""Refuses modules with sparse gradients, where they can't be averaged."""

from torch import nn

__all__ = ["check_dense_gradients"]


def check_dense_gradients(model: nn.Module, flag: str) -> None:
    """Checks that the gradients of all parameters are dense.

    Args:
        model: the module.
        flag: the strategy or compression that can't average sparse gradients, the subject of the message.

    Raises:
        ValueError: a parameter has sparse gradients.
    """
    for name, submodule in model.named_modules():
        for key, parameter in submodule.named_parameters(recurse=False):
            if parameter.requires_grad and getattr(submodule, "sparse", False) is True:
                raise ValueError(
                    f"{flag} can't average the sparse gradient of {f'{name}.{key}'.lstrip('.')}: build"
                    f" {type(submodule).__name__} with sparse=False."
                )
