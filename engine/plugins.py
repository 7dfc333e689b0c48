"""Strategies and comm hooks of installed packages, found by their entry points.

A package names them in its pyproject.toml; importing the module registers them:

    [project.entry-points."polyphase.strategies"]
    mine = "my_package.my_strategy"      # calls register_strategy("mine", ...)

    [project.entry-points."polyphase.comm_hooks"]
    mine = "my_package.my_hook"          # calls register_comm_hook on a class named "mine"
"""

__all__ = ["COMM_HOOK_GROUP", "STRATEGY_GROUP", "load_plugin", "plugin_names"]

STRATEGY_GROUP = "polyphase.strategies"
COMM_HOOK_GROUP = "polyphase.comm_hooks"


def plugin_names(group: str) -> list[str]:
    """The names that installed packages offer; the packages are not imported."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    return sorted({point.name for point in entry_points(group=group)})


def load_plugin(group: str, name: str) -> bool:
    """Imports the module that registers `name`; returns whether there is one."""
    from importlib.metadata import entry_points

    points = entry_points(group=group, name=name)
    for point in points:
        point.load()
    return bool(points)
