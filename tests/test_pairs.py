"""What `make test` is left with of a product."""

from itertools import combinations

from .pairs import alternating, paired


def kept(cells):
    return [cell.values for cell in cells if "nightly" not in [mark.name for mark in cell.marks]]


def test_each_pair_is_kept_and_no_cell_is_lost():
    cells = paired("abc", [1, 2], [True, False], "xy")
    assert len({cell.values for cell in cells}) == 3 * 2 * 2 * 2
    left = kept(cells)
    assert len(left) < 12
    for i, j in combinations(range(4), 2):
        assert {(cell[i], cell[j]) for cell in left} == {(cell.values[i], cell.values[j]) for cell in cells}


def test_every_second_cell_is_kept_and_each_value():
    cells = alternating([("a", 1), ("b", 2), ("c", 3)], [True, False])
    pairs = [("a", 1), ("b", 2), ("c", 3)]
    assert [cell.values for cell in cells] == [(*pair, flag) for pair in pairs for flag in (True, False)]
    assert kept(cells) == [("a", 1, True), ("b", 2, False), ("c", 3, True)]
