"""`polyphase doctor`: from files in a folder to what a person, a program and a browser read."""

import json
import re
from dataclasses import replace

import pytest

from polyphase.engine.cli import main
from polyphase.engine.doctor import Run, judge, write_rank
from polyphase.engine.doctor.page import page

from .runs import info, interval


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


def test_json_is_for_programs(folder, monkeypatch, capsys):
    code, said, _ = doctor(monkeypatch, capsys, folder, "--json")
    verdict = json.loads(said)
    assert code == 0
    assert [(finding["cause"], finding["ranks"]) for finding in verdict["findings"]] == [("slow_loader", [1])]
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in verdict["shares"].values())


def test_of_a_folder_of_runs_the_newest(folder, monkeypatch, capsys):
    assert doctor(monkeypatch, capsys, folder.parent.parent)[0] == 0


def test_a_page_needs_no_network_and_no_script(folder, tmp_path, monkeypatch, capsys):
    code, _, _ = doctor(monkeypatch, capsys, folder, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert code == 0
    assert len(text) < 2_000_000
    assert not re.search(r"https?://|<script|<link|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert "rank 1 (host1) waits 20.1 ms" in text
    assert text.count("<svg") == 4, "for each rank its shares and its steps"


def test_a_page_has_the_memory_of_each_rank_over_time():
    grows = [replace(interval(20 * i, 20), rss_mb=400.0 + 100 * i) for i in range(3)]
    run = Run({rank: info(rank) for rank in range(2)}, dict.fromkeys(range(2), grows))
    text = page(run, judge(run))
    assert text.count("<polyline") == 2
    assert "rank 1, at most 600 MB" in text
    points = [tuple(map(float, p.split(","))) for p in re.search(r'points="(.*?)"', text)[1].split()]
    assert [round(y, 1) for _, y in points] == [32.9, 32.9, 18.6, 18.6, 4.3, 4.3]
    assert (points[0][0], points[-1][0]) == (0, 1000)
    assert "Memory of the devices" not in text


def test_a_page_escapes_what_ranks_say(folder, tmp_path, monkeypatch, capsys):
    odd = info(1)
    odd.host = "<script>alert(1)</script>"
    write_rank(str(folder / "doctor" / "rank_1.jsonl"), odd, [interval(data_wait=20.1)])
    doctor(monkeypatch, capsys, folder, "--html", tmp_path / "page.html")
    assert "<script" not in (tmp_path / "page.html").read_text()


def test_a_page_of_a_large_run_stays_small():
    long = [interval(50 * i, 50, checkpoint=1.0, callbacks=1.0, copy=1.0, data_wait=1.0) for i in range(512)]
    run = Run({rank: info(rank, 512) for rank in range(512)}, dict.fromkeys(range(512), long))
    assert len(page(run, judge(run))) < 2_000_000


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
