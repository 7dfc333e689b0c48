"""Hooks of mkdocs: links that leave `docs/`, pictures that follow the colours of the page, sources for mkdocstrings."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import get_plugin_logger

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/polyphase/polyphase/blob/main/"
_LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_PICTURE = re.compile(r'<p><img alt="([^"]*)" src="[^"]*pictures/([a-z0-9-]+\.svg)" ?/?></p>')

log = get_plugin_logger("docs")


def on_startup(**_: Any) -> None:
    """Links the sources into ``build/packages/polyphase``, where mkdocstrings reads them without importing any."""
    package = ROOT / "build" / "packages" / "polyphase"
    package.mkdir(parents=True, exist_ok=True)
    packages = (ROOT / name for name in ("engine", "callbacks", "doctor", "models"))
    for source in (*(ROOT / "src" / "polyphase").iterdir(), *packages):
        link = package / source.name
        if not link.is_symlink():
            link.symlink_to(source)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns links to files of the repository outside of `docs/` into links to the repository; warns of missing ones."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def outside(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target or target.startswith(("mailto:", "/")):
            return match[0]
        path = Path(os.path.normpath(folder / target))
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        if not path.exists():
            log.warning("%s links to %s, which is not in the repository", page.file.src_uri, target)
        return f"{REPOSITORY}{path.relative_to(ROOT).as_posix()}{anchor}"

    return _LINK.sub(outside, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Puts pictures into the page itself, so that their colours are those of the page's scheme."""

    def inline(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / "pictures" / match[2]).read_text()
        return f'<figure class="picture-frame" tabindex="0">{svg}</figure>'

    return _PICTURE.sub(inline, html)
