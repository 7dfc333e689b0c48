"""Lightning's table of the module, without the column of FLOPs if there is no `example_input_array`."""

from typing import Any

from lightning.pytorch.callbacks import RichModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from rich import get_console
from rich.table import Table

__all__ = ["summarize"]


def summarize(
    summary_data: list[tuple[str, list[str]]],
    total_parameters: int,
    trainable_parameters: int,
    model_size: float,
    total_training_modes: dict[str, int],
    total_flops: int,
    **summarize_kwargs: Any,
) -> None:
    """Prints a model's summary; called by the default `RichModelSummary` in place of its own, with its arguments."""
    if total_flops:
        RichModelSummary.summarize(
            summary_data,
            total_parameters,
            trainable_parameters,
            model_size,
            total_training_modes,
            total_flops,
            **summarize_kwargs,
        )
        return
    columns = [(name, values) for name, values in summary_data if name != "FLOPs"]
    table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
    for name, _ in columns:
        is_number = name.startswith("Params") or name.endswith("sizes")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name == "Name")
    for row in zip(*(values for _, values in columns), strict=True):
        table.add_row(*row)
    console = get_console()
    console.print(table)
    total, trainable = (
        get_human_readable_count(int(number)).strip() for number in (total_parameters, trainable_parameters)
    )
    modes = f"{total_training_modes['train']} modules in train mode, {total_training_modes['eval']} in eval mode"
    console.print(
        f"{total} parameters, {trainable} trainable, {model_size:.3g} MB; {modes}", highlight=False, soft_wrap=True
    )
