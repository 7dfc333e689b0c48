"""Files that others read: a citation, and the forms of issues and pull requests."""

import re

import pytest
import yaml

import polyphase

from .distributed import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_citation_has_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == polyphase.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@pytest.mark.parametrize("path", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_a_form_of_issues_is_complete(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} == form.keys()
    fields = form["body"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in fields)


def test_the_commands_that_forms_ask_for_are_there():
    text = " ".join(path.read_text() for path in FORMS)
    commands = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert all(f"polyphase {name}" in commands for name in re.findall(r"polyphase ([a-z]\w+) ?[A-Z_]*`", text))
    targets = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    asked = (ROOT / ".github" / "pull_request_template.md").read_text()
    assert set(re.findall(r"make (\w+)", asked)) <= set(targets)
