"""What is installed is what is on disk, and imports go one way."""

import ast
import graphlib
import importlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import polyphase.engine

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
FOLDERS = ("callbacks", "doctor", "engine", "models")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PLAINLY_DESCRIBED = tuple(f"{folder}/**/*.py" for folder in FOLDERS)
"""Files whose docstrings begin with the thing itself, not with its relation to another one."""


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Each import of a file as (absolute name, whether it stands inside a function)."""
    yield from imports_of(ast.parse(path.read_text()), path)


def imports_of(tree: ast.AST, path: Path) -> Iterator[tuple[str, bool]]:
    package = ["polyphase", *path.relative_to(ROOT).with_suffix("").parts[:-1]]

    def visit(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{start}.{alias.name}", inside) for alias in node.names)
        deeper = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # most of a file, and without imports
                yield from visit(child, deeper)

    yield from visit(tree, False)


def names(path: Path) -> set[str]:
    return {name for name, _ in imports(path)}


def run_first(path: Path, modules: set[str]) -> set[str]:
    """The modules that the import of a file runs before it ends: those that it names, and their packages."""
    tree = ast.parse(path.read_text())
    later = {name for node in tree.body if _is_for_types(node) for name, _ in imports_of(node, path)}
    named = {name for name, inside in imports_of(tree, path) if not inside} - later
    own = _module_name(path)
    found = set()
    for name in named:
        parts = name.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return {name for name in found & modules if name != own and not own.startswith(f"{name}.")}


def _module_name(path: Path) -> str:
    parts = ["polyphase", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_packages_are_the_folders_on_disk():
    on_disk = {".".join(("polyphase", *path.parent.relative_to(ROOT).parts)) for path in SOURCES}
    assert all((ROOT / p.removeprefix("polyphase.").replace(".", "/") / "__init__.py").exists() for p in on_disk)
    assert PROJECT["tool"]["setuptools"]["packages"] == sorted({"polyphase", *on_disk})


def test_each_package_has_its_folder_and_its_types_marker():
    expected = {"polyphase": "src/polyphase"} | {f"polyphase.{folder}": folder for folder in FOLDERS}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == expected
    for package, folder in expected.items():
        assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]
        assert (ROOT / folder / "py.typed").exists()


def test_the_version_is_written_once():
    assert PROJECT["project"]["dynamic"] == ["version", "readme"]
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "engine.version.__version__"}
    assert importlib.metadata.version("polyphase") == polyphase.engine.__version__


def test_the_versions_of_torch_are_the_same_wherever_they_are_named():
    (bounds,) = (line for line in PROJECT["project"]["dependencies"] if line.startswith("torch>"))
    found = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", bounds)
    assert found
    oldest, newest = int(found[1]), int(found[2]) - 1
    makefile = (ROOT / "Makefile").read_text()
    assert f"\nTORCH ?= torch>=2.{oldest},<2.{oldest + 1}\n" in makefile
    assert "\nOLDEST ?= $(TORCH)\n" in makefile
    assert f"\nNEWEST ?= torch>=2.{newest},<2.{newest + 1}\n" in makefile
    assert f"| torch | 2.{oldest} to 2.{newest} |" in (ROOT / "docs" / "versions.md").read_text()
    assert f"torch 2.{oldest} to 2.{newest}," in (ROOT / "README.md").read_text()


def test_promises_rest_on_versions_that_are_required():
    """`make versions` runs the tests of docs/security.md on the oldest patch of Lightning that may be installed."""
    project = PROJECT["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
    bounds = {line.partition(">=")[2] for line in required if re.match(r"lightning\b", line)}
    (bound,) = bounds
    oldest = bound.partition(",")[0]
    makefile = (ROOT / "Makefile").read_text()
    assert f"\nLIGHTNING ?= lightning>={bound}\nOLDEST_LIGHTNING ?= lightning=={oldest}\n" in makefile
    assert f"| Lightning | 2.6, from {oldest} on: " in (ROOT / "docs" / "versions.md").read_text()
    security = (ROOT / "docs" / "security.md").read_text()
    promised = re.findall(r"\brests on (\w+) ([\d.]+\d) or later", security)
    assert promised == [("Lightning", oldest)]
    named = re.findall(r"\b(?:torch|PyTorch|Lightning|safetensors|Python) \d[\d.]*\d", security)
    assert named == [f"Lightning {oldest}"]  # no other sentence rests on a version


UNPICKLED = {
    "engine/checkpoint/whole.py": ["load_archive"],  # with the `weights_only` of the caller
    "engine/checkpoint/opening.py": ["check_written"],  # what this process has just written, in memory
    "engine/resume/from_checkpoint.py": ["_opened"],  # what this process has just written
    "engine/launch/worker_launcher.py": ["_first_exception", "join", "take"],
    "engine/distributed/agreement.py": ["gather"],  # signed by a rank of this job
    "engine/strategies/ps/rpc.py": ["_Unpickler"],
}
"""All that may unpickle more than plain values, each in docs/security.md."""


def test_what_is_unpickled_is_listed():
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for outer in ast.walk(ast.parse(path.read_text())):
            if isinstance(outer, ast.ClassDef):
                unpickles = "pickle.Unpickler" in map(ast.unparse, outer.bases)
            else:
                unpickles = isinstance(outer, ast.FunctionDef) and any(map(_unpickles, ast.walk(outer)))
            if unpickles:
                found.setdefault(path.relative_to(ROOT).as_posix(), []).append(getattr(outer, "name", ""))
    assert {file: sorted(places) for file, places in found.items()} == UNPICKLED


def _unpickles(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("torch.load", "pickle.load", "pickle.loads"):
        return False
    values = [keyword.value for keyword in node.keywords if keyword.arg == "weights_only"]
    return [ast.unparse(value) for value in values] != ["True"]


def test_the_versions_file_is_read_without_importing_anything():
    assert not names(ROOT / "engine" / "version.py")


@pytest.mark.parametrize("name", ["polyphase", "polyphase.engine"])
def test_a_package_imports_torch_only_when_the_engine_is_asked_for(name):
    code = f"import sys, {name} as package; assert 'torch' not in sys.modules; print(package.__version__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == polyphase.__version__
    assert {"Engine", "fit"} <= set(dir(importlib.import_module(name)))


def test_the_root_package_has_the_engines_public_face():
    assert polyphase.Engine is polyphase.engine.Engine
    assert polyphase.fit is polyphase.engine.fit
    with pytest.raises(AttributeError, match="'polyphase' has no attribute 'Trainer'"):
        polyphase.Trainer  # noqa: B018 - asked for by its name


def test_the_engine_imports_neither_models_nor_callbacks_but_for_one_function():
    engine = [path for path in SOURCES if path.is_relative_to(ROOT / "engine")]
    found = {
        (path.name, name, inside)
        for path in engine
        for name, inside in imports(path)
        if name.startswith(("polyphase.models", "polyphase.callbacks"))
    }
    assert all(file == "select.py" and inside and "callbacks" in name for file, name, inside in found), found


def test_the_engine_never_imports_the_doctor():
    """Not in a function either; the command names it in its table, and imports it when it is asked for."""
    engine = [path for path in SOURCES if path.is_relative_to(ROOT / "engine")]
    assert not [path.name for path in engine if any(name.startswith("polyphase.doctor") for name in names(path))]
    named = [path.relative_to(ROOT).as_posix() for path in engine if "polyphase.doctor" in _texts(path)]
    assert named == ["engine/cli/__init__.py"]


def _texts(path: Path) -> str:
    """The texts in a file's code, one a line: an import by name has one."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


