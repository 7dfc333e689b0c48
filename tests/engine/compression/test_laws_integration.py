"""What every comm hook must do, by what it gives and what it keeps: two and three ranks, no training."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from polyphase.engine.compression import (
    COMM_HOOKS,
    AllReduceHook,
    Bucket,
    CommHook,
    CountingGroup,
    ParamSlice,
    make_comm_hook,
)
from polyphase.engine.compression.counting_group import busy_s, seconds_between
from polyphase.engine.compression.feedback import ErrorFeedbackHook
from tests.distributed import run_ranks

MEMBERS = (
    ParamSlice("a", (64, 48)),
    ParamSlice("b", (48,)),
    ParamSlice("c", (32, 64)),
    ParamSlice("d", (7,)),
    ParamSlice("e", (64, 48)),
)
STARTS = [0, *itertools.accumulate(member.numel for member in MEMBERS)][:-1]
SIZE = sum(member.numel for member in MEMBERS)
STEPS = 8

CHUNKS = "topk:0.05,chunk=1000,bits=2"  # no parameter is a multiple of a chunk
LOSSY = ["int8:64,feedback=true", "powersgd:8,start=0", "topk:0.05", CHUNKS, "sign"]
ALL = ["none", "bf16", "fp16", "int8:64", *LOSSY, "powersgd:8,start=0+fp16", "topk:0.05+bf16", "topk:0.05,bits=4"]


def hook_of(flag: str) -> CommHook:
    hook = make_comm_hook(flag) or AllReduceHook()
    hook.wire = CountingGroup()
    return hook


def gradients(step: int, rank: int) -> Tensor:
    """A direction that all share, and noise."""
    shared = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
    return shared + torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([state[member.name] for member in MEMBERS])


def everywhere(tensor: Tensor) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors


def run_steps(flag: str, rank: int) -> tuple[CommHook, Tensor, Tensor]:
    """The hook, the sum of its averages, and the sum of all ranks' gradients."""
    hook = hook_of(flag)
    given, averages = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(STEPS):
        flat = gradients(step, rank)
        given += flat
        hook.run(Bucket(0, flat, MEMBERS))
        hook.on_step_end()
        averages += flat
        for theirs in everywhere(flat):
            assert torch.equal(theirs, flat), f"{flag}: the ranks have different averages"
    dist.all_reduce(given)
    return hook, averages, given


def check_laws(rank: int) -> None:
    """What is not sent is kept."""
    size = dist.get_world_size()
    for flag in ALL:
        hook, averages, given = run_steps(flag, rank)
        state = hook.state_dict()
        kept = whole(state["residuals"]) if "residuals" in state else torch.zeros(SIZE)
        unsent = torch.stack(everywhere(kept)).sum(0)
        error = (averages * size + unsent - given).abs().max().item()
        # Everything that came in was sent or is kept, to rounding; what 16 bit rounds off in a sum is not kept.
        in_16_bit = flag.endswith("16")
        in_8_bit = flag == "int8:64"  # on average it is zero
        most = 0.5 if flag == "bf16" or in_8_bit else 0.1 if in_16_bit else 2e-4
        assert error < most, f"{flag}: {error}"
        assert hook.num_calls == STEPS
        # And more of it is sent than kept, though each step sends little.
        distance = (averages - given / size).norm() / (given / size).norm()
        assert distance < 0.6, f"{flag}: {distance}"
        if size == 2 and flag in LOSSY:
            name = flag.removesuffix(",feedback=true")
            _, without, _ = run_steps(f"{name}{',' if ':' in name else ':'}feedback=false", rank)
            assert (without - given / size).norm() >= 0.9 * (averages - given / size).norm()


