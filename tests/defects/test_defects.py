"""A sample of the defects that the check of the first steps reports; all of them by ``python -m tests.defects``."""

import pytest

from .defects import DEFECTS
from .mends import MENDS
from .run import run

SAMPLE = [
    ("an optimizer that reads norms gets those of its shards", "gradient norm of step 2"),
    ("a gradient of a gradient lacks terms", "gradient norm of step 1"),
    ("clipping by hand by the norm of a stage", "'into.weight' has moved by"),
    ("scaled gradients are clipped by hand", "gradient norm of step 1"),
]


@pytest.mark.parametrize(("name", "said"), SAMPLE)
def test_a_defect_is_reported(name, said):
    found = run({**DEFECTS, **MENDS}[name])
    assert float(found.difference) > 1e-4
    assert said in found.report