@pytest.mark.parametrize("folder", ["strategies", "compression", "data", "loop", "checkpoint"])
def test_no_part_of_the_engine_imports_the_engine_itself(folder):
    found = {
        (path.name, name)
        for path in (ROOT / "engine" / folder).rglob("*.py")
        for name in names(path)
        if name.startswith(("polyphase.engine.engine", "polyphase.engine.cli"))
        or name in ("polyphase.engine.Engine", "polyphase.engine.fit")
    }
    assert not found


def test_only_the_command_and_the_package_itself_import_the_engine():
    engine = (path for path in (ROOT / "engine").glob("*.py") if path.name not in ("__init__.py", "cli.py"))
    found = [path.name for path in engine if any(n.startswith("polyphase.engine.engine") for n in names(path))]
    assert not found


def test_no_import_comes_back_to_where_it_began():
    # Such a circle is an ImportError or not, by which of its files is imported first.
    modules = {_module_name(path) for path in SOURCES}
    order = graphlib.TopologicalSorter({_module_name(path): run_first(path, modules) for path in SOURCES})
    assert set(order.static_order()) == modules  # a CycleError names the circle


def test_no_file_imports_another_that_imports_it_not_even_in_a_function():
    # Two files of which each needs the other are one idea, or one of them has something that belongs below both.
    modules = {_module_name(path) for path in SOURCES}
    named = {_module_name(path): set(map(_module_of(modules), _at_run_time(path))) - {None} for path in SOURCES}
    order = graphlib.TopologicalSorter({name: used - {name} for name, used in named.items()})
    assert set(order.static_order()) == modules  # a CycleError names the circle


