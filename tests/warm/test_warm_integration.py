"""A script that runs warm is to itself, and to who has started it, what a cold one is."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import warm
from tests.distributed import run_command, torchrun
from tests.pairs import nightly

pytestmark = pytest.mark.skipif(bool(os.environ.get("POLYPHASE_COLD")), reason="all is to be cold, by POLYPHASE_COLD")

DESCRIBES_ITSELF = """
import gc, json, os, random, resource, signal, sys, threading, warnings
import numpy as np
import torch, lightning.pytorch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
import multiprocessing, multiprocessing.spawn
print(json.dumps({
    "argv": sys.argv[1:], "path": sys.path, "stdin": sys.stdin.read(), "folder": os.getcwd(), "umask": os.umask(0),
    "environment": dict(os.environ), "handlers": [str(signal.getsignal(number)) for number in range(1, 32)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "threads": threading.active_count(),
    "tasks": len(os.listdir("/proc/self/task")), "open": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
    "num_threads": torch.get_num_threads(), "seed": torch.initial_seed(), "draw": torch.rand(1).item(),
    "rank": rank_zero_only.rank, "group": torch.distributed.is_initialized(), "gc": gc.get_threshold(),
    "debug": str(torch.distributed.get_debug_level()), "names": sorted(vars()), "limits": resource.getrlimit(7),
    "buffered": [sys.stdout.write_through, sys.stdout.line_buffering, sys.stderr.line_buffering],
    "codec": [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdin.encoding], "name": __name__,
    "file": globals().get("__file__"), "spec": __spec__ and [__spec__.name, __spec__.origin],
    "loader": type(__loader__).__name__, "doc": __doc__,
    "filters": sorted(map(str, warnings.filters)),
    "default": str(torch.get_default_dtype()), "deterministic": torch.are_deterministic_algorithms_enabled(),
    "main": multiprocessing.current_process().name, "niceness": os.nice(0), "hooks": str(sys.excepthook),
}))
"""


def ran(executable, *arguments, **options):
    """How an interpreter has ended, and what it has printed."""
    done = subprocess.run([executable, *arguments], capture_output=True, text=True, timeout=90, **options)
    return done.returncode, done.stdout, done.stderr


def both(*arguments, **options):
    return ran(warm.python(), *arguments, **options), ran(sys.executable, *arguments, **options)


def is_warm(*arguments, **options):
    code = "import sys; print('torch' in sys.modules)"
    returncode, printed, errors = ran(warm.python(), *arguments, "-c", code, **options)
    assert returncode == 0, errors
    return printed == "True\n"


def process_of(client):
    """The script's own process, which has printed its id."""
    return psutil.Process(int(client.stdout.readline()))


def started(code, **options):
    code = f"import os, signal, sys, time; print(os.getpid(), flush=True); {code}"
    return subprocess.Popen([warm.python(), "-c", code], stdout=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("way", ["file", *nightly("-c", "-m")])
def test_a_script_finds_itself_and_its_process_as_a_cold_one(tmp_path, monkeypatch, way):
    (tmp_path / "script.py").write_text(DESCRIBES_ITSELF)
    for name, value in {"LOCAL_RANK": "1", "RANK": "3", "MINE": "a\udc80b", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    words = {"file": ["script.py"], "-c": ["-c", DESCRIBES_ITSELF], "-m": ["-m", "script"]}[way]
    hot, cold = both(*words, "a", "--b", "", input="words", umask=0o27)
    assert cold[0] == 0, cold[2]
    found, expected = json.loads(hot[1]), json.loads(cold[1])
    drawn = [(each.pop("seed"), each.pop("draw")) for each in (found, expected)]
    assert drawn[0] != drawn[1]
    assert found == expected
    assert expected["rank"] == 3
    assert hot[2] == cold[2]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit()",
        "import sys; sys.exit(7)",
        "import sys; sys.exit('bye')",
        "import os; os._exit(3)",
        "import os; os.abort()",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.kill(os.getpid(), 15)",
        "raise KeyboardInterrupt",
        "def f(): 1 / 0\nf()",
        "try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('other') from e",
        "1 +",
        "import sys; sys.excepthook = lambda *what: print(*what[:2], len(what))\n1 / 0",
        "import atexit; atexit.register(print, 'at the end'); print('begun', end='')",
        "import threading; threading.Timer(0.2, print, ['late']).start()",
        "import sys; sys.stdout.write('out'); sys.stderr.write('err')",
        "import warnings; warnings.warn('of mine')",
    ],
)
def test_it_ends_and_prints_as_a_cold_one(tmp_path, code):
    (tmp_path / "script.py").write_text(code)
    hot, cold = both("script.py")
    assert hot == cold
    hot, cold = both("-c", code)
    assert hot == cold


def test_modules_that_are_not_there_are_said_as_by_a_cold_one():
    hot, cold = both("-m", "no_such_module")
    assert hot[0] == cold[0] == 1
    assert hot[2].splitlines()[-1].split(": ")[1:] == cold[2].splitlines()[-1].split(": ")[1:]


def test_no_two_draw_the_same():
    code = "import random, numpy, torch, uuid, multiprocessing as mp; "
    code += "print(torch.initial_seed(), random.random(), numpy.random.rand(), uuid.uuid4(), "
    code += "mp.current_process().authkey.hex())"
    first, second = (ran(warm.python(), "-c", code)[1].split() for _ in range(2))
    assert len({*first, *second}) == 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_the_script(number):
    code = f"signal.signal({number}, lambda *_: sys.exit(5)); print('ready', flush=True)\n"
    code += "while True: time.sleep(0.1)"  # one that comes just before a sleep does not end it
    client = started(code)
    process_of(client)
    assert client.stdout.readline() == "ready\n"
    client.send_signal(number)
    assert client.wait(20) == 5
    client.stdout.close()


def test_a_signal_without_a_handler_ends_both():
    client = started("time.sleep(60)")
    process_of(client)
    client.terminate()
    assert client.wait(20) == -signal.SIGTERM
    client.stdout.close()


def test_who_ignores_interrupts_is_not_interrupted():
    client = started(
        "print(signal.getsignal(signal.SIGINT), flush=True); time.sleep(1)",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    process_of(client)
    assert client.stdout.readline() == "1\n"
    client.send_signal(signal.SIGINT)
    assert client.wait(20) == 0
    client.stdout.close()


def test_it_is_killed_with_all_that_it_has_started():
    """That a warm child of its own, which is of another group, goes as well."""
    code = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import os, time; "
    code += "print(os.getpid(), flush=True); time.sleep(60)']); time.sleep(60)"
    client = started(code)
    processes = [process_of(client), process_of(client)]
    client.kill()
    assert client.wait(20) == -signal.SIGKILL
    assert not psutil.wait_procs(processes, timeout=20)[1]
    client.stdout.close()


def test_what_outlives_a_command_is_killed_with_it(tmp_path):
    code = "import os, time\nif os.fork() == 0:\n  open('pid', 'w').write(str(os.getpid())); os.closerange(0, 3)\n"
    code += "  time.sleep(60)\nwhile not os.path.exists('pid') or not open('pid').read(): time.sleep(0.01)"
    assert run_command([sys.executable, "-c", code]).returncode == 0
    left = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while psutil.pid_exists(left) and psutil.Process(left).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_deadline_ends_it():
    finished = run_command([sys.executable, "-c", "import time; print('begun'); time.sleep(60)"], timeout_s=3)
    assert (finished.returncode, finished.output) == (-9, "begun\n\n[ended after 3 s]")


def test_files_that_are_handed_down_have_their_numbers(tmp_path):
    reading, writing = os.pipe()
    moved = fcntl.fcntl(writing, fcntl.F_DUPFD, 42)  # a number that is free here: other tests have files, too
    code = ran(warm.python(), "-c", f"import os; os.write({moved}, b'here')", pass_fds=[moved])
    os.close(moved)
    os.close(writing)
    assert (code[0], os.read(reading, 10), os.read(reading, 10)) == (0, b"here", b"")
    os.close(reading)


def test_the_rest_is_cold(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert is_warm()
    assert is_warm("-u", "-B")
    assert not is_warm("-W", "error")
    assert not is_warm("-X", "dev")
    assert not is_warm("-I")
    assert not is_warm(preexec_fn=lambda: os.nice(1))
    for name, value in {"TORCH_LOGS": "+dynamo", "PYTHONPATH": "/nowhere", "LOGLEVEL": "INFO"}.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not is_warm(), name
    monkeypatch.setenv("ANYTHING", "else")
    monkeypatch.setenv("PWD", "/as/shells/set/it")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "another")
    assert is_warm()


def test_ranks_of_torchrun_are_warm(tmp_path):
    code = "import sys, os\nline = f\"{'torch' in sys.modules} {os.environ['RANK']} {sys.executable}\\n\"\n"
    code += "os.write(1, line.encode())\n"  # at once, or the lines of two ranks may be mixed
    code += "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n"
    code += "dist.destroy_process_group()"
    (tmp_path / "script.py").write_text(code)
    finished = torchrun(tmp_path / "script.py")
    assert finished.returncode == 0, finished.output
    assert sorted(finished.output.split("\n"))[-2:] == [f"True {rank} {warm.python()}" for rank in (0, 1)]


def test_workers_that_are_spawned_are_warm(tmp_path):
    code = "import multiprocessing as mp, sys\ndef tells(queue): queue.put(('torch' in sys.modules, __name__))\n"
    code += "if __name__ == '__main__':\n  context = mp.get_context('spawn'); queue = context.Queue()\n"
    code += "  process = context.Process(target=tells, args=(queue,)); process.start(); print(queue.get())\n"
    code += "  process.join(); print(process.exitcode)"
    (tmp_path / "script.py").write_text(code)
    assert ran(warm.python(), "script.py") == (0, "(True, '__mp_main__')\n0\n", "")


@pytest.mark.nightly
def test_workers_share_a_server_that_ends_with_who_has_started_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    worker = "import sys; sys.path.insert(0, sys.argv[1]); from tests import warm; "
    worker += "warm.keep_environment(is_worker=True); print(warm.python())"
    code = f"import subprocess, sys, time\nword = [sys.executable, '-c', {worker!r}, sys.argv[1]]\n"
    code += "workers = [subprocess.Popen(word, stdout=subprocess.PIPE, text=True) for _ in range(2)]\n"
    code += "[path] = {each.communicate()[0].strip() for each in workers}\nassert path != sys.executable\n"
    code += "subprocess.Popen([path, '-c', 'import os, time; print(os.getppid(), os.getpid(), flush=True); "
    code += "time.sleep(60)'])\ntime.sleep(60)"
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    owner = subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True)
    processes = [psutil.Process(int(word)) for word in owner.stdout.readline().split()]
    executable = Path(processes[0].cmdline()[-1])
    assert executable.exists()
    owner.kill()
    owner.wait(20)
    assert not psutil.wait_procs(processes, timeout=20)[1]
    assert not executable.exists()
    owner.stdout.close()
