"""Remembered entry points are those that are installed; others are read each time."""

from importlib.metadata import entry_points

import pytest

from tests.distributed import in_a_fork
from tests.entry_points import remember_entry_points

GROUP = "tests.of_this_folder"


def found_before_and_after() -> tuple[set[str], ...]:
    def found() -> set[str]:
        return {f"{point.name} = {point.value}" for point in entry_points(group="console_scripts")}

    before = found()
    remember_entry_points()
    return before, found(), found()


def test_installed_ones_are_the_same():
    before, first, second = in_a_fork(found_before_and_after, timeout_s=20)
    assert any(line.startswith("pytest = ") for line in before)
    assert before == first == second


def test_a_package_of_another_folder_is_read_each_time(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()

    def found(name: str) -> set[str]:
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = math:pi\n")
        remember_entry_points()
        return {point.name for point in entry_points(group=GROUP)}

    for name in ("one", "two"):
        assert in_a_fork(found, name, timeout_s=20) == {name}
