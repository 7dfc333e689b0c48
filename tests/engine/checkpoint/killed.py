"""Processes that are killed while they save or hold a lock; a program of its own, for it forks before any threads.

python -m tests.engine.checkpoint.killed {new paths,one path,lock,prune} FOLDER SEED
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, find, lock, repair
from polyphase.engine.checkpoint.retention import list_entries, prune

from .sample_checkpoints import about, content, is_whole, rank_state, saved

NUM_KILLS = 20
KEPT = 3


def save_for_ever(folder: Path, step: int, has_one_path: bool, tell: Callable[[int], None]) -> None:
    """Saves in the background and removes the older ones, as a run does; tells the steps that are saved."""
    saver, _ = AsyncCheckpointer(), lock(folder)
    while True:
        path = folder / ("same" if has_one_path else f"step={step}")
        saver.save(content(step), str(path), about=about(step), of_rank=rank_state(step), link="last")
        for old, _ in [] if has_one_path else find(folder)[KEPT - 1 :]:
            saver.remove(old)
        saver.finish()
        tell(step)
        step += 1


@contextmanager
def child(function: Callable[..., None], *arguments: object) -> Iterator[tuple[int, int]]:
    """Another process that runs `function`: its id, and what to read from it; killed at the end."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            function(*arguments, lambda step: os.write(write, f"{step}\n".encode()))
        finally:
            os._exit(1)
    os.close(write)
    try:
        yield process, read
    finally:
        os.kill(process, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(process, 0)[1]), "it ended by itself"


def storm(folder: Path, has_one_path: bool, seed: int) -> None:
    """Kills again and again; after each time the newest checkpoint is whole and no older than the last one told."""
    draw, newest = random.Random(seed), 0
    for _ in range(NUM_KILLS):
        with child(save_for_ever, folder, newest + 1, has_one_path) as (_, read):
            told = os.read(read, 1 << 16).split()  # waits for the first one, which may be of any age
            time.sleep(draw.uniform(0, 0.1))
        while more := os.read(read, 1 << 16):
            told += more.split()
        os.close(read)
        release = lock(folder)
        repair(folder)
        found = find(folder)
        assert all(is_whole(path, manifest.step) for path, manifest in found)
        assert found[0][1].step >= int(told[-1]), f"step {told[-1]} was saved, but is lost"
        newest = found[0][1].step
        release()
        prune(folder, keep_last=KEPT)
        assert {entry.kind for entry in list_entries(folder)} == {"checkpoint"}
        assert set(os.listdir(folder)) - {".lock", "last"} == {os.path.basename(path) for path, _ in found[:KEPT]}
    print(f"survived {NUM_KILLS} kills, {newest} steps")


def pruned_until(folder: Path, operation: int) -> None:
    """Prunes, and gets SIGTERM at the begin of the `operation`-th time that the file system is changed."""
    left = [operation]

    def count(event: str, _: tuple[object, ...]) -> None:
        if event in ("os.remove", "os.rename", "os.rmdir"):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(count)
    prune(folder, keep_last=2)
    os._exit(0)


def prunes(folder: Path) -> None:
    """Whenever a prune is ended, what is to stay is whole, and a run saves there under any of the names."""
    operation, status = 0, 1
    while status:
        operation += 1
        saved(folder, *range(1, 6))
        (folder / ".saving-0123").mkdir()
        (folder / "last").symlink_to("step=5")
        for again in (False, True):  # the second one begins with what the first has left
            process = os.fork()
            if process == 0:
                pruned_until(folder, operation)
            ended = os.waitpid(process, 0)[1]
            assert ended in (0, signal.SIGTERM)
            status = status if again else ended
        release = lock(folder)
        repair(folder)
        steps = [manifest.step for path, manifest in find(folder) if is_whole(path, manifest.step)]
        assert steps[:2] == [5, 4]
        assert len(steps) == len(find(folder))
        assert os.path.realpath(folder / "last") == str(folder / "step=5")
        saved(folder, *range(6, 0, -1))  # nothing is in the way of a name
        release()
        shutil.rmtree(folder)
    assert operation > 15
    print(f"survived {operation} ends")


def hold(folder: Path, tell: Callable[[int], None]) -> None:
    """Holds the lock whatever it opens there, and has a child, like a worker of a loader, that outlives it."""
    _ = lock(folder)
    find(folder), list_entries(folder), (folder / ".lock").read_text()
    if os.fork() == 0:
        tell(os.getpid())  # by itself: it has given back its copy of the lock by then
    time.sleep(60)


def locks(folder: Path) -> None:
    """A second process can't have the lock, and prunes nothing, until the first is killed; its child has no lock."""
    saved(folder, 1, 2)
    (folder / ".saving-0123").mkdir()
    with child(hold, folder) as (process, read):
        orphan = int(os.read(read, 20))
        before = sorted(os.listdir(folder))
        says = f"in use: process {process} on {os.uname().nodename}, since 20"
        for locked in (lambda: lock(folder), lambda: prune(folder, keep_last=1)):
            with pytest.raises(CheckpointError, match=says):
                locked()
        assert sorted(os.listdir(folder)) == before
    os.kill(orphan, 0)  # it is still there
    lock(folder)()
    os.kill(orphan, signal.SIGKILL)
    removed = [os.path.basename(path) for path in prune(folder, keep_last=1).removed]
    assert removed == ["step=1", ".saving-0123"]
    print("the lock was free")


if __name__ == "__main__":
    what, place, seed = sys.argv[1:]
    if what in ("lock", "prune"):
        {"lock": locks, "prune": prunes}[what](Path(place))
    else:
        storm(Path(place), what == "one path", int(seed))
