"""Interpreters for tests that have imported torch, Lightning and the engine when they start: 0.1 s instead of 4.

`python()` is the path of an executable that takes the place of `sys.executable`: a script runs in a fork of a server
(server.py), which belongs to this process and ends with it. The executable (client.py) has the script's output,
signals and exit status. Where a fork can't be what is asked for (an option of the interpreter but -c, -m, -u, -B, a
terminal, a namespace, a variable that modules read while they are imported), it becomes the interpreter itself.

What differs in a script all the same: its process is not a child of the one that waits for it, nor a member of its
session and process group; modules have been imported; all of them hash strings alike. Tests of these start theirs with
`cold=True`.
"""

import atexit
import fcntl
import logging
import multiprocessing.spawn
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

from tests.warm.client import SOCKET_LIMIT, tell

_END_S = 10.0
_environment: dict[str, str] = {}
_shared_by: list[int] = []
"""The process whose children share a server, where there is one."""
_given: list[str] = []
"""The executable of another process's server, of which this process is a fork."""
_ends: list[Callable[[], None]] = []
_SHEBANG_LIMIT = 127
"""Bytes that each kernel reads of it."""


def become_cold(interpreter: str) -> None:
    """Has a process that has been started warm be to its tests what a cold one is, and use the server that it is of."""
    if sys.executable == interpreter:
        return
    _given.append(sys.executable)
    sys.executable = interpreter
    multiprocessing.set_executable(interpreter)
    # Lightning has these print by themselves where nobody else does when it is imported, as pytest would have.
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def keep_environment(is_worker: bool) -> None:
    """Has the server the variables of now, whatever a test changes before the server is started.

    A worker shares its server with the other workers of its run; the server belongs to the process that has started
    them all, and is in the temporary folder of the run.
    """
    _environment.update(os.environ)
    if is_worker:
        _shared_by.append(os.getppid())


@cache
def python() -> str:
    """The executable; the server is started with the first use. With POLYPHASE_COLD=1 it is the interpreter."""
    if os.environ.get("POLYPHASE_COLD"):
        return sys.executable
    if _given:
        return _given[0]
    if not _shared_by:
        return _start(os.getpid(), Path(tempfile.mkdtemp(prefix="polyphase-warm-")))
    folder = Path(_environment["TMPDIR"]) / "warm"
    with (folder.parent / "warm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return _executable(folder)
        folder.mkdir(mode=0o700)
        return _start(_shared_by[0], folder)


def commands() -> str:
    """The folder of that executable, which has all commands of this environment, too."""
    return str(Path(python()).parent)


@contextmanager
def spawning() -> Iterator[None]:
    """Workers that multiprocessing spawns in here are warm."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(python())
    try:
        yield
    finally:
        multiprocessing.set_executable(before)


def is_running() -> bool:
    return python.cache_info().currsize > 0


def _executable(folder: Path) -> str:
    path = folder / "bin" / "python"
    return str(path) if path.exists() else sys.executable


def _start(owner: int, folder: Path) -> str:
    shebang, address = f"#!{sys.executable} -IS", folder / "socket"
    if len(shebang) > _SHEBANG_LIMIT or len(str(address)) > SOCKET_LIMIT or sys.platform != "linux":
        return sys.executable
    executable = folder / "bin" / "python"
    executable.parent.mkdir()
    for beside in Path(sys.executable).parent.iterdir():  # commands are looked for where the interpreter is
        if not beside.name.startswith("python"):
            _copy_command(beside, executable.parent / beside.name, executable)
    source = (Path(__file__).parent / "client.py").read_text()
    executable.write_text(f"{shebang}\nSOCKET = {str(address)!r}\nPYTHON = {sys.executable!r}\n{source}")
    executable.chmod(0o700)
    (executable.parent / "python3").symlink_to("python")
    root = Path(__file__).parents[2]
    command = [sys.executable, "-u", "-m", "tests.warm.server", str(address), str(owner), str(executable)]
    log = (folder / "log").open("wb")
    environment = _environment or None
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    log.close()
    _ends.append(partial(_end, process, folder, owner))
    while not address.exists():
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.02)
    return str(executable)


def _copy_command(command: Path, copy: Path, executable: Path) -> None:
    """One that is a Python script is run by the executable."""
    content = command.read_bytes()
    shebang = f"#!{sys.executable}\n".encode()
    if content.startswith(shebang):
        copy.write_bytes(f"#!{executable}\n".encode() + content.removeprefix(shebang))
        copy.chmod(0o700)
    else:
        copy.symlink_to(command)


@atexit.register
def stop() -> None:
    """Ends the server, after which no interpreter is warm; called while the temporary folder is still there."""
    while _ends:
        _ends.pop()()


def _end(server: subprocess.Popen, folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # a fork has the function, too; a server of several workers ends with who started them
        return
    with suppress(OSError):
        tell(str(folder / "socket"), {"stop": True})
    try:
        server.wait(_END_S)  # it removes the folder
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def kill_rest(pid: int) -> None:
    """Kills what is left of the process group of the script that `pid` has stood for."""
    if is_running() and python() != sys.executable:
        tell(str(Path(python()).parents[1] / "socket"), {"kill": pid})
