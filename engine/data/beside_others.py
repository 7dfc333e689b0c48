"""The error for a training loader that is read side by side with others, and whose samples are shared unevenly."""

__all__ = ["SHARE_EVENLY", "not_beside_others"]

SHARE_EVENLY = "Give each rank as much of it, or set uneven='drop' and this loader's drop_last=True"
"""The remedy for a stream, or for separate samplers of the ranks."""


def not_beside_others(name: str, problem: str, remedy: str) -> ValueError:
    """Returns the error for a loader that is read side by side with others, and whose samples are shared unevenly.

    Args:
        name: name of the loader, the subject of the message.
        problem: verb and object of the message.
        remedy: advice at the end of the message.
    """
    return ValueError(
        f"{name} is read side by side with others, and {problem}, which the ranks can't share evenly. A step has one"
        " loss of all these loaders, which can't be weighed by the samples of each: some would count for more than in"
        f" one process. {remedy}."
    )
