"""Which run is meant, who may be asked, and how stacks are shown."""

import os
import threading
import time

import psutil
import pytest

from polyphase.engine.cli import main
from polyphase.engine.reliability import stack_answers, stacks
from polyphase.engine.reliability.stacks import (
    Entry,
    RunningRank,
    _own_space,
    _parse_dump,
    _running_ranks,
    _Unanswered,
    ask,
    find,
    lines,
    remove_ended,
    runtime_folder,
)

DUMP = """\
Thread 0x00007f0000000002 (most recent call first):
  File "/a/loader.py", line 3 in wait
Current thread 0x00007f0000000001 (most recent call first):
  File "/a/train.py", line 20 in training_step
  File "/a/train.py", line 40 in <module>
"""


def rank(number=0, *, root="/runs", logs=None, job="a", created=None, pid=None, space=None):
    return RunningRank(
        root=root,
        logs=logs,
        job=job,
        rank=number,
        world_size=2,
        host="here",
        space=_own_space() if space is None else space,
        pid=os.getpid() if pid is None else pid,
        created=psutil.Process().create_time() if created is None else created,
        thread=threading.get_ident(),
        signal=None,
    )


def entries(*ranks):
    return [Entry(f"/nowhere/{number}", each) for number, each in enumerate(ranks)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Has the folder of running ranks be one of the test's own."""
    monkeypatch.setattr(stacks.os, "access", lambda path, mode: False)
    monkeypatch.setattr(stacks.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"polyphase-{os.getuid()}"


@pytest.mark.parametrize(
    "run_dir", ["/runs/logs/version_1", "/runs/logs/version_1/", "/runs", "/runs/logs", "/", "/runs/x"]
)
def test_a_run_is_found_by_its_folders_and_has_all_ranks_of_its_job(run_dir):
    running = entries(rank(0, logs="/runs/logs/version_1"), rank(1), rank(0, root="/other", job="b", created=1.0))
    assert [entry.rank.rank for entry in find(run_dir, running) if entry.rank.job == "a"] == [0, 1]


def test_the_folder_of_logs_is_nearer_than_the_root_and_of_several_runs_the_last_counts():
    running = entries(rank(0, logs="/runs/1", job="a", created=5.0), rank(0, logs="/runs/2", job="b", created=9.0))
    assert [entry.rank.job for entry in find("/runs/1", running)] == ["a"]
    assert [entry.rank.job for entry in find("/runs", running)] == ["b"]


def test_no_such_run():
    with pytest.raises(
        ValueError, match="no run that is under way writes to '/nowhere'; under way on this host: /runs/1"
    ):
        find("/nowhere", entries(rank(0, logs="/runs/1")))
    with pytest.raises(ValueError, match="none of this user's is under way"):
        find("/nowhere", [])


def test_the_folder_is_the_users_alone(place):
    assert runtime_folder(creates=False) is None
    assert runtime_folder(creates=True) == str(place)
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o750)
    assert runtime_folder(creates=True) is None, "others could ask"
    place.rmdir()
    (place.parent / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(place.parent / "elsewhere")
    assert runtime_folder(creates=True) is None, "somebody else leads it elsewhere"


def test_a_secret_and_a_folder_may_have_any_bytes(monkeypatch):
    ids = []
    for secret in ("\udcff", "\udcfe"):
        monkeypatch.setenv("POLYPHASE_JOB_SECRET", secret)
        ids.append(stack_answers._job("/runs/\udcff", 2))
    assert ids[0] != ids[1]


def test_files_are_the_users_alone_and_follow_no_links(place):
    entry = Entry.new(runtime_folder(creates=True), rank())
    assert os.stat(f"{entry.base}.json").st_mode & 0o777 == 0o600
    os.symlink("/dev/null", f"{entry.base}.ask.part")
    with pytest.raises(OSError, match="symbolic link"):
        entry.write(".ask", "1")


def test_processes_that_have_ended_are_not_asked_and_their_files_go(place):
    folder = runtime_folder(creates=True)
    ended = Entry.new(folder, rank(1, created=1.0))
    elsewhere = Entry.new(folder, rank(1, created=1.0, space="pid:[1]"))
    here = Entry.new(folder, rank(0))
    (place / f"{os.getpid()}-99.json").write_text("not JSON")
    assert _running_ranks() == [here]
    remove_ended(folder)
    assert not os.path.exists(f"{ended.base}.json")
    assert os.path.exists(f"{elsewhere.base}.json"), "of a container, whose processes can't be seen here"
    here.remove()
    assert _running_ranks() == []


def test_a_rank_that_does_not_answer_and_takes_no_signal(place):
    entry = Entry.new(runtime_folder(creates=True), rank(0))
    answers = ask([entry], 0.1)
    assert answers[0] == "it does not answer, and its program has a use of its own for SIGURG"
    assert answers[1] == "it is not on this host, and has not answered"
    assert entry.take(".ask") is None


def test_an_answer_is_that_to_the_question(place):
    entry = Entry.new(runtime_folder(creates=True), rank(0))
    entry.write(".answer-0", {"threads": "of another question"})

    def answer():
        while (number := entry.take(".ask")) is None:
            time.sleep(0.01)
        entry.write(f".answer-{number}", {"rank": 0, "elsewhere": [1], "threads": []})
        entry.write(f".answer-{number}-1", {"rank": 1, "threads": []})

    thread = threading.Thread(target=answer)
    thread.start()
    answers = ask([entry], 5.0)
    thread.join()
    assert {number: answer["rank"] for number, answer in answers.items()} == {0: 0, 1: 1}


def test_what_faulthandler_writes_is_read():
    threads = _parse_dump(DUMP, 0x7F0000000001)
    assert [thread["runs"] for thread in threads] == [True, False]
    assert threads[0]["calls"] == [["/a/train.py", 20, "training_step"], ["/a/train.py", 40, "<module>"]]
    assert _parse_dump("", 1) == []


def test_ranks_with_one_stack_are_shown_once():
    here = [__file__, 5, "here"]
    library = [os.path.join(os.path.dirname(os.__file__), "socket.py"), 5, "there"]
    place = {
        "host": "a",
        "pid": 7,
        "phase": "train",
        "step": 3,
        "batch": 4,
        "pending": "all_reduce",
        "line": "x.py:1 in f",
    }

    def answer(*calls):
        return {**place, "threads": [{"name": "MainThread", "runs": True, "calls": list(calls)}]}

    told = lines(
        {0: answer(here, here, library, library), 1: _Unanswered("it is gone"), 2: answer(here, here, library, library)}
    )
    assert told[0] == (
        "rank 0 on a, process 7: phase 'train' of step 3, batch 4, waits for other ranks in all_reduce, at x.py:1 in f"
    )
    assert told[1] == "rank 1: no stacks: it is gone"
    assert told[4] == "ranks 0, 2:"
    assert len(told) == 6
    assert told[5].startswith("  ... 2 calls of libraries and of the engine (--all-frames)\n")
    assert told[5].count("import os") == told[5].count("in here") == 2 or "in here" in told[5]
    assert "in there" in lines({0: answer(here, here, library)}, all_frames=True)[-1]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["/nowhere"], "no run that is under way"),
        ([".", "--nativ"], "--native"),
        ([".", "--timeout", "soon"], "--timeout must be a number of seconds above 0, but got 'soon'"),
    ],
)
def test_errors(place, words, match, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["polyphase", "stacks", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert match in capsys.readouterr().err


def test_native_frames_need_py_spy(place, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setattr("sys.argv", ["polyphase", "stacks", ".", "--native"])
    with pytest.raises(SystemExit):
        main()
    assert "--native needs py-spy, which is not installed: pip install py-spy." in capsys.readouterr().err
