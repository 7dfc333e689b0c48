"""Files that others read: a citation, forms of issues and pull requests, containers and the recipe for conda."""

import re

import pytest
import yaml
from packaging.requirements import Requirement

import polyphase

from .distributed import ROOT
from .engine.test_packaging import PROJECT

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


@pytest.mark.parametrize("path", sorted((ROOT / "release" / "containers").iterdir()), ids=lambda path: path.stem)
def test_a_container_installs_extras_and_versions_that_there_are(path):
    text = path.read_text()
    (extras,) = re.findall(r'"/source\[([a-z,]+)\]"', text)
    assert set(extras.split(",")) <= PROJECT["project"]["optional-dependencies"].keys()
    (torch,) = re.findall(r'"(torch[^"]+)"', text)
    assert torch in PROJECT["project"]["dependencies"]
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim$", text, re.MULTILINE)
    assert tuple(map(int, python.split("."))) >= (3, 10)
    (command,) = re.findall(r'^ENTRYPOINT \["(\w+)"\]$', text, re.MULTILINE)
    assert command in PROJECT["project"]["scripts"]
    assert f"-f {path.relative_to(ROOT)} " in text, "the command that builds it"


def test_the_recipe_for_conda_needs_what_the_wheel_does():
    text = (ROOT / "release" / "conda" / "meta.yaml").read_text()
    recipe = yaml.safe_load(re.sub(r"\{\{.*?\}\}", "x", re.sub(r"\{%.*?%\}", "", text)))
    names = {"pytorch": "torch"}
    needs = {}
    for line in recipe["requirements"]["run"]:
        name, _, versions = line.partition(" ")
        needs[names.get(name, name)] = set(versions.split(","))
    assert needs.pop("python") == {PROJECT["project"]["requires-python"]}
    required = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
    assert needs == {need.name: set(map(str, need.specifier)) for need in required}
    assert recipe["build"]["entry_points"] == [f"{k} = {v}" for k, v in PROJECT["project"]["scripts"].items()]
    (pattern,) = re.findall(r"regex_pattern='(.+?)'", text)
    assert re.search(pattern, (ROOT / "engine" / "version.py").read_text())[1] == polyphase.__version__
