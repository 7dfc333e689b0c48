"""Saves in the background: the state of their step, one at a time, and a failed one costs nothing but itself."""

import os
import threading
from cProfile import Profile
from pathlib import Path

import pytest
import torch

from polyphase.engine.checkpoint import NAMES, AsyncCheckpointer, CheckpointError, find, load_checkpoint
from polyphase.engine.checkpoint.manifest import MANIFEST

from ..loop.costs import counted_calls
from .sample_checkpoints import about, content, is_whole, rank_state, same, save


def start(saver: AsyncCheckpointer, path: Path, step: int = 1, **checkpoint) -> None:
    """Begins a save in the background."""
    saver.save({**content(step), **checkpoint}, str(path), about=about(step), of_rank=rank_state(step))


def saving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "polyphase-save"]


@pytest.fixture
def nowhere(tmp_path):
    """A path at which nothing can be saved, for a file is in the way."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "x"


def overwrite(checkpoint: dict) -> None:
    """What the next steps do to the state, in place."""
    for value in checkpoint.values() if isinstance(checkpoint, dict) else checkpoint:
        if isinstance(value, torch.Tensor):
            value.fill_(-1)
        elif isinstance(value, (dict, list)):
            overwrite(value)
    if isinstance(checkpoint, dict):
        checkpoint["surprise"] = True


def test_the_state_is_that_of_its_step_whatever_happens_next(tmp_path):
    saver = AsyncCheckpointer()
    for step in range(1, 9):
        checkpoint, of_rank = content(step), rank_state(step)
        saver.save(checkpoint, str(tmp_path / f"{step}"), about=about(step), of_rank=of_rank)
        overwrite(checkpoint)
        overwrite(of_rank)
    saver.finish()
    for step in range(1, 9):
        assert is_whole(str(tmp_path / f"{step}"), step)


def test_weights_that_were_tied_are_saved_as_they_are(tmp_path):
    saver, weight, other = AsyncCheckpointer(), torch.zeros(2), torch.ones(2)
    states = [
        {"a": weight, "b": weight},
        {"a": weight, "b": other},
        {"a": other, "b": other},
        {"a": weight, "b": other},
    ]
    for step, state in enumerate(states):
        start(saver, tmp_path / f"{step}", step, state_dict=state)
    saver.finish()
    for step, state in enumerate(states):
        assert same(load_checkpoint(tmp_path / f"{step}")["state_dict"], state)


def test_a_save_of_many_small_tensors_takes_fewer_calls_than_a_plain_one(tmp_path):
    state = {str(number): torch.zeros(2) for number in range(500)}
    saver, calls = AsyncCheckpointer(), []
    start(saver, tmp_path / "memory is allocated", state_dict=state)
    for save_it in (
        lambda: torch.save({**content(1), "state_dict": state}, tmp_path / "plain"),
        lambda: start(saver, tmp_path / "in background", state_dict=state),  # what the next step waits for
        lambda: save(tmp_path / "in foreground", saver=saver, state_dict=state),  # the rest is in other threads
    ):
        saver.finish()
        with Profile(subcalls=False, builtins=False) as profile:
            save_it()
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    saver.finish()
    assert max(calls[1:]) < calls[0], calls


def test_each_small_tensor_takes_few_calls_of_the_writer(tmp_path):
    """While it calls functions of Python, the steps wait: those of its own thread, and of the two that write files."""
    totals = []
    for number in (100, 200):
        names = [f"w{index}" for index in range(number)]
        weights = {name: torch.zeros(2) for name in names}
        moments = {name: {"step": torch.zeros(()), "exp_avg": torch.zeros(2)} for name in names}
        optimizer = {"state": moments, "param_groups": [{"params": names}]}
        saver = AsyncCheckpointer()
        start(saver, tmp_path / f"{number}", state_dict=weights, optimizer_states=[optimizer])
        saver.finish()
        with counted_calls() as calls:
            start(saver, tmp_path / f"{number} again", state_dict=weights, optimizer_states=[optimizer])
            saver.finish()
        totals.append([of_thread.total() for of_thread in calls])
    of_trainer, of_writer = ((more - few) / 300 for few, more in zip(*totals, strict=True))
    assert of_trainer <= 12, "a copy, a place in the rest, and its pickle"
    assert of_writer <= 9, "its place in the index, which is read again and checked"


def test_the_state_of_random_generators_takes_few_calls(tmp_path):
    saver, calls = AsyncCheckpointer(), []
    for number in range(2):
        saver.finish()
        with Profile(subcalls=False, builtins=False) as profile:
            saver.save(content(1), str(tmp_path / f"{number}"), about=about(1), of_rank=rank_state(1))
            saver.finish()
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] < 25_000, "numbers of Python's and NumPy's generators, three of torch's for each"


def test_tensors_that_come_go_and_grow_are_saved_as_they_are(tmp_path):
    saver, weight = AsyncCheckpointer(), torch.zeros(2)
    for step, size in enumerate((2, 5, 1, 5)):
        weight.resize_(size).fill_(step)
        state = {"w": weight, f"only of {step}": torch.full((3,), step)}
        start(saver, tmp_path / f"{step}", step, state_dict=state)
        weight.fill_(-1)
    saver.finish()
    for step, size in enumerate((2, 5, 1, 5)):
        found = saver.load(str(tmp_path / f"{step}"))["state_dict"]
        expected = {"w": torch.full((size,), float(step)), f"only of {step}": torch.full((3,), step)}
        assert same(found, expected)


def test_one_tensor_under_two_names_is_under_both(tmp_path):
    weight = torch.arange(4.0)
    path = save(tmp_path / "x", state_dict={"a": weight, "b": weight, "view": weight[1:3]})
    expected = {"a": torch.arange(4.0), "b": torch.arange(4.0), "view": torch.tensor([1.0, 2.0])}
    assert same(AsyncCheckpointer().load(path)["state_dict"], expected)


def test_there_is_one_save_at_a_time(tmp_path):
    saver = AsyncCheckpointer()
    for step in range(1, 6):
        start(saver, tmp_path / f"{step}", step)
        assert len(saving()) <= 1
        assert [manifest.step for _, manifest in find(tmp_path)][-1:] == [1][: step - 1]
    saver.finish()
    assert not saving()
    assert [manifest.step for _, manifest in find(tmp_path)] == [5, 4, 3, 2, 1]
    assert saver.newest == str(tmp_path / "5")


def test_the_link_is_set_when_the_checkpoint_is_there(tmp_path):
    saver = AsyncCheckpointer()
    for step in (1, 2):
        saver.save(content(step), str(tmp_path / f"{step}"), about=about(step), of_rank=rank_state(step), link="last")
        saver.finish()
        assert os.readlink(tmp_path / "last") == f"{step}"


def test_in_the_foreground_it_is_there_at_once(tmp_path):
    assert is_whole(save(tmp_path / "x", 3), 3)


def test_urls(tmp_path):
    folder = f"memory://{tmp_path.name}"
    for step in (1, 2):
        save(f"{folder}/x", step)
        assert is_whole(f"{folder}/x", step)
    assert [manifest.step for _, manifest in find(folder)] == [2]


# --- saves that fail


def test_a_failed_save_warns_and_training_goes_on(tmp_path, nowhere):
    saver = AsyncCheckpointer()
    start(saver, nowhere)
    with pytest.warns(RuntimeWarning, match=r"x could not be saved: .*There is no checkpoint yet; training continues"):
        saver.finish()
    saver.report()  # it is said once
    start(saver, tmp_path / "1")
    start(saver, nowhere)
    with pytest.warns(
        RuntimeWarning, match=r"could not be saved: .* The newest checkpoint is \S+/1; training continues"
    ):
        start(saver, tmp_path / "2", 2)
    saver.finish()
    assert is_whole(str(tmp_path / "1"), 1)
    assert is_whole(str(tmp_path / "2"), 2)
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "file"]


def test_in_the_foreground_it_raises(nowhere):
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        save(nowhere)


def test_what_was_to_go_stays_where_its_successor_failed(tmp_path, nowhere):
    saver = AsyncCheckpointer()
    start(saver, tmp_path / "1")
    saver.finish()
    start(saver, nowhere)
    saver.remove(str(tmp_path / "1"))
    with pytest.warns(RuntimeWarning, match="could not be saved"):
        saver.finish()
    assert is_whole(str(tmp_path / "1"), 1)


def test_what_was_to_go_goes_when_its_successor_is_there(tmp_path):
    saver = AsyncCheckpointer()
    for step in (1, 2):
        start(saver, tmp_path / f"{step}", step)
    saver.remove(str(tmp_path / "1"))
    saver.remove(str(tmp_path / "2"))  # under this name there is a new one now
    saver.finish()
    assert os.listdir(tmp_path) == ["2"]
    saver.remove(str(tmp_path / "2"))  # nothing is in flight
    assert os.listdir(tmp_path) == []


# --- opening


def test_parts_can_be_left_out(tmp_path):
    found = AsyncCheckpointer().load(save(tmp_path / "x", 3), leave_out=("optimizer_states", "callbacks", "absent"))
    assert set(content(3)) - set(found) == {"optimizer_states", "callbacks"}
    assert same(found["state_dict"], content(3)["state_dict"])


def test_a_file_of_lightnings_form_comes_out_of_load_checkpoint(tmp_path):
    found = load_checkpoint(Path(save(tmp_path / "x", 3)))
    (state,) = found["optimizer_states"]
    assert found[NAMES] == [["net.bias", "net.weight"]]
    assert state["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert list(state["state"]) == [1]


class Custom:
    """What only unpickling could bring back."""


def test_objects_are_warned_of_when_saved_and_refused_when_opened(tmp_path):
    saver = AsyncCheckpointer()
    with pytest.warns(UserWarning, match=r"no plain values, so it will open with weights_only=False only.*Custom\.$"):
        path = save(tmp_path / "x", saver=saver, mine=Custom())
    save(tmp_path / "y", saver=saver, mine=Custom())  # said once
    with pytest.raises(CheckpointError, match=r"x holds objects .*Custom\. If you trust it, pass weights_only=False"):
        AsyncCheckpointer().load(path)
    assert isinstance(AsyncCheckpointer().load(path, weights_only=False)["mine"], Custom)
    with torch.serialization.safe_globals([Custom]):
        assert isinstance(AsyncCheckpointer().load(path)["mine"], Custom)


def test_a_path_that_is_none_says_so(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=f"folder is no checkpoint: it has no {MANIFEST}, so it was never"):
        AsyncCheckpointer().load(str(tmp_path / "folder"))


def test_a_missing_path_names_the_closest(tmp_path):
    save(tmp_path / "step=100")
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at \S+/step=10\. Did you mean step=100\?"):
        AsyncCheckpointer().load(str(tmp_path / "step=10"))


def test_it_waits_for_what_is_on_its_way(tmp_path):
    saver = AsyncCheckpointer()
    start(saver, tmp_path / "1")
    assert saver.load(str(tmp_path / "1"))["global_step"] == 1


def test_alone_all_agree(tmp_path):
    saver = AsyncCheckpointer()
    assert saver.gather("mine") == ["mine"]
    assert saver.agree(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        saver.agree(lambda: 1 // 0)
