"""Reads C and C++ frames of a process with py-spy, if it is installed."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

__all__ = ["NativeError", "find_py_spy", "native_threads"]

_TIMEOUT_S = 60.0
"""Time limit of py-spy, which takes seconds to read the symbols of torch's libraries."""


class NativeError(RuntimeError):
    """py-spy could not inspect a process."""


def find_py_spy() -> str:
    """Returns the path of py-spy.

    Raises:
        ValueError: it is not installed.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    path = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if path is None:
        raise ValueError("--native needs py-spy, which is not installed: pip install py-spy.")
    return path


def native_threads(py_spy: str, pid: int, first: int) -> list[dict[str, Any]]:
    """Returns the stacks of a process's threads, in the form of a rank's own answer.

    Args:
        py_spy: path of py-spy.
        pid: id of the process.
        first: identifier of the thread that runs the rank.

    Raises:
        NativeError: py-spy is not permitted to inspect the process, or takes too long.
    """
    try:
        command = [py_spy, "dump", "--native", "--json", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        threads = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        output = (error.stderr or "").strip().splitlines()
        raise NativeError(f"py-spy: {output[-1] if output else f'exit code {error.returncode}'}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"py-spy: {error}") from error
    threads = [
        {
            "name": thread.get("thread_name") or f"thread {thread['thread_id']:#x}",
            "runs": thread["thread_id"] == first,
            "calls": [
                [f.get("filename") or f.get("module") or "", f.get("line") or 0, f["name"]] for f in thread["frames"]
            ],
        }
        for thread in threads
    ]
    return sorted(threads, key=lambda thread: not thread["runs"])
