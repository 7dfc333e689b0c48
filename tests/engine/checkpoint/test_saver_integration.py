"""Two ranks save and open together: what is sharded, what only a rank knows, and what fails on one of them."""

import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError, find
from polyphase.engine.distributed.object_group import ObjectGroup
from tests.distributed import run_ranks

from .sample_checkpoints import LARGE, about, content, rank_state, same, save


def net() -> nn.Module:
    """Layers whose rows two ranks can't share evenly, and one with fewer rows than ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    groups = [{"lr": 1e-3, "params": [name for name, _ in model.named_parameters()]}]
    return {"state_dict": model.state_dict(), "optimizer_states": [{"state": state, "param_groups": groups}]}


def whole(tree: Any) -> Any:
    """With full tensors in place of shards."""
    if isinstance(tree, DTensor):
        return tree.full_tensor()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(each) for each in tree] if isinstance(tree, list) else tree


def template_of(model: nn.Module) -> Callable[[str], Tensor | None]:
    parameters = dict(model.named_parameters())

    def template(key: str) -> Tensor | None:
        return next((parameter for name, parameter in parameters.items() if f".{name}" in key), None)

    return template


def of_rank(rank: int) -> dict[str, Any]:
    """A number, a small tensor (of a large buffer) and a large one, of which only this rank knows."""
    return {
        **rank_state(1),
        "seed": rank,
        "small": torch.full((LARGE,), rank)[:2],
        "residual": torch.full((LARGE,), 0.5 + rank),
    }


def save_spread(rank: int, folder: Path) -> None:
    """Each rank trains one of two layers; of the other it has neither the weights nor the optimizer's state."""
    model = net()
    whole_model = checkpoint_of(model, trained(model))
    for number, layer in enumerate((model[0], model[2])):
        if number != rank:
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(parameter.to("meta")))
    mine = checkpoint_of(model, torch.optim.AdamW(model.parameters()))
    names = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    states = whole_model["optimizer_states"][0]["state"]
    mine["optimizer_states"][0]["state"] = {name: states[name] for name in names}
    saver = AsyncCheckpointer()
    spread = frozenset({"optimizer_states"})
    saver.save(
        {**content(1, 2), **mine}, str(folder / "spread"), about=about(1, 2), of_rank=rank_state(1), spread=spread
    )
    saver.finish()
    found = saver.load(str(folder / "spread"))
    assert same(found["state_dict"], whole_model["state_dict"]), "all is there for those that want all"
    assert same(found["optimizer_states"], whole_model["optimizer_states"])
    found = saver.load(str(folder / "spread"), template_of(model))
    assert {key for key, tensor in found["state_dict"].items() if not tensor.is_meta} == set(names)
    for name, state in found["optimizer_states"][0]["state"].items():
        assert all(value.is_meta for value in state.values()) == (name not in names), "what is another's is not read"


def test_ranks_with_different_parameters_save_one_whole(tmp_path):
    run_ranks(save_spread, 2, tmp_path, timeout_s=60, start_method="fork")


def save_sharded(rank: int, folder: Path) -> None:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = trained(model)
    state, saver = checkpoint_of(model, optimizer), AsyncCheckpointer()
    expected = whole(state)
    for name in ("background", "foreground"):
        saver.save(
            {**content(1, 2), **state},
            str(folder / name),
            about=about(1, 2),
            of_rank=of_rank(rank),
            in_background=name == "background",
        )
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(-1)  # what was saved was copied
    if rank == 0:
        torch.save(expected, folder / "expected.pt")


def open_sharded(rank: int, path: Path, expected: Path, num_saved: int) -> None:
    model = net()
    fully_shard(model[0])
    fully_shard(model)
    found = AsyncCheckpointer().load(str(path), template_of(model), layout={"shard": 2})
    weights = found["state_dict"]
    assert all(isinstance(weights[name], DTensor) for name in weights)
    assert {name: w.to_local().shape for name, w in weights.items()} == {
        name: w.to_local().shape for name, w in model.state_dict().items()
    }
    assert same(whole({key: found[key] for key in ("state_dict", "optimizer_states")}), torch.load(expected))
    ranks = found["polyphase"]["ranks"]
    assert len(ranks) == num_saved
    if num_saved == 2:
        assert same(ranks[rank], of_rank(rank))
        assert ranks[1 - rank]["residual"] is None  # only one's own is read


def test_shards_open_whole_in_one_process_and_as_shards_again(tmp_path):
    run_ranks(save_sharded, 2, tmp_path, start_method="fork")
    for name in ("background", "foreground"):
        found = AsyncCheckpointer().load(str(tmp_path / name))
        expected = torch.load(tmp_path / "expected.pt")
        assert same({key: found[key] for key in expected}, expected)
        assert same(found["polyphase"]["ranks"], [of_rank(0), of_rank(1)])
        assert same(found["callbacks"], content(1)["callbacks"])
        assert (tmp_path / name / "ranks.pt").stat().st_size < LARGE
    run_ranks(open_sharded, 2, tmp_path / "background", tmp_path / "expected.pt", 2, start_method="fork")
    assert sorted(path.name for path in (tmp_path / "background").iterdir()) == [
        *("MANIFEST.json", "ranks.pt", "rest.pt"),
        *(f"shard-{rank}-{number}.safetensors" for rank in range(2) for number in range(2)),
        "tensors.json",
    ]


