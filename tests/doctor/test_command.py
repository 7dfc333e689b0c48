"""`polyphase doctor`: from files in a folder to what a person and a program read."""

import json
import re

import pytest
from rich.console import Console

from polyphase.doctor import judge, write_rank
from polyphase.doctor.verdict import show
from polyphase.engine.cli import main

from .runs import info, interval, run_of


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "lightning_logs" / "version_0" / "doctor"
    place.mkdir(parents=True)
    write_rank(str(place / "rank_0.jsonl"), info(0), [interval(waiting=20.2)])
    write_rank(str(place / "rank_1.jsonl"), info(1), [interval(data_wait=20.1)])
    return place.parent


def doctor(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["polyphase", "doctor", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, *capsys.readouterr()


def test_the_terminal_has_cause_rank_remedy_and_shares(folder, monkeypatch, capsys):
    code, said, _ = doctor(monkeypatch, capsys, folder)
    said = " ".join(said.split())
    assert code == 0
    assert "1. slow_loader (up to 67% less time) rank 1 (host1) waits 20.1 ms of each step" in said
    assert "rank 0 rank 1" in said
    assert "all 100.0% 100.0%" in said


def test_shares_that_are_shown_add_up(capsys):
    small = dict.fromkeys(["copy", "callbacks", "logging", "validation", "checkpoint"], 0.04)
    verdict = judge(run_of(interval(**small), interval(**small)))
    show(verdict, Console())
    of_rank = [float(number) for number in re.findall(r"^\D+?([\d.]+)%", capsys.readouterr().out, re.MULTILINE)]
    *parts, whole = of_rank
    assert whole == 100.0
    assert sum(parts) == pytest.approx(100.0, abs=0.05 * len(parts))
    shares = re.findall(r"(\d+)% ([a-z ]+)", verdict.lines()[0])
    assert shares[-1] == ("3", "other")
    assert sum(int(share) for share, _ in shares) == pytest.approx(100, abs=3)


def test_json_is_for_programs(folder, monkeypatch, capsys):
    code, said, _ = doctor(monkeypatch, capsys, folder, "--json")
    verdict = json.loads(said)
    assert code == 0
    assert [(finding["cause"], finding["ranks"]) for finding in verdict["findings"]] == [("slow_loader", [1])]
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in verdict["shares"].values())


def test_of_a_folder_of_runs_the_newest(folder, monkeypatch, capsys):
    assert doctor(monkeypatch, capsys, folder.parent.parent)[0] == 0


def test_a_link_to_nothing_is_no_record(folder, tmp_path, monkeypatch, capsys):
    for place in (folder.parent, tmp_path / "empty"):  # beside the newest run, and alone
        (place / "newer" / "doctor").mkdir(parents=True)
        (place / "newer" / "doctor" / "rank_0.jsonl").symlink_to("gone")
    assert doctor(monkeypatch, capsys, folder.parent)[0] == 0
    code, _, said = doctor(monkeypatch, capsys, tmp_path / "empty")
    assert (code, "there is no doctor/rank_0.jsonl in" in said) == (2, True)


def test_errors(folder, tmp_path, monkeypatch, capsys):
    code, _, error = doctor(monkeypatch, capsys, folder, "--jsn")
    assert code == 2
    assert re.search(r"no flag of doctor is called '--jsn'|'--jsn'.*--json", error)
    code, _, error = doctor(monkeypatch, capsys, tmp_path / "nothing")
    assert code == 2
    assert "callbacks=[Doctor()]" in error


def test_help_needs_nothing(monkeypatch, capsys):
    said = doctor(monkeypatch, capsys, "--help")[1]
    assert "usage: polyphase doctor RUN_DIR" in said
    assert max(map(len, said.splitlines())) <= 100
