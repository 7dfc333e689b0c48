"""SVG by hand: boxes, text and arrows, in colours that follow the page, or the system of who opens the file alone."""

from collections.abc import Sequence
from html import escape

COLOURS = ("#4c6ef5", "#e8890c", "#2b9a66", "#c2408f")
"""The colours of ranks 0 to 3: told apart in both schemes, and by most who see few colours."""

_LIGHT = "--ink: #1d2433; --soft: #5b6478; --line: #9aa3b5; --paper: #ffffff; --card: #f3f5fa; --mark: #e3e8fb;"
_DARK = "--ink: #e6e9f2; --soft: #aab2c5; --line: #6d7690; --paper: #1e2129; --card: #272b36; --mark: #333c62;"
_STYLE = f"""\
<style>
.picture {{ {_LIGHT} font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 14px; }}
@media (prefers-color-scheme: dark) {{ .picture {{ {_DARK} }} }}
.picture text {{ fill: var(--ink); }}
.picture .soft {{ fill: var(--soft); font-size: 12px; }}
.picture .code {{ font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }}
.picture .bold {{ font-weight: 600; }}
.picture .card {{ fill: var(--card); stroke: var(--line); }}
.picture .mark {{ fill: var(--mark); stroke: var(--line); }}
.picture .empty {{ fill: none; stroke: var(--line); stroke-width: 0.7; }}
.picture .line {{ fill: none; stroke: var(--soft); stroke-width: 1.4; }}
.picture .head {{ fill: var(--soft); }}
</style>"""


class Drawing:
    """A picture that grows by calls, and is written as SVG at the end."""

    def __init__(self, title: str, width: float, *, wide: bool = False) -> None:
        self.title, self.width, self.height = title, width, 0.0
        self._wide = wide
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Writes a line whose base line is at `y`; `kind`: "soft", "code", "bold", or several of them."""
        self._grow(y + 8)
        attributes = f' class="{kind}"' if kind else ""
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{attributes}{where}>{escape(words, quote=False)}</text>')

    def label(self, x: float, y: float, words: str) -> None:
        """Writes a word in white, centred, on a cell."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="middle" style="fill: #ffffff">{escape(words)}</text>'
        )

    def lines(self, x: float, y: float, lines: Sequence[str], kind: str = "", anchor: str = "start") -> float:
        """Writes lines below each other; returns the base line of the next one."""
        for line in lines:
            self.text(x, y, line, kind, anchor)
            y += 17
        return y

    def box(self, x: float, y: float, width: float, height: float, kind: str = "card", radius: float = 6) -> None:
        """Draws a rectangle with round corners."""
        self._grow(y + height + 2)
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """Draws a filled rectangle."""
        self._grow(y + height + 4)
        size = f'width="{width:.1f}" height="{height:g}"'
        self._parts.append(f'<rect x="{x:.1f}" y="{y:g}" {size} fill="{colour}"/>')

    def curve(self, points: Sequence[tuple[float, float]], colour: str, width: float) -> None:
        """Draws a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'fill="none" stroke="{colour}" stroke-width="{width:g}" stroke-linejoin="round"'
        self._parts.append(f'<polyline points="{path}" {style}/>')

    def cell(self, x: float, y: float, size: float, colour: str | None) -> None:
        """Draws a small square; None for one that is not held."""
        self._grow(y + size + 4)
        fill = ' class="empty"' if colour is None else f' fill="{colour}"'
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" rx="1.5"{fill}/>')

    def arrow(self, points: Sequence[tuple[float, float]], *, both: bool = False) -> None:
        """Draws a line through points with a head at its end, or at both ends."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="line"/>')
        ends = [(points[-2], points[-1])] + ([(points[1], points[0])] if both else [])
        for (from_x, from_y), (x, y) in ends:
            length = max(((x - from_x) ** 2 + (y - from_y) ** 2) ** 0.5, 1e-9)
            dx, dy = (x - from_x) / length, (y - from_y) / length
            left = f"{x - 8 * dx - 4 * dy:g} {y - 8 * dy + 4 * dx:g}"
            right = f"{x - 8 * dx + 4 * dy:g} {y - 8 * dy - 4 * dx:g}"
            self._parts.append(f'<path d="M{x:g} {y:g} L{left} L{right} Z" class="head"/>')

    def svg(self) -> str:
        """The text of the file."""
        kind = "picture wide" if self._wide else "picture"
        size = f"{self.width:g} {self.height:g}"
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {size}" role="img">'
        background = f'<rect width="{self.width:g}" height="{self.height:g}" fill="var(--paper)"/>'
        body = "\n".join([_STYLE, f"<title>{escape(self.title)}</title>", background, *self._parts])
        return f"{opening}\n{body}\n</svg>\n"

    def _grow(self, bottom: float) -> None:
        self.height = max(self.height, bottom)
