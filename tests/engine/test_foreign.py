"""Files of others: only regular ones are opened, ours replace no target of a link, and texts stay texts."""

import os
import re
from pathlib import Path

import pytest

from polyphase.engine.foreign import NotAPlainFileError, for_html, for_terminal, open_new, open_plain, written_beside


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    os.symlink("file", tmp_path / "link")
    with open_plain(str(tmp_path / "link")) as file:
        assert file.read() == b"x"
    for name, flags in (("pipe", 0), (".", 0), ("link", os.O_NOFOLLOW)):
        with pytest.raises(NotAPlainFileError, match="is no plain file"):
            open_plain(str(tmp_path / name), flags)


def test_a_link_in_the_place_of_a_new_file_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("mine")
    os.symlink("target", tmp_path / "new")
    with open_new(str(tmp_path / "new")) as file:
        file.write("ours")
    assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "new").read_text() == "ours"
    assert not (tmp_path / "new").is_symlink()
    os.symlink("target", tmp_path / "of another writer")
    with written_beside(str(tmp_path / "of another writer")) as beside:
        Path(beside).write_text("ours")
    assert (tmp_path / "target").read_text() == "mine"
    assert (tmp_path / "of another writer").read_text() == "ours"
    assert sorted(os.listdir(tmp_path)) == ["new", "of another writer", "target"]


@pytest.mark.parametrize("control", ["\x1b]0;t\x07", "\x9b31m", "\u202e", "\r", "\udc80"])
def test_a_text_commands_nothing(control):
    shown = for_terminal(f"a{control}b\n\tc", has_lines=True)
    assert re.fullmatch(r"a[ -~]+b\n\tc", shown)
    assert for_terminal(shown, has_lines=True) == shown
    assert for_terminal(f"a{control}b\n\tc") == shown.replace("\n", "\\n")
    assert for_html(f"<b>{control}") == f"&lt;b&gt;{for_terminal(control)}"
