"""Every file of the documentation that is made from the code: a test compares them with what they would be now."""

from pathlib import Path

from . import architecture, data, reference, stories, strategies, tree

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def files() -> dict[Path, str]:
    """Text by path."""
    pictures = {f"strategy-{name}": strategies.draw(name) for name in strategies.PICTURES}
    pictures |= {f"way-of-a-{name}": architecture.draw_way(name) for name in architecture.WAYS}
    pictures |= {
        "choosing": tree.draw(),
        "rooms": architecture.draw_rooms(),
        "samples": data.draw(),
        "readme": strategies.draw_overview(),
        "killed": stories.draw_killed(),
        "one-to-eight": stories.draw_one_to_eight(),
    }
    made = {DOCS / "pictures" / f"{name}.svg": drawing.svg() for name, drawing in pictures.items()}
    coming_from = DOCS / "coming-from.md"
    made |= {coming_from: reference.with_names_of_other_tools(coming_from.read_text())}
    return made | {DOCS / "reference" / name: text for name, text in reference.pages().items()}