def test_no_room_imports_another_that_imports_it_not_even_by_way_of_a_third():
    # A room is a folder, or a file that lies directly in its package.
    find = _module_of({_module_name(path) for path in SOURCES})
    rooms: dict[str, set[str]] = {}
    for path in SOURCES:
        used = {_room(module) for name in _at_run_time(path) if (module := find(name))}
        rooms.setdefault(_room(_module_name(path)), set()).update(used)
    order = graphlib.TopologicalSorter({room: used - {room} for room, used in rooms.items()})
    assert set(order.static_order()) == rooms.keys()  # a CycleError names the circle


def _room(module: str) -> str:
    return ".".join(module.split(".")[:3])


def _at_run_time(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    later = {name for node in tree.body if _is_for_types(node) for name, _ in imports_of(node, path)}
    return {name for name, _ in imports_of(tree, path)} - later


def _module_of(modules: set[str]) -> Callable[[str], str | None]:
    """A function that finds the file which an imported name is in."""

    def find(name: str) -> str | None:
        while name not in modules and "." in name:
            name = name.rpartition(".")[0]
        return name if name in modules else None

    return find


def test_nobody_outside_of_the_strategies_looks_at_a_strategys_class_or_tries_its_attributes():
    """Whoever wants to know something asks `adapt`, which answers for every strategy."""
    # The contract asks once for all, and `select` is given a flag or an object by the user.
    own = [ROOT / "engine" / name for name in ("strategies", "contract.py", "select.py")]
    paths = [path for path in SOURCES if not any(map(path.is_relative_to, own))]
    assert [f"{p.relative_to(ROOT)}:{probe}" for p in paths for probe in probes(ast.parse(p.read_text()))] == []


@pytest.mark.parametrize(
    "code",
    [
        "isinstance(trainer.strategy, X)",
        "isinstance(anything, (int, strategies.DDPStrategy))",
        "issubclass(type(self._strategy), X)",
        "getattr(self.trainer.strategy, 'x', None)",
        "getattr(getattr(trainer, 'strategy', None), 'x', 0)",
        "getattr(getattr(strategy, 'options', None), 'x', 0)",
        "hasattr(strategy, 'x')",
        "hasattr(adapt(trainer.strategy), 'x')",
    ],
)
def test_such_a_probe_is_found(code):
    assert probes(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    ["getattr(trainer.strategy, name)", "isinstance(strategy.launcher, X)", "hasattr(strategy.root_device, 'x')"],
)
def test_what_is_no_probe_of_a_strategy_is_left_alone(code):
    assert not probes(ast.parse(code))


def probes(tree: ast.AST) -> list[str]:
    """The calls, with their lines, that ask for a strategy's class or whether it has an attribute."""
    return [f"{n.lineno}: {ast.unparse(n)}" for n in ast.walk(tree) if isinstance(n, ast.Call) and _is_probe(n)]


def _is_probe(call: ast.Call) -> bool:
    name = _last_name(call.func)
    if name in ("isinstance", "issubclass"):
        kinds = [_last_name(node) for node in ast.walk(call.args[1])]
        return _is_strategy(call.args[0]) or any(kind.endswith("Strategy") for kind in kinds)
    has_default = name == "hasattr" or (name == "getattr" and len(call.args) > 2)
    return has_default and _is_strategy(call.args[0])


def _is_strategy(node: ast.expr) -> bool:
    """Whether an expression is a strategy, its class, or something that was asked of it by such a call."""
    if isinstance(node, ast.Call):
        names = [_last_name(argument) for argument in node.args]
        return _last_name(node.func) in ("adapt", "getattr", "type") and any(map(_is_name, names))
    return _is_name(_last_name(node))


def _is_name(name: str) -> bool:
    return name in ("strategy", "_strategy")


def _last_name(node: ast.AST) -> str:
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Constant(str(name)):
            return name
    return ""


def test_the_flags_stand_alone():
    own = {name for name in names(ROOT / "engine" / "flags.py") if name.startswith(("polyphase", "torch", "lightning"))}
    assert not own


@pytest.mark.parametrize("folder", ["callbacks", "models"])
def test_models_and_callbacks_do_not_know_each_other(folder):
    other = {"callbacks": "polyphase.models", "models": "polyphase.callbacks"}[folder]
    assert not [n for path in (ROOT / folder).rglob("*.py") for n in names(path) if n.startswith(other)]


def test_only_what_is_about_the_environment_reads_it():
    readers = [path.relative_to(ROOT).as_posix() for path in SOURCES if {"os.environ", "os.getenv"} & _attributes(path)]
    assert readers == [
        "engine/distributed/environment.py",
        "engine/distributed/variables.py",
        "engine/launch/command.py",
    ]


def _attributes(path: Path) -> set[str]:
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
    return {f"{node.value.id}.{node.attr}" for node in nodes if isinstance(node.value, ast.Name)}


@pytest.mark.parametrize("folder", FOLDERS)
def test_inside_a_package_imports_are_relative(folder):
    assert not [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.module}"
        for path in SOURCES
        if path.is_relative_to(ROOT / folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith(f"polyphase.{folder}")
    ]


@pytest.mark.parametrize("files", PLAINLY_DESCRIBED)
def test_no_docstring_begins_with_what_of_or_by(files):
    paths = sorted(ROOT.glob(files))
    assert paths
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in paths
        for line, text in _docstrings(ast.parse(path.read_text()))
        if text.lstrip().startswith(("What ", "Of ", "By "))
    ]


