"""Gives the page of an index absolute links: those of README.md are relative, and hold in a clone."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/polyphase/polyphase/blob/main/"
PICTURES = "https://raw.githubusercontent.com/polyphase/polyphase/main/"


def absolute(text: str) -> str:
    """Returns Markdown whose links to files of the repository hold elsewhere."""
    text = re.sub(r"(?<=!\[)([^]]*\]\()(?!https?:)", rf"\g<1>{PICTURES}", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{REPOSITORY}", text)


if __name__ == "__main__":
    readme = absolute(Path(__file__).with_name("README.md").read_text(encoding="utf-8"))
    setup(long_description=readme, long_description_content_type="text/markdown")
