"""`polyphase doctor host`: how what is seen is judged, and that a real host can be asked."""

import json
import resource
import socket

import pytest

from polyphase.doctor.host import (
    CHECKS,
    check_host,
    judge_cpus,
    judge_devices,
    judge_disk,
    judge_files,
    judge_load,
    judge_memory,
    judge_name,
    judge_port,
    judge_shm,
    judge_versions,
)
from polyphase.engine.cli import main

GB = 10**9


@pytest.mark.parametrize(
    ("check", "status", "remedy"),
    [
        (judge_shm(64 * 2**20, 60 * 10**6), "fail", "--shm-size"),
        (judge_shm(GB, GB // 2), "warn", "--shm-size"),
        (judge_shm(8 * GB, 8 * GB), "ok", ""),
        (judge_shm(None, 0), "ok", ""),
        (judge_files(128, 4096), "fail", "ulimit -n"),
        (judge_files(1024, resource.RLIM_INFINITY), "warn", "ulimit -n"),
        (judge_files(65536, 65536), "ok", ""),
        (judge_cpus(64, 64, 4.0), "warn", "OMP_NUM_THREADS=4"),
        (judge_cpus(64, 4, 4.0), "ok", ""),
        (judge_cpus(64, 64, None), "ok", ""),
        (judge_name("node", [], "Name or service not known"), "warn", "/etc/hosts"),
        (judge_name("node", ["127.0.1.1"], None), "ok", "for several"),
        (judge_name("node", ["10.0.0.7"], None), "ok", ""),
        (judge_disk("/data", GB // 2, 500.0, None), "fail", "make room"),
        (judge_disk("/data", 100 * GB, 20.0, None), "warn", "Snapshot()"),
        (judge_disk("/data", 0, None, "Permission denied"), "fail", "default_root_dir"),
        (judge_disk("/data", 100 * GB, 500.0, None), "ok", ""),
        (judge_memory(GB, 64 * GB, 0), "warn", "swaps"),
        (judge_memory(32 * GB, 64 * GB, 0), "ok", ""),
        (judge_load(0.9), "warn", "taskset"),
        (judge_load(0.1), "ok", ""),
        (judge_versions({"torch": "2.13.0", "lightning": None}), "fail", "pip install lightning"),
        (judge_versions({"torch": "2.13.0"}), "ok", ""),
        (judge_devices(None, []), "ok", "driver"),
        (judge_devices("cuda", ["H100", "H100"]), "ok", ""),
        (judge_devices("cuda", ["H100"], "550.54"), "ok", ""),
        (judge_devices(None, [], "550.54"), "warn", "torch.version.cuda"),
        (judge_port(None, None), "ok", ""),
        (judge_port(29500, None), "ok", ""),
        (judge_port(29500, "Address already in use"), "fail", "leave MASTER_PORT unset"),
    ],
    ids=str,
)
def test_how_it_is_judged(check, status, remedy):
    assert check.status == status
    assert remedy in check.remedy
    assert bool(check.remedy) == bool(remedy)


def test_this_host_can_be_asked(tmp_path):
    checks = check_host(str(tmp_path))
    assert len(checks) == len(CHECKS) == len({check.name for check in checks})
    assert all(check.found for check in checks)
    assert list(tmp_path.iterdir()) == []


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["polyphase", "doctor", "host", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_a_folder_that_is_not_there_fails(tmp_path, monkeypatch, capsys):
    code, said, _ = command(monkeypatch, capsys, tmp_path / "nothing", "--json")
    assert code == 1
    assert {check["name"]: check["status"] for check in json.loads(said)}["disk"] == "fail"


def test_a_person_reads_a_line_for_each(tmp_path, monkeypatch, capsys):
    code, said, _ = command(monkeypatch, capsys, tmp_path)
    assert code in (0, 1)
    for name in ("versions", "devices", "CPUs", "memory", "open files", "disk"):
        assert name in said


def test_a_port_that_another_process_has_fails(monkeypatch, tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        check = {each.name: each for each in check_host(str(tmp_path))}["port"]
    assert (check.status, "in use" in check.found) == ("fail", True), check


def test_wrong_words_are_an_error(tmp_path, monkeypatch, capsys):
    code, _, error = command(monkeypatch, capsys, tmp_path, "--jsn")
    assert (code, "--json" in error) == (2, True)
    code, _, error = command(monkeypatch, capsys, tmp_path, tmp_path)
    assert (code, "takes one folder" in error) == (2, True)