def predicted_bytes(flag: str, size: int) -> float:
    """By the formulas in the files of the methods."""
    ring = 2 * (size - 1) / size
    if flag == "topk:0.05":
        return (size - 1) * (8 * sum(round(0.05 * numel) for numel in (64 * 48, 32 * 64, 64 * 48)) + 4 * (48 + 7))
    if flag == CHUNKS:
        # Indices of 10 bits. 3072 values are 3 chunks and 72 values, 2048 are 2 and 48: 50 of a chunk, else 4 and 2.
        num_sent, num_chunks = 2 * (3 * 50 + 4) + 2 * 50 + 2, 2 * 4 + 3
        return (size - 1) * (num_sent * (2 + 10) / 8 + 4 * num_chunks + 4 * (48 + 7))
    if flag == "sign":
        return (size - 1) * (SIZE / 8 + 2 * (64 + 32 + 64) + 2 * (48 + 7))
    if flag.startswith("int8:64"):
        whole_blocks = sum(-(-member.numel // (size * 64)) * size * 64 for member in MEMBERS)
        return ring * whole_blocks * (1 + 4 / 64)
    if flag == "powersgd:8,start=0":
        return ring * 4 * (48 + 7 + 8 * (64 + 48 + 32 + 64 + 64 + 48))
    return ring * SIZE * {"none": 4, "bf16": 2, "fp16": 2}[flag]


def check_bytes(rank: int) -> None:
    """Bytes are those of the formula; one rank alone sends none."""
    for flag in ["none", "bf16", "fp16", *LOSSY]:
        hook, _, _ = run_steps(flag, rank)
        assert hook.num_bytes == pytest.approx(STEPS * predicted_bytes(flag, dist.get_world_size()), rel=0.05), flag


def check_exact_at_full_rate(rank: int) -> None:
    """Nothing is lost where all is sent."""
    for flag in ("topk:1", "topk:1,chunk=1000", "powersgd:64,start=0,min_ratio=0.001"):
        _, averages, given = run_steps(flag, rank)
        torch.testing.assert_close(averages, given / dist.get_world_size(), atol=2e-4, rtol=1e-4)


def check_a_zero_gradient(rank: int) -> None:
    """Zeros stay zeros."""
    for flag in ALL:
        hook = hook_of(flag)
        for _ in range(3):
            flat = torch.zeros(SIZE)
            hook.run(Bucket(0, flat, MEMBERS))
            hook.on_step_end()
            assert torch.count_nonzero(flat) == 0, flag


def check_other_buckets(rank: int) -> None:
    """Residuals follow their parameters into other buckets, as DDP builds them after its first step."""
    for flag in LOSSY:
        hook = hook_of(flag)
        flat = gradients(0, rank)
        hook.run(Bucket(0, flat, MEMBERS))
        hook.on_step_end()
        before = {name: value.clone() for name, value in hook.state_dict()["residuals"].items()}
        zeros = torch.zeros(SIZE)
        first, second = MEMBERS[3:], MEMBERS[:3][::-1]
        num_first = sum(member.numel for member in first)
        sent = [zeros[:num_first], zeros[num_first:]]
        hook.run(Bucket(0, sent[0], first))
        hook.run(Bucket(1, sent[1], second))
        hook.on_step_end()
        after = hook.state_dict()["residuals"]
        averages = dict(zip(first, sent[0].split([m.numel for m in first]), strict=True))
        averages |= dict(zip(second, sent[1].split([m.numel for m in second]), strict=True))
        for member in MEMBERS:
            lost = before[member.name] - after[member.name]
            dist.all_reduce(lost)
            torch.testing.assert_close(lost / dist.get_world_size(), averages[member], atol=1e-4, rtol=1e-4)


def check_buckets_of_little(rank: int) -> None:
    """Of vectors alone, or of shards of which a rank has none."""
    size = dist.get_world_size()
    for flag, members in itertools.product(
        ALL, [(ParamSlice("a", (7,)), ParamSlice("b", ())), (ParamSlice("a", (0, 8)),)]
    ):
        hook = hook_of(flag)
        flat = torch.full((sum(member.numel for member in members),), rank + 1.0)
        hook.run(Bucket(0, flat, members))
        hook.on_step_end()
        # As they are, but for what int8 rounds: one in 127.
        torch.testing.assert_close(flat, torch.full_like(flat, (size + 1) / 2), atol=0.05, rtol=0, msg=flag)


def check_dtypes(rank: int) -> None:
    """Gradients of any real dtype, also with sums that 16 bit can't hold."""
    for flag in ALL:
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            hook = hook_of(flag)
            flat = (gradients(0, rank) * 100).to(dtype)
            exact = torch.stack(everywhere(flat.double())).mean(0)
            hook.run(Bucket(0, flat, MEMBERS))
            hook.raise_if_bad()
            assert flat.dtype == dtype
            assert flat.isfinite().all()
            cosine = torch.nn.functional.cosine_similarity(flat.double(), exact, dim=0)
            assert cosine > 0.3, (flag, dtype, cosine)


class Half(ErrorFeedbackHook):
    """The example of docs/compression.md."""

    name = "half"
    description = "the first half of each bucket"

    def exchange(self, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        half = total[: total.numel() // 2]
        bucket.gradients.zero_()
        bucket.gradients[: half.numel()] = wire.all_reduce(half / wire.size)
        half.zero_()


def check_a_method_of_ones_own(rank: int) -> None:
    hook = Half()
    hook.wire = CountingGroup()
    given = gradients(0, rank)
    flat = given.clone()
    hook.run(Bucket(0, flat, MEMBERS))
    expected = torch.stack(everywhere(given)).mean(0)
    torch.testing.assert_close(flat[: SIZE // 2], expected[: SIZE // 2])
    assert torch.count_nonzero(flat[SIZE // 2 :]) == 0
    assert torch.equal(whole(hook.state_dict()["residuals"])[SIZE // 2 :], given[SIZE // 2 :])


def check_unused(rank: int) -> None:
    """What no rank has used keeps what was not sent, and what it starts from; all else obeys the law."""
    size = dist.get_world_size()
    starts = [start for start, member in zip(STARTS, MEMBERS, strict=True) if member.name in "cd"]
    for flag in LOSSY:
        for in_two_phases in (False, True):
            hook = hook_of(flag)
            hook.finds_unused = True
            for memory in hook.memories().values():
                memory.in_two_phases = in_two_phases
            flat = gradients(0, rank)
            hook.run(Bucket(0, flat, MEMBERS))
            hook.on_step_end()
            before = {kind: {n: v.clone() for n, v in hook.state_dict()[kind].items()} for kind in hook.memories()}
            flat = gradients(1, rank)
            flat[starts[0] : starts[-1] + 7] = 0  # c and d, on all ranks
            flat[: 64 * 48] *= rank == 0  # a, but on one
            owed = flat + whole(before["residuals"])
            hook.run(Bucket(0, flat, MEMBERS))
            hook.on_step_end()
            after = hook.state_dict()
            for kind, parts in before.items():
                for name in parts.keys() & {"c", "d"}:
                    assert torch.equal(after[kind][name], parts[name]), (flag, kind, name)
            assert torch.count_nonzero(flat[starts[0] : starts[-1] + 7]) == 0, flag
            assert not torch.equal(after["residuals"]["a"], before["residuals"]["a"]), flag
            error = torch.stack(everywhere(whole(after["residuals"]) - owed)).sum(0) + flat * size
            assert error.abs().max() < 1e-4, flag


def check_unused_under_ddp(rank: int) -> None:
    """DDP leaves the gradient of what no rank has used alone."""
    module = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in "ab"})
    module.forward = lambda x, names: sum(module[name](x).square().sum() for name in names)  # type: ignore[assignment]
    hook = make_comm_hook("topk:0.1")
    assert hook is not None
    model = DistributedDataParallel(module, find_unused_parameters=True)
    hook.attach(model)
    sent, before = [], {}
    for names in ("ab", "a", "ab"):
        before = {name: value.clone() for name, value in hook.state_dict()["residuals"].items()}
        module.zero_grad()
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(rank)), names).backward()
        hook.finish()
        hook.on_step_end()
        sent.append(module["b"].weight.grad is not None)
        after = hook.state_dict()["residuals"]
        stays = {name for name in before if torch.equal(before[name], after[name])}
        assert stays == ({"b.weight"} if names == "a" else set())
    assert sent == [True, False, True]


def check_all(rank: int) -> None:
    check_a_method_of_ones_own(rank)
    check_buckets_of_little(rank)
    check_dtypes(rank)
    check_laws(rank)
    check_bytes(rank)
    check_exact_at_full_rate(rank)
    check_a_zero_gradient(rank)
    check_other_buckets(rank)
    check_unused(rank)
    check_unused_under_ddp(rank)


def check_overlap(rank: int) -> None:
    """Messages that are on their way at once take their time once."""
    wire = CountingGroup()
    wire.collective_times = []
    for receive in [wire.start_all_gather(torch.ones(10)) for _ in range(2)]:
        time.sleep(0.2)
        receive()
    (first, between), (_, last) = wire.collective_times
    assert seconds_between(first, last) >= 0.4
    assert sum(seconds_between(*span) for span in wire.collective_times) >= seconds_between(first, last) + 0.2
    assert busy_s(wire.collective_times) == pytest.approx(seconds_between(first, last))
    assert seconds_between(first, between) >= 0.2
    assert busy_s([(1.0, 3.0), (2.0, 2.5), (0.0, 0.5), (2.9, 3.5)]) == pytest.approx(3.0)
    assert busy_s([]) == 0.0


def test_collectives_that_overlap_take_their_time_once():
    run_ranks(check_overlap, 1, start_method="fork")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_laws(num_ranks):
    run_ranks(check_all, num_ranks, timeout_s=150, start_method="fork")


def test_the_table_and_these_tests_name_the_same_methods():
    assert {flag.partition(":")[0] for flag in ALL} - {"none"} == set(COMM_HOOKS) - {"auto"}  # which is one of them
