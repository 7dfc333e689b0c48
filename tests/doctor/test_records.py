"""The files of the ranks: what is written is read, they stay small, and no second is lost."""

import dataclasses
import json
import resource
from contextlib import contextmanager

import pytest

from polyphase.doctor import MAX_INTERVALS, Interval, compact, read_run, slowest_hooks, write_rank
from polyphase.doctor.command import main
from polyphase.doctor.records import Notes

from .runs import info, interval


def test_what_is_written_is_read(tmp_path):
    noted = [interval(10, 10), dataclasses.replace(interval(20, 10), by_hook={"A.setup": 0.5}, padding=0.25)]
    for rank in range(2):
        write_rank(str(tmp_path / f"rank_{rank}.jsonl"), info(rank), noted)
    run = read_run(str(tmp_path))
    assert run.ranks == {0: info(0), 1: info(1)}
    for rank in range(2):
        for ours, theirs in zip(run.intervals[rank], noted, strict=True):
            assert ours.seconds == pytest.approx(theirs.seconds, abs=1e-6)
            assert vars(ours).keys() == vars(theirs).keys()
            assert (ours.step, ours.by_hook, ours.padding, ours.num_saves) == (
                theirs.step, theirs.by_hook, theirs.padding, theirs.num_saves,
            )  # fmt: skip
    assert run.missing == []


@contextmanager
def a_full_disk(room_bytes: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room_bytes", [10, 2_000])
def test_a_full_disk_ends_the_file_and_not_the_run(tmp_path, room_bytes):
    def noted() -> Notes:
        notes = Notes(str(tmp_path), info(0))
        for step in range(10):
            notes.add(interval(step))
        notes.close()
        return notes

    with a_full_disk(room_bytes), pytest.warns(UserWarning, match=r"rank_0\.jsonl is not written .*: File too large"):
        notes = noted()
    assert len(notes.intervals) == 10


def test_the_folder_of_a_run_is_enough(tmp_path):
    (tmp_path / "doctor").mkdir()
    write_rank(str(tmp_path / "doctor" / "rank_0.jsonl"), info(0), [])
    assert read_run(str(tmp_path)).missing == [1]


def test_a_line_that_was_cut_by_the_end_of_its_rank_is_left_out(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    write_rank(str(path), info(0), [interval()])
    path.write_text(path.read_text() + '{"kind":"inter')
    assert len(read_run(str(tmp_path)).intervals[0]) == 1


def test_errors_say_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"callbacks=\[Doctor\(\)\]"):
        read_run(str(tmp_path))
    path = tmp_path / "rank_0.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="does not begin with what a rank says of itself"):
        read_run(str(tmp_path))
    path.write_text('{"kind": "rank", "schema": 2}\n')
    with pytest.raises(ValueError, match="is of schema 2, and this version reads 1"):
        read_run(str(tmp_path))
    path.write_text("no JSON\n{}\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is no JSON"):
        read_run(str(tmp_path))


@pytest.mark.parametrize("number", [4, 7])
def test_joining_loses_no_second_and_no_step(number):
    warmup = dataclasses.replace(interval(3, 3), is_warmup=True)
    noted = [warmup, *(interval(10 * i, 10, data_wait=i) for i in range(number))]
    joined = compact(noted, number)
    assert len(joined) == 1 + -(-number // 2)
    assert joined[0] == warmup
    for total in (lambda each: each.wall_s, lambda each: each.num_steps, lambda each: each.seconds["data_wait"]):
        assert sum(map(total, joined)) == pytest.approx(sum(map(total, noted)))
    assert joined[-1].step == noted[-1].step


def test_a_long_run_keeps_as_many_intervals_as_a_short_one_and_loses_no_step(tmp_path):
    notes = Notes(str(tmp_path), info())
    for number in range(4 * MAX_INTERVALS):
        notes.add(interval(50 * number, 50))
        assert len(notes.intervals) <= MAX_INTERVALS
    notes.close()
    assert sum(each.num_steps for each in notes.intervals) == 50 * 4 * MAX_INTERVALS
    assert len((tmp_path / "rank_0.jsonl").read_text().splitlines()) <= MAX_INTERVALS + 1


def test_means_are_over_the_looks_however_intervals_are_joined():
    """Three intervals of 1, 1 and 6 looks, joined from either end, and after a rank has joined two of them."""
    noted = [
        dataclasses.replace(
            interval(), num_looks=looks, clock_share=share, power_w=100.0 * share, num_padding_looks=looks,
            padding=share, compression={"compress_s": share, "num_looks": float(looks)},
        )
        for looks, share in ((1, 0.2), (1, 0.4), (6, 0.9))
    ]  # fmt: skip
    first, second, third = noted
    nothing = interval()
    for joined in (first.joined(second).joined(third), first.joined(nothing).joined(second.joined(third))):
        assert joined.clock_share == joined.padding == pytest.approx(0.75)
        assert joined.power_w == pytest.approx(75.0)
        assert joined.compression == {"compress_s": pytest.approx(0.75), "num_looks": 8.0}
        assert joined.num_looks == joined.num_padding_looks == 8
    assert nothing.joined(interval()).clock_share is None


def test_a_line_is_small_and_a_file_is_bounded():
    hooks = {f"ACallbackWithALongName{i}.on_train_batch_end": 0.123456789 for i in range(50)}
    full = dataclasses.replace(
        interval(10**7, 50), by_hook=slowest_hooks(hooks), rss_mb=1e5, device_mb=1e5, padding=0.1
    )
    assert len(full.line()) < 2000
    assert len(full.line()) * MAX_INTERVALS < 1_100_000


def test_the_slowest_hooks_are_kept_and_the_others_added_up():
    hooks = slowest_hooks({f"A{i}.setup": float(i) for i in range(1, 21)})
    assert list(hooks) == [*(f"A{i}.setup" for i in range(20, 12, -1)), "others"]
    assert sum(hooks.values()) == sum(range(1, 21))
    assert slowest_hooks(hooks, {"A1.setup": 300.0})["A1.setup"] == 300.0


def test_a_line_is_json_with_the_fields_of_an_interval():
    record = json.loads(interval().line())
    assert record.pop("kind") == "interval"
    assert record.keys() <= {field.name for field in dataclasses.fields(Interval)}


def test_a_schema_is_shown_as_text(tmp_path, capsys):
    (tmp_path / "rank_0.jsonl").write_text('{"kind": "rank", "schema": "\\u001b]0;PWNED\\u0007"}\n')
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "is of schema '\\x1b]0;PWNED" in said
    assert "\x1b" not in said
