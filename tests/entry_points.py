"""Entry points of the packages that this interpreter has are read once: that takes 10 ms of a trainer's 13."""

import sysconfig
from importlib.metadata import Distribution, EntryPoints, PathDistribution


def remember_entry_points() -> None:
    """For this process and its forks. Packages in other folders, as tests write them, are read each time."""
    installed = sysconfig.get_path("purelib")
    read = Distribution.entry_points.fget  # type: ignore[attr-defined]
    known: dict[str, EntryPoints] = {}

    def entry_points(distribution: PathDistribution) -> EntryPoints:
        path = str(distribution._path)  # type: ignore[attr-defined]
        if not path.startswith(installed):
            return read(distribution)
        if path not in known:
            known[path] = read(distribution)
        return known[path]

    PathDistribution.entry_points = property(entry_points)  # type: ignore[assignment, misc]
