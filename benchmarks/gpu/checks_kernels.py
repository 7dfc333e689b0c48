"""Checks and times of what compression computes on the device, at the sizes of real buckets."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyphase.engine.compression import AllReduceHook, Bucket, CommHook, CountingGroup, ParamSlice, make_comm_hook
from polyphase.engine.compression.int8 import _Fused, _Noise, passes_of
from polyphase.engine.compression.powersgd import _householder
from polyphase.engine.compression.topk import largest
from polyphase.engine.data import PackSequences
from polyphase.models import ByteGPT

from . import device


def largest_values() -> str:
    seen = []
    for power in (16, 18) if device.smoke() else (16, 20, 24, 28):
        n = 2**power
        flat, k = torch.randn(n, device=device.root()), n // 100
        places = largest(flat, k)
        chosen = torch.zeros(n, dtype=torch.bool, device=device.root())
        chosen[places] = True
        least, most = flat[chosen].abs().min(), flat[~chosen].abs().max()
        assert int(chosen.sum()) == k, f"2^{power}: {int(chosen.sum())} places of {k}"
        assert bool(least >= most), f"2^{power}: left out {float(most)}, but took {float(least)}"
        whole_s = device.time_s(lambda flat=flat, k=k: largest(flat, k))
        by_rows = _largest_by_rows(flat, k)
        assert bool((flat[by_rows].abs().min() == least).all()), f"2^{power}: rows have other ones"
        rows_s = device.time_s(lambda flat=flat, k=k: _largest_by_rows(flat, k))
        seen.append(f"2^{power} {1e3 * whole_s:.2f} ms, by rows {1e3 * rows_s:.2f} ms")
    return "; ".join(seen)


def _largest_by_rows(flat: Tensor, k: int) -> Tensor:
    """As `largest`, from the `k` largest of each of 16 rows: for devices whose `topk` sorts what is one row."""
    rows = flat.abs().view(16, -1)
    values, places = rows.topk(min(k, rows.size(1)), sorted=False)
    places += torch.arange(16, device=flat.device)[:, None] * rows.size(1)
    return places.flatten()[values.flatten().topk(k, sorted=False).indices]


def _qr(matrices: Tensor) -> Tensor:
    return torch.linalg.qr(matrices.mT).Q.mT.contiguous()


def orthonormal() -> str:
    methods = {"": _householder, ", QR ": _qr}
    if device.kind() == "cuda":
        methods[", compiled "] = torch.compile(_householder, dynamic=True)
    seen = []
    for shape in ((4, 4, 256), (1, 4, 1024)) if device.smoke() else ((32, 4, 4096), (1, 4, 131072)):
        matrices = torch.randn(shape, device=device.root())
        alike = matrices[:, :1].expand(shape).contiguous()  # rows that depend on each other
        times = []
        for name, method in methods.items():
            for kind, of_kind in (("any", matrices), ("equal", alike), ("small", 1e-30 * matrices)):
                q = method(of_kind)
                off = (q @ q.mT - torch.eye(4, device=device.root())).abs().max()
                lost = (of_kind - of_kind @ q.mT @ q).abs().max() / of_kind.abs().max()
                assert float(off) <= 1e-3, f"{kind} {shape}{name}: not orthonormal by {float(off):.1e}"
                assert float(lost) <= 1e-2, f"{kind} {shape}{name}: another span, by {float(lost):.1e}"
            ms = 1e3 * device.time_s(lambda method=method, matrices=matrices: method(matrices))
            times.append(f"{name}{ms:.2f} ms")
        seen.append(f"{list(shape)} {''.join(times)}")
    return "; ".join(seen)


def packed() -> str:
    """Sequences by boundaries beside those by a mask and those that are padded, all in bfloat16."""
    longest, num_rows = (16, 2) if device.smoke() else (1024, 16)
    shape = (
        {"num_layers": 2, "num_heads": 2, "dim": 32}
        if device.smoke()
        else {"num_layers": 12, "num_heads": 12, "dim": 768}
    )
    torch.manual_seed(0)
    module = ByteGPT(context_length=longest, **shape).to(device.root())
    lengths = torch.randint(longest // 8, longest // 2, (2 * num_rows,)).tolist()
    texts = [{"input_ids": torch.randint(256, (length,)).tolist()} for length in lengths]
    by_boundaries = {name: t.to(device.root()) for name, t in PackSequences(longest)(texts).items()}
    by_mask = {name: t for name, t in by_boundaries.items() if name != "sequence_lengths"}
    alone = [PackSequences(max(lengths))([text]) for text in texts]
    padded = {name: torch.cat([one[name] for one in alone]).to(device.root()) for name in by_mask}
    results, seen = [], []
    for name, batch in (("boundaries", by_boundaries), ("mask", by_mask), ("padded", padded)):
        with torch.autocast(device.kind(), torch.bfloat16):

            def step(batch: dict[str, Tensor] = batch) -> Tensor:
                module.zero_grad()
                loss = module._loss(batch)
                loss.backward()
                return loss.detach()

            loss = step()
            results.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]))
            seen.append(f"{name} {sum(lengths) / device.time_s(step):.0f} tokens/s, loss {float(loss):.4f}")
    for other in results[1:]:
        apart = float((results[0] - other).norm() / other.norm())
        # Each product rounds to 8 bits, and in other places: the kernels sum in other orders.
        assert apart <= 3e-2, f"gradients by boundaries are {apart:.1e} from the others"
    return "; ".join(seen)


LEAST_COSINE = {
    "none": 0.9999,
    "bf16": 0.999,
    "fp16": 0.999,
    "int8": 0.99,
    "powersgd:4,start=0": 0.99,
    "topk:0.1,start=0": 0.5,
    "sign:start=0": 0.5,
}
"""The least cosine between a gradient of rank 2 and what the method makes of it, as the average over one process."""


def averages() -> str:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, device_id=device.root())
    seen = [_passes_of_four_ranks()]
    torch._dynamo.reset()  # it has compiled the kernels with what they leave behind, and each is compiled once below
    for num_bytes in (2**18, 2**20) if device.smoke() else (25 * 2**20, 2**30):
        rows = 256 if device.smoke() else 4096
        shape = (rows, num_bytes // 4 // rows)
        for flag, least in LEAST_COSINE.items():
            seen.append(f"{num_bytes // 2**20} MB {flag}: {_average(flag, shape, least)}")
    dist.destroy_process_group()
    return "; ".join(seen)


def _average(flag: str, shape: tuple[int, int], least: float) -> str:
    """Time and memory of an average, by kernels that are compiled (if the method has some), and without a compiler."""
    gradient = torch.randn(shape[0], 2, device=device.root()) @ torch.randn(2, shape[1], device=device.root())
    flat = gradient.flatten()
    bucket = Bucket(0, flat.clone(), (ParamSlice("weight", shape),))
    seen, averages = [], []
    for compiles in (True, False):
        with (
            _compiling(compiles),
            torch._dynamo.config.patch(error_on_recompile=True),
        ):  # torch: for any size, compiled once
            hook = _begun(flag, shape)
            for _ in range(2):  # powersgd's factors start from random ones
                bucket.gradients.copy_(flat)
                hook.average(bucket, hook.wire)
            cosine = float(torch.nn.functional.cosine_similarity(bucket.gradients, flat, dim=0))
            assert cosine >= least, f"{flag}: the average is another gradient (cosine {cosine:.3f}, expected {least})"
            averages.append(bucket.gradients.clone())
            peak = device.peak_of(lambda hook=hook: hook.average(bucket, hook.wire))
            seconds = device.time_s(lambda hook=hook: hook.average(bucket, hook.wire))
        seen.append(f"{flat.nbytes / seconds / 1e9:.1f} GB/s, peak {peak / flat.nbytes:.1f} buckets")
        if not _compiles(hook):
            return seen[0]
    assert torch.equal(*averages), f"{flag}: compiled kernels have another average"
    return f"{seen[0]} (without a compiler {seen[1]})"


@contextlib.contextmanager
def _compiling(compiles: bool) -> Iterator[None]:
    was_wanted, _Fused.is_wanted = _Fused.is_wanted, compiles
    try:
        yield
    finally:
        _Fused.is_wanted = was_wanted


def _begun(flag: str, shape: tuple[int, int]) -> CommHook:
    hook: CommHook = make_comm_hook(flag) or AllReduceHook()
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(shape, device=device.root()))
    hook.begin(module, CountingGroup())
    return hook


def _compiles(hook: CommHook) -> bool:
    """Whether the method has kernels that are compiled on this device."""
    return type(hook).prepare is not CommHook.prepare and _Fused.is_possible(torch.empty(0, device=device.root()))


def _passes_of_four_ranks() -> str:
    """What one process can't average: messages of several ranks; bitwise equal with and without a compiler."""
    num_ranks, passes, num_blocks = 4, passes_of(256), 250 if device.smoke() else 2**16
    values = torch.randn(num_ranks, 256 * num_blocks, device=device.root())
    noise = _Noise(torch.arange(num_blocks, dtype=torch.int32, device=device.root()), 12345)
    results = []
    for compiles in (True, False):
        with _compiling(compiles):
            passes.compile(values, num_ranks, keeps_rest=True)
            rest_of_ranks = values.clone()
            sent, again = (values.new_empty(rows, 260 * num_blocks, dtype=torch.uint8) for rows in (num_ranks, 1))
            passes.quantize(rest_of_ranks, noise, sent, keeps_rest=True)
            rest = passes.requantize(sent, noise, again, torch.float32, keeps_rest=True)
            average, back = passes.average(sent, torch.float32), torch.empty_like(values)
            passes.dequantize(sent, back)
            results.append([sent, rest_of_ranks, again, rest, average, back])
    names = ("numbers", "errors", "numbers of the mean", "its errors", "the mean", "values")
    if device.kind() == "cuda":
        assert passes.is_compiled, "the kernels of int8 were not compiled: see the warning"
    others = [name for name, *pair in zip(names, *results, strict=True) if not torch.equal(*pair)]
    assert not others, f"int8: compiled kernels give other {', '.join(others)}"
    return "int8 of 4 ranks: " + ("compiled, bitwise equal to eager" if passes.is_compiled else "not compiled here")
