"""Shared by all tests: one thread per process, and the few warnings of others that are not ours to act on."""

import gc
import os
import signal
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: ranks share the machine's cores

import pytest

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


ALONE = (
    "benchmarks/test_overhead.py",
    "benchmarks/test_strategies.py",
    "callbacks/test_communication_integration.py",
    "callbacks/test_doctor.py",
    "callbacks/test_doctor_integration.py",
    "callbacks/test_notebook_integration.py",
    "callbacks/test_snapshot_integration.py",
    "callbacks/test_terminal_integration.py",
    "chaos/test_elastic_integration.py",
    "chaos/test_storm_integration.py",
    "engine/checkpoint/test_killed_integration.py",
    "engine/loop/test_compile_integration.py",
    "engine/loop/test_signals_integration.py",
    "engine/strategies/test_endings_integration.py",
    "engine/strategies/test_failure_integration.py",
    "engine/strategies/test_launch_integration.py",
    "engine/strategies/test_network_integration.py",
    "engine/strategies/test_watchdog.py",
    "engine/strategies/test_watchdog_integration.py",
    "engine/test_launch_integration.py",
    "engine/test_packaging_integration.py",
)
"""Files whose tests have processes end within seconds, or count what the machine as a whole does."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        if item.path.relative_to(root).as_posix() in ALONE:
            item.add_marker("alone")
        if root / "simulated_device" in item.path.parents:
            item.add_marker("device")


def pytest_collection_finish() -> None:
    # All that was imported is there to stay. A forked rank that collects garbage would else look at each of these
    # objects, and so copy the pages that it shares with this process: half a second per rank.
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    # Where the tests run in a shell's background, Ctrl-C is ignored, by the processes that they start as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in IGNORED:
        config.addinivalue_line("filterwarnings", line)


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


@pytest.fixture(autouse=True)
def _environment_as_it_was():
    """Lightning's launchers name a port in the environment, which runs of a later test would all meet at."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
