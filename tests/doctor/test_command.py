"""`polyphase doctor`: from files in a folder to what a person, a program and a browser read."""

import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from polyphase.doctor import Run, judge, write_rank
from polyphase.doctor.page import page
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


def test_a_page_is_written_through_no_link(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.tex").write_text("three years")
    (tmp_path / "page.html").symlink_to(tmp_path / "thesis.tex")
    assert doctor(monkeypatch, capsys, folder, "--html", tmp_path / "page.html")[0] == 0
    assert (tmp_path / "thesis.tex").read_text() == "three years"
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert not (tmp_path / "page.html").is_symlink()
    code, _, said = doctor(monkeypatch, capsys, folder, "--html", "/dev/null")
    assert (code, "'/dev/null' is no file" in said) == (2, True)


def test_a_page_needs_no_network_and_no_script(folder, tmp_path, monkeypatch, capsys):
    code, said, _ = doctor(monkeypatch, capsys, folder, "--html", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert code == 0
    assert f"wrote {tmp_path / 'page.html'}" in "".join(said.splitlines())
    assert len(text) < 2_000_000
    assert not re.search(r"https?://|<script|<link|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert "rank 1 (host1) waits 20.1 ms" in text
    assert text.count("<svg") == 8, "for each rank its shares, its intervals, and two of its steps"


def bars(text, label):
    """The widths of the bars of a row of the time line, by phase."""
    row = re.search(rf'aria-label="{label}">(.*?)</svg>', text)[1]
    found = re.findall(r'width="([0-9.]+)".*?<title>([a-z ]+) [0-9.]+ ms</title>', row)
    return {phase: float(width) for width, phase in found}


def test_a_page_has_a_median_step_and_the_slowest_one_of_each_rank():
    def noted(rank, step, median_s, slowest_s):
        waits = {"waiting": 0.01} if rank == 0 else {"compute": 0.02}
        steps = [
            {"step": step - 5, "wall_s": median_s, "compute": median_s},
            {"step": step - 2, "wall_s": slowest_s, "compute": slowest_s - 0.02, "optimizer": 0.01} | waits,
        ]
        return replace(interval(step, 10), steps=steps)

    lengths = [(10, 0.04, 0.05), (20, 0.05, 0.2), (30, 0.06, 0.07)]
    run = Run({r: info(r) for r in range(2)}, {r: [noted(r, *each) for each in lengths] for r in range(2)})
    text = page(run, judge(run))
    waits, slow = (bars(text, f"step 18, the slowest: 200 ms, rank {rank}") for rank in range(2))
    assert waits == {"compute": 900.0, "waiting": 50.0, "optimizer": 50.0}
    assert slow == {"compute": 100.0, "optimizer": 50.0}
    assert bars(text, "step 15, a median one: 50 ms, rank 1") == {"compute": 250.0}


def test_without_noted_steps_a_page_has_the_means_of_intervals():
    run = run_of(interval(10, 10), interval(10, 10))
    run.intervals[0].append(interval(20, 10, compute=40.0))
    run.intervals[1].append(interval(20, 10, waiting=32.2))
    text = page(run, judge(run))
    slow = bars(text, "the mean step up to step 20, the slowest: 42 ms, rank 0")
    assert slow["compute"] == pytest.approx(1000 * 40 / 42, abs=0.1)
    assert slow["data wait"] == pytest.approx(1000 * 0.1 / 42, abs=0.1)


def test_joined_intervals_keep_the_slowest_step():
    slow, quick = [{"step": 3, "wall_s": 1.0}] * 2, [{"step": 13, "wall_s": 0.5}] * 2
    for first, second in ((slow, quick), (quick, slow)):
        joined = replace(interval(10, 10), steps=first).joined(replace(interval(20, 10), steps=second))
        assert joined.steps == slow
    assert interval(10, 10).joined(replace(interval(20, 10), steps=slow)).steps == slow


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
    assert "a model's parts" not in text
    run.intervals[0][-1] = replace(grows[-1], model_mb={"parameters": 12.0, "optimizer state": 24.0})
    text = page(run, judge(run))
    assert "<th>parameters</th><th>optimizer state</th></tr><tr><td>0</td><td>12</td><td>24</td></tr>" in text


def test_the_first_steps_don_t_pale_the_others():
    first = replace(interval(3, 3, compute=900.0), is_warmup=True)
    run = run_of(interval(13, 10))
    run.intervals[0] = [first, interval(13, 10), interval(23, 10, compute=16.0)]
    heat = re.search(r'aria-label="steps">(.*?)</svg>', page(run, judge(run)))[1]
    assert re.findall(r"<title>(.*?)</title>", heat) == ["9.3 ms", "17.3 ms"]


def test_a_page_has_the_communication_of_a_step_by_operation():
    calls = {"all_gather": {"calls": 7.0, "sent_mb": 1.5}, "all_reduce": {"calls": 4.0, "sent_mb": 0.03}}
    last = replace(interval(communication=2.0), collectives=calls, all_reduce_mb_per_s=900.0, links=[0.0, 120.0])
    text = page(run := run_of(last, replace(last, links=[80.0, 0.0])), judge(run))
    rows = re.findall(r'aria-label="(all_\w+)"><rect .*? width="([0-9.]+)".*?<span class="soft">(.*?)</span>', text)
    assert rows == [("all_gather", "1000", "7 calls, 1.5 MB"), ("all_reduce", "20", "4 calls, 30 KB")]
    assert "take 2 ms of a step, in which they send 765 MB/s; a large all-reduce sends 900 MB/s." in text
    assert "<tr><td>to rank 1</td><td>80</td><td></td></tr>" in text
    alone = run_of(interval())
    assert "Communication by operation" not in page(alone, judge(alone))


def test_a_page_escapes_what_ranks_say(folder, tmp_path, monkeypatch, capsys):
    odd = info(1)
    odd.host = "<script>alert(1)</script>"
    write_rank(str(folder / "doctor" / "rank_1.jsonl"), odd, [interval(data_wait=20.1)])
    doctor(monkeypatch, capsys, folder, "--html", tmp_path / "page.html")
    assert "<script" not in (tmp_path / "page.html").read_text()


@pytest.mark.nightly
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
