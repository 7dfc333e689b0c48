"""What a fork of the server does to be a new interpreter, and the run of its script."""

import atexit
import gc
import io
import multiprocessing.process
import multiprocessing.spawn
import os
import random
import runpy
import signal
import sys
import types
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any

import numpy as np
import torch


def run(request: dict[str, Any], start: Any, imports: Any, stub: str, ignored_by_server: Any) -> None:
    """Becomes the process that is asked for, and runs it to its end."""
    if "triton" in sys.modules:  # which prints at exit what of it was not cleared: all that the server has frozen
        atexit.register(gc.unfreeze)
    _set_signals(request, ignored_by_server)
    os.chdir(request["folder"])
    os.umask(request["umask"])
    _set_environment(request["environment"], imports)
    _set_streams(start)
    sys.executable = stub
    _set_modules()
    sys.orig_argv = [stub, *request["arguments"]]
    sys.dont_write_bytecode = not start.writes_bytecode
    sys.path[:] = imports.path[1:]  # the first is the server's own
    _run_main(start)


def _set_signals(request: dict[str, Any], ignored_by_server: Any) -> None:
    for number in ignored_by_server:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _set_environment(environment: dict[str, str], imports: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for name, value in imports.added.items():
        os.environ.setdefault(name, value)
    if os.environ.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable(file=2)


def _set_streams(start: Any) -> None:
    """The server's own are unbuffered, and bound to the same numbers."""
    if not start.unbuffered and not os.environ.get("PYTHONUNBUFFERED"):
        raw = io.FileIO(1, "w", closefd=False)
        raw.name = "<stdout>"
        sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
            io.BufferedWriter(raw), encoding=sys.stdout.encoding, errors=sys.stdout.errors, newline="\n"
        )


def _set_modules() -> None:
    """What modules have drawn or found when they were imported, and would have drawn or found otherwise."""
    from lightning.fabric.utilities.rank_zero import _get_rank
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    random.seed()
    np.random.seed()
    torch.default_generator.seed()  # a new process has one of its own, of no fixed seed
    multiprocessing.process.current_process().authkey = os.urandom(32)
    multiprocessing.spawn.set_executable(sys.executable)
    rank_zero_only.rank = _get_rank() or 0
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]


def _run_main(start: Any) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={}, __loader__=BuiltinImporter)
    if start.kind == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv[:] = ["-m", *start.words]
        _execute(lambda: runpy._run_module_as_main(start.what))  # type: ignore[attr-defined]
    elif start.kind == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *start.words]
        _execute(lambda: _run(compile(start.what, "<string>", "exec", dont_inherit=True), main))
    else:
        path = os.path.abspath(start.what)
        sys.path.insert(0, os.path.dirname(os.path.realpath(start.what)))
        sys.argv[:] = [start.what, *start.words]
        main.__file__ = path
        main.__dict__["__cached__"] = None
        main.__loader__ = SourceFileLoader("__main__", path)  # type: ignore[assignment]
        _execute(lambda: _run(_compiled(path), main))


def _run(code: types.CodeType, main: types.ModuleType) -> None:
    exec(code, main.__dict__)  # noqa: S102


def _compiled(path: str) -> types.CodeType:
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _execute(body: Any) -> None:
    """Runs it; an error is printed as a new interpreter would, without the frames of this file."""
    try:
        body()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        error.__traceback__ = trace
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        if isinstance(error, KeyboardInterrupt):  # ends by the signal
            sys.excepthook = lambda *_: None
            raise
        sys.exit(1)
