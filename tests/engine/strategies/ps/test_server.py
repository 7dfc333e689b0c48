"""The two rules of the parameter server: when it steps, and who may go on."""

import pytest
import torch
from torch import nn
from torch.futures import Future

from polyphase.engine.strategies.ps.server import Server, Shard, _Push, settings_of


def server(staleness: int, workers: int = 3, lr: float = 1.0) -> tuple[Server, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    shard = Shard(optimizer, optimizer.param_groups[0]["params"])
    return Server([shard], list(range(workers)), staleness), optimizer


def push(at: Server, optimizer: torch.optim.Optimizer, rank: int, gradient: float, **how: bool) -> Future:
    what = _Push(rank, [torch.tensor([gradient])], [True], settings_of(optimizer), None)
    return at.push(0, what, **how)


def test_synchronous_workers_get_the_step_of_all_gradients_together():
    at, optimizer = server(staleness=0)
    pulls = []
    for rank, gradient in ((2, 3.0), (0, 6.0)):
        push(at, optimizer, rank, gradient)
        pulls.append(at.pull(0, rank))
    assert not any(each.done() for each in pulls)
    push(at, optimizer, 1, 0.0)
    pulls.append(at.pull(0, 1))
    assert [each.value()[0].item() for each in pulls] == [-3.0] * 3
    assert at.staleness() == {0: 3}


def test_a_worker_is_ahead_by_the_bound_at_most():
    at, optimizer = server(staleness=2)
    pulls = []
    for _ in range(4):
        push(at, optimizer, 0, 3.0)
        pulls.append(at.pull(0, 0))
    assert [each.done() for each in pulls] == [True, True, False, False]
    assert at.staleness() == {1: 1, 2: 1}
    push(at, optimizer, 1, 3.0)
    assert not pulls[2].done()  # rank 2 has pushed nothing yet
    push(at, optimizer, 2, 3.0)
    # Four gradients are three ahead of the slowest: both wait, as this worker would not have asked twice at once.
    assert not pulls[2].done()
    push(at, optimizer, 1, 3.0)
    push(at, optimizer, 2, 3.0)
    assert pulls[2].done()
    assert pulls[3].done()
    assert max(at.staleness()) == 2


def test_it_steps_by_the_mean_of_as_many_gradients_as_there_are_workers():
    at, optimizer = server(staleness=5)
    for gradient in (1.0, 2.0):
        push(at, optimizer, 0, gradient)
    assert at.pull(0, 0).value()[0].item() == 0.0
    push(at, optimizer, 1, 6.0)
    assert at.pull(0, 0).value()[0].item() == -3.0


def test_a_patient_worker_gets_the_step_that_its_gradient_is_in_unless_it_hurries():
    at, optimizer = server(staleness=5)
    push(at, optimizer, 0, 3.0)
    first = at.pull(0, 0, patient=True)
    push(at, optimizer, 1, 3.0)
    second = at.pull(0, 1, patient=True)
    assert not first.done()
    at.release_early(1, 1)
    assert second.value()[0].item() == 0.0
    at.release_early(2, 1)  # overtakes the push that it belongs to
    push(at, optimizer, 2, 3.0)
    assert first.value()[0].item() == -3.0
    push(at, optimizer, 2, 3.0)
    assert not at.pull(0, 2, patient=True).done()
    at.release_early(0, 2)
    push(at, optimizer, 0, 3.0)
    assert at.pull(0, 0, patient=True).value()[0].item() == -3.0


def test_parameters_that_are_sent_do_not_change():
    at, optimizer = server(staleness=5, workers=1)
    push(at, optimizer, 0, 1.0)
    first = at.pull(0, 0).value()[0]
    push(at, optimizer, 0, 1.0)
    assert (first.item(), at.pull(0, 0).value()[0].item()) == (-1.0, -2.0)


def test_what_is_left_over_is_applied_when_all_have_stopped():
    at, optimizer = server(staleness=5)
    push(at, optimizer, 0, 4.0)
    assert at.refresh(0)[0].item() == -4.0
    assert at.refresh(0)[0].item() == -4.0


def test_settings_come_with_the_gradients():
    at, optimizer = server(staleness=0, workers=1)
    optimizer.param_groups[0]["lr"] = 10.0
    push(at, optimizer, 0, 1.0)
    assert at.pull(0, 0).value()[0].item() == -10.0


def test_a_step_that_is_held_comes_once_with_the_first_pull_and_its_scale():
    at, optimizer = server(staleness=0, workers=2)
    norms = [push(at, optimizer, rank, gradient, holds=True) for rank, gradient in ((0, 2.0), (1, 6.0))]
    assert [norm.value() for norm in norms] == [16.0, 16.0]
    assert [at.pull(0, rank, 0.5).value()[0].item() for rank in range(2)] == [-2.0, -2.0]


@pytest.mark.parametrize("holds", [False, True])
def test_a_lost_rank_is_not_waited_for_and_its_gradients_are_dropped(holds):
    at, optimizer = server(staleness=0)
    push(at, optimizer, 2, 100.0, holds=holds)
    push(at, optimizer, 0, 2.0, holds=holds)
    norm = push(at, optimizer, 1, 4.0, holds=holds) if holds else None
    at.lose([2])
    if norm is None:
        push(at, optimizer, 1, 4.0)
    # A step that all took part in stays one of all.
    assert at.pull(0, 0).value()[0].item() == pytest.approx(-106 / 3 if holds else -3.0)
    assert norm is None or norm.value() == pytest.approx((106 / 3) ** 2)
    for call in (lambda: push(at, optimizer, 2, 1.0), lambda: at.pull(0, 2)):
        with pytest.raises(RuntimeError, match="rank 2 was taken for lost"):
            call()


def test_those_who_wait_for_a_lost_rank_go_on():
    at, optimizer = server(staleness=0)
    waiting = []
    for rank in (0, 2):
        push(at, optimizer, rank, 3.0)
        waiting.append(at.pull(0, rank))
    at.lose([2])
    assert not waiting[0].done()
    push(at, optimizer, 1, 5.0)
    assert waiting[0].value()[0].item() == -4.0
    assert not waiting[1].done()


def test_held_bytes_are_those_of_parameters_and_state():
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.AdamW([parameter])
    at = Server([Shard(optimizer, [parameter])], [0], staleness=0)
    assert at.held_bytes == 40
    at.push(0, _Push(0, [torch.ones(10)], [True], settings_of(optimizer), None))
    assert at.held_bytes == 3 * 40 + 4