VAGUE = {"each", "everyones", "found", "given", "here", "known", "mine", "ours", "there", "which"}
"""Names that say nothing of a variable's content."""


def test_no_variable_of_a_function_has_a_vague_name():
    assert not {
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path in SOURCES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if (name := _name_of_variable(node)) in VAGUE
    }


def _name_of_variable(node: ast.AST) -> str | None:
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, class or function, and of each text below an assignment."""
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        body = node.body if isinstance(getattr(node, "body", None), list) else []
        owners = [node if isinstance(node, described) else None, *body]
        for owner, statement in zip(owners, body, strict=False):
            if owner is node or isinstance(owner, (ast.Assign, ast.AnnAssign)):
                match statement:
                    case ast.Expr(ast.Constant(str(text))):
                        yield statement.lineno, text


def test_no_comprehension_copies_for_each_item_what_it_looks_into():
    # A set of N names made for each of N names is quadratic, and not one call more is counted.
    assert not {
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in SOURCES
        for node in _copied_for_each_item(ast.parse(path.read_text()))
    }
    looks = "[key for key in keys if key not in {*names}]", "{k for k in keys if k in set(names)}"
    assert [len([*_copied_for_each_item(ast.parse(text))]) for text in looks] == [1, 1]
    assert not [*_copied_for_each_item(ast.parse("[key for key in {*names} if key in {*key.parts}]"))]


def _copied_for_each_item(tree: ast.AST) -> Iterator[ast.Compare]:
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for node in (node for node in ast.walk(tree) if isinstance(node, comprehensions)):
        items = {name.id for loop in node.generators for name in ast.walk(loop.target) if isinstance(name, ast.Name)}
        once = {*ast.walk(node.generators[0].iter)}
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Compare) or inner in once:
                continue
            match inner.ops[-1], inner.comparators[-1]:
                case ast.In() | ast.NotIn(), ast.Set(elts) | ast.List(elts) | ast.Tuple(elts) as container:
                    is_copy = any(isinstance(element, ast.Starred) for element in elts)
                case ast.In() | ast.NotIn(), ast.Call(ast.Name("set" | "list" | "sorted" | "dict")) as container:
                    is_copy = True
                case _:
                    continue
            if is_copy and not items & {name.id for name in ast.walk(container) if isinstance(name, ast.Name)}:
                yield inner
