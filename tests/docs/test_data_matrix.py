"""docs/data.md says what is found, and no kind of training data is silently read otherwise."""

from .data_matrix import PAGE, page


def test_the_page_says_what_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # taken back after the test
    found = page(tmp_path)
    assert "SILENTLY" not in found
    assert PAGE.read_text() == found, "write it anew: python -m tests.docs.data_matrix"