def test_what_one_process_saved_opens_as_shards(tmp_path):
    model = net()
    state = checkpoint_of(model, trained(model))
    save(tmp_path / "x", **state)
    torch.save(state, tmp_path / "expected.pt")
    run_ranks(open_sharded, 2, tmp_path / "x", tmp_path / "expected.pt", 1, start_method="fork")


class Apart(ObjectGroup):
    """Ranks that torch can't have write together, as those of a parameter server: rank 0 writes it all."""

    @property
    def process_group(self) -> None:
        """None."""


def fail_on(rank: int, folder: Path, failing: int, ranks: ObjectGroup | None) -> None:
    rank_zero_only.rank = rank  # as in ranks that a launcher has started
    saver = AsyncCheckpointer()
    saver.ranks = ranks
    saver.save(content(1, 2), str(folder / "1"), about=about(1, 2), of_rank=rank_state(1))
    saver.finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    own = {**rank_state(2), "residual": torch.zeros(LARGE)}
    with pytest.raises(
        CheckpointError, match=rf"^rank {failing} could not write: .* File too large: '\S+/shard-{failing}-0\.safe"
    ):
        saver.save(content(2, 2), str(folder / "2"), about=about(2, 2), of_rank=own, in_background=False)
    saver.save(content(2, 2), str(folder / "2"), about=about(2, 2), of_rank=own)
    if rank == 0:  # Lightning warns on rank 0 only
        says = rf"2 could not be saved: rank {failing} could not write: .* The newest .*/1;"
        with pytest.warns(RuntimeWarning, match=says):
            saver.finish()
    saver.finish()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saver.agree(lambda: os.listdir(folder)) == ["1"]
    saver.save(content(3, 2), str(folder / "3"), about=about(3, 2), of_rank=rank_state(3), in_background=False)
    assert [manifest.step for _, manifest in find(folder)] == [3, 1]


@pytest.mark.parametrize(("failing", "ranks"), [(1, None), (0, Apart())])
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(failing, ranks, tmp_path):
    run_ranks(fail_on, 2, tmp_path, failing, ranks, start_method="fork")


def refuse_damage(rank: int, folder: Path) -> None:
    saver = AsyncCheckpointer()
    for path, says in (
        (folder / "x", r"x is damaged: rest\.pt is missing; shard-0-0.safetensors has .*\.$"),
        (folder / "y", r"There is no checkpoint at \S+/y\."),
    ):
        with pytest.raises(CheckpointError, match=says):
            saver.load(str(path))
    assert saver.gather(rank) == [0, 1]
    with pytest.raises(ZeroDivisionError):
        saver.agree(lambda: 1 // 0)


def test_what_is_damaged_is_refused_by_all_with_the_same_words(tmp_path):
    path = Path(save(tmp_path / "x"))
    (path / "rest.pt").unlink()
    os.truncate(path / "shard-0-0.safetensors", 100)
    run_ranks(refuse_damage, 2, tmp_path, start_method="fork")


def meet_amid_a_save(rank: int, folder: Path) -> None:
    saver = AsyncCheckpointer()
    for name, meet in (("x", lambda: saver.gather(rank)), ("y", lambda: saver.agree(lambda: [0, 1]))):
        large = {"state_dict": {"large": torch.zeros(16_000_000)}}
        saver.save(large, str(folder / name), about=about(1, 2), of_rank={})
        assert meet() == [0, 1]
        assert "polyphase-save" not in [thread.name for thread in threading.enumerate()]


def test_ranks_meet_when_the_save_in_flight_is_done(tmp_path):
    """As its threads meet too, over the same connections."""
    run_ranks(meet_amid_a_save, 2, tmp_path, start_method="fork")


def save_among_collectives(rank: int, folder: Path) -> None:
    saver, total = AsyncCheckpointer(), torch.zeros(1)
    for step in range(1, 6):
        saver.save(content(step, 2), str(folder / f"{step}"), about=about(step, 2), of_rank=rank_state(step))
        for _ in range(50):  # training's own collectives, meanwhile
            dist.all_reduce(total.fill_(rank + 1.0))
            assert total.item() == 3
    saver.finish()


def test_saves_do_not_meet_the_collectives_of_training(tmp_path):
    run_ranks(save_among_collectives, 2, tmp_path, start_method="fork")
    assert [manifest.step for _, manifest in find(tmp_path)] == [5, 4, 3, 2, 1]
    found = AsyncCheckpointer().load(str(tmp_path / "5"))
    assert [rank["seed"] for rank in found["polyphase"]["ranks"]] == [5, 5]
