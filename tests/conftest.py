"""Shared by all tests: one thread per process, and the few warnings of others that are not ours to act on."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before torch is imported: ranks share the machine's cores, and are processes of the CPU where it has GPUs, too.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# A test of data sets it, and transformers, which torchmetrics imports, has read it in the warm process by then.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest

from tests import warm
from tests.huge_pages import have_huge_pages

IGNORED = (
    # Advice about the loader's workers, which tiny test data doesn't need.
    "ignore:The '.*_dataloader' does not have many workers",
    # Lightning 2.6 on torch 2.13; the engine hides it from users in the same way.
    r"ignore:.*isinstance\(treespec, LeafSpec\)",
    # Tests log rarely or train for fewer steps than the default interval.
    "ignore:The number of training batches .* is smaller than the logging interval",
    # Lightning's, when a module has a validation step and the test gives no validation data.
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    # Python 3.12 and later, about the fork launcher itself.
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning",
    # A module with frozen BatchNorm is one of the parity matrix's subjects.
    r"ignore:Found 2 module\(s\) in eval mode at the start of training",
    # Lightning's summary does not know half precision.
    "ignore:Precision .* is not supported by the model summary",
    # torch's optimizer and scheduler, when a loss scale skipped the very first step.
    "ignore:Detected call of `lr_scheduler.step",
)


# Other processes may have the machine while a test runs.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

ALONE = (
    "doctor/test_callback.py",
    "doctor/test_callback_integration.py",
)
"""Files whose tests measure seconds."""

DEADLINES = (
    "callbacks/test_notebook_integration.py",
    "callbacks/test_snapshot_integration.py",
    "callbacks/test_terminal_integration.py",
    "chaos/test_elastic_integration.py",
    "chaos/test_logged_integration.py",
    "chaos/test_storm_integration.py",
    "docs/test_howto_integration.py",
    "doctor/test_trial_integration.py",
    "engine/checkpoint/test_killed_integration.py",
    "engine/launch/test_agent_integration.py",
    "engine/launch/test_command_integration.py",
    "engine/launch/test_process_launchers_integration.py",
    "engine/loop/test_compile_integration.py",
    "engine/reliability/test_endings_integration.py",
    "engine/reliability/test_failure_integration.py",
    "engine/reliability/test_network_integration.py",
    "engine/reliability/test_signals_integration.py",
    "engine/reliability/test_stacks_integration.py",
    "engine/reliability/test_two_hosts_integration.py",
    "engine/reliability/test_watchdog.py",
    "engine/reliability/test_watchdog_integration.py",
    "engine/test_packaging_integration.py",
)
"""Files whose tests have processes end within seconds: they mostly wait, and only for their own."""


PARTS = ("unmarked", "deadlines", "alone", "device")

_TESTS = Path(__file__).parent
_MARKS = {_TESTS / name: mark for mark, names in (("alone", ALONE), ("deadlines", DEADLINES)) for name in names}


def _mark_of(file: Path) -> str | None:
    """Which part of `make test` runs it; None for the one whose tests are not marked."""
    return "device" if _TESTS / "simulated_device" in file.parents else _MARKS.get(file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS, help="the files of one part of `make test`; no other file is imported")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    part = config.getoption("--part")
    if part is None or not collection_path.name.startswith("test_"):
        return None
    return part != (_mark_of(collection_path) or "unmarked") or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = {file: _mark_of(file) for file in {item.path for item in items}}
    for item in items:
        if mark := marks[item.path]:
            item.add_marker(mark)


def pytest_collection_finish() -> None:
    # All that was imported is there to stay. A forked rank that collects garbage would else look at each of these
    # objects, and so copy the pages that it shares with this process: half a second per rank.
    gc.collect()
    gc.freeze()
    have_huge_pages()
    atexit.register(gc.unfreeze)  # what is frozen is never cleared: triton, where it is there, takes it for a leak


def pytest_configure(config: pytest.Config) -> None:
    # Where the tests run in a shell's background, Ctrl-C is ignored, by the processes that they start as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in IGNORED:
        config.addinivalue_line("filterwarnings", line)
    is_worker = hasattr(config, "workerinput")
    if is_worker:
        warm.become_cold(config.workerinput["interpreter"])
    else:  # xdist's workers have that of the process that has started them
        _have_temporary_folder(config)
    warm.keep_environment(is_worker)
    if getattr(config.option, "tx", None):  # xdist's workers, which need what the server has imported
        config.option.tx = [f"popen//python={warm.python()}"] * len(config.option.tx)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["interpreter"] = sys.executable


def _have_temporary_folder(config: pytest.Config) -> None:
    """What the processes of tests leave in the system's temporary folder, killed ones above all, goes with this run."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest keeps what it has of three runs
    folder = os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tests-")

    def clean() -> None:
        warm.stop()  # its socket is in there
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(clean)


@pytest.fixture(scope="session", autouse=True)
def _outside_of_the_repository(tmp_path_factory):
    """Whatever the fixtures of whole modules run and write (reports of failures, say) goes to a folder of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fixtures"))
        yield


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Whatever a run writes (logs, checkpoints) goes to the test's own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def warm_workers():
    """Workers that an engine in the test spawns have imported torch and the engine when they start."""
    with warm.spawning():
        yield


@pytest.fixture(autouse=True)
def _environment_as_it_was():
    """Lightning's launchers name a port in the environment, which runs of a later test would all meet at."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
