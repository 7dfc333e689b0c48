"""The content of a checkpoint of the engine's: each field with its type and range, checked at one place.

It is checked when a checkpoint is opened, for a run and for `polyphase ckpt verify` alike, before anything is restored
from it. So whatever restores a part may rely on its form.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor
from typing_extensions import NotRequired, Required, TypedDict

from ..foreign import MOST_RANKS, Count, Falling, Positive, Range, problem
from .errors import CheckpointError
from .manifest import Manifest
from .single_file import MANIFEST_KEY, OURS
from .state_tree import NAMES, is_mark, is_optimizers_own

__all__ = ["VERSION", "check_state"]

VERSION = 2
"""The version of the engine's own entry."""

_MOST_ELEMENTS_OF_STATE = 2**16
"""More than the state of any random generator has."""


# --- Lightning's part


class _Done(TypedDict):
    ready: Count
    completed: Count


class _Started(_Done):
    started: Count


class _Processed(_Started):
    processed: Count


_IN_ORDER = Falling(("ready", "started", "processed", "completed"), "counts more that ended than began")
"""Lightning increments the counts in this order."""


class _DoneProgress(TypedDict):
    total: Annotated[_Done, _IN_ORDER]
    current: Annotated[_Done, _IN_ORDER]


class _StartedProgress(TypedDict):
    total: Annotated[_Started, _IN_ORDER]
    current: Annotated[_Started, _IN_ORDER]


class _Progress(TypedDict):
    total: Annotated[_Processed, _IN_ORDER]
    current: Annotated[_Processed, _IN_ORDER]


class _BatchProgress(_Progress):
    is_last_batch: bool


class _OfOptimizer(TypedDict):
    step: _DoneProgress
    zero_grad: _StartedProgress


class _OptimizerProgress(TypedDict):
    optimizer: _OfOptimizer


def _counts_batches(state: dict[str, Any]) -> str | None:
    return problem(state.get("_batches_that_stepped"), Count, "has a count that")


_FitLoop = TypedDict(
    "_FitLoop",
    {
        "state_dict": dict,
        "epoch_progress": _Progress,
        "epoch_loop.state_dict": Annotated[dict, _counts_batches],
        "epoch_loop.batch_progress": _BatchProgress,
        "epoch_loop.scheduler_progress": _DoneProgress,
        "epoch_loop.automatic_optimization.state_dict": dict,
        "epoch_loop.automatic_optimization.optim_progress": _OptimizerProgress,
        "epoch_loop.manual_optimization.state_dict": dict,
        "epoch_loop.manual_optimization.optim_step_progress": _DoneProgress,
        "epoch_loop.val_loop.state_dict": dict,
        "epoch_loop.val_loop.batch_progress": _BatchProgress,
    },
)


def _may_count_batches(state: dict[str, Any]) -> str | None:
    return _counts_batches({"_batches_that_stepped": 0, **state})


_SomeFitLoop = TypedDict(
    "_SomeFitLoop",
    {**_FitLoop.__annotations__, "epoch_loop.state_dict": Annotated[dict, _may_count_batches]},  # type: ignore[misc]
    total=False,
)
"""The same in a file of Lightning's, also of an older version: what is missing begins anew."""


class _EvaluationLoop(TypedDict):
    state_dict: dict
    batch_progress: _Progress


class _Loops(TypedDict):
    fit_loop: _FitLoop
    validate_loop: _EvaluationLoop
    test_loop: _EvaluationLoop
    predict_loop: _EvaluationLoop


class _SomeLoops(TypedDict, total=False):
    fit_loop: _SomeFitLoop
    validate_loop: dict
    test_loop: dict
    predict_loop: dict


def _is_version(text: str) -> str | None:
    try:
        Version(text)
    except InvalidVersion:
        return "is no version"
    return None


_Lightnings = TypedDict(
    "_Lightnings",
    {
        "pytorch-lightning_version": Annotated[str, _is_version],
        "epoch": Count,
        "global_step": Count,
        "state_dict": dict[str, Any],
        "loops": dict[str, dict],
        "callbacks": dict,
        "optimizer_states": list[dict[str, Any]],
        "lr_schedulers": list,
    },
    total=False,
)
"""The fields that any file of Lightning's may have."""


class _Group(TypedDict):
    params: list[str | int]


class _OptimizerState(TypedDict):
    state: dict[Any, dict]
    param_groups: list[_Group]


class _NamedGroup(TypedDict):
    params: list[str]


class _NamedState(TypedDict):
    state: dict[str, dict]
    param_groups: list[_NamedGroup]


def _of_its_groups(state: _NamedState) -> str | None:
    names = [name for group in state["param_groups"] for name in group["params"]]
    if len({*names}) < len(names):
        return "has a parameter twice"
    others = state["state"].keys() - names
    return None if all(map(is_optimizers_own, others)) else "has the state of a parameter of none of its groups"


class _Best(TypedDict):
    path: str
    value: float


def _has_best(states: dict[Any, Any]) -> str | None:
    """The state of `Snapshot`, which is empty without a metric."""
    return problem(best, _Best, "of Snapshot") if (best := states.get("Snapshot")) else None


_Fit = TypedDict(
    "_Fit",
    {
        "pytorch-lightning_version": str,
        "epoch": Count,
        "global_step": Count,
        "state_dict": dict[str, Any],
        "loops": _Loops,
        "callbacks": Annotated[dict, _has_best],  # a callback may name its state by something else than a string
        "optimizer_states": list[dict[str, Any]],
        "lr_schedulers": list[dict | None],
    },
)
"""The fields of Lightning's from which a run continues."""


# --- the engine's part


def _is_bytes(state: Tensor | dict[str, Any]) -> str | None:
    if isinstance(state, dict):
        return None if is_mark(state) else "is no state of a generator"
    is_state = state.dtype == torch.uint8 and state.dim() == 1 and 0 < state.numel() <= _MOST_ELEMENTS_OF_STATE
    return None if is_state else "is no state of a generator"


def _is_twister(state: tuple[int, tuple[int, ...], float | None]) -> str | None:
    version, keys, _ = state
    is_state = version == 3 and len(keys) == 625 and 0 <= min(keys) <= max(keys) < 2**32 and keys[-1] <= 624
    return None if is_state else "is no state of Python's generator"


def _is_numpys(state: list[Any]) -> str | None:
    wrong = problem(tuple(state), _NUMPY, "its content") if len(state) == 5 else "it has other parts"
    return f"is no state of NumPy's generator: {wrong}" if wrong else None


_WORDS = Annotated[list[Annotated[int, Range(0, 2**32 - 1)]], lambda keys: None if len(keys) == 624 else "is too short"]
_NUMPY = tuple[Literal["MT19937"], _WORDS, Annotated[int, Range(0, 624)], Literal[0, 1], float]


def _others_are_states(generators: dict[str, Any]) -> str | None:
    """The states of accelerators' generators have the names of their devices."""
    others = (generators[name] for name in generators.keys() - {"python", "numpy", "torch", "own"})
    return next((wrong for other in others if (wrong := problem(other, _TORCH, "a state of a device"))), None)


_PYTHON = Annotated[tuple[int, tuple[int, ...], float | None], _is_twister]
_TORCH = Annotated[Tensor | dict, _is_bytes]


class _States(TypedDict):
    python: _PYTHON
    numpy: Annotated[list, _is_numpys]
    torch: _TORCH


_Generators = Annotated[_States, _others_are_states]
_OfGenerator = TypedDict(
    "_OfGenerator", {"python": _PYTHON, "torch": _TORCH, "numpy": dict, "old numpy": dict}, total=False
)


class _SomeStates(TypedDict, total=False):
    python: _PYTHON
    numpy: Annotated[list, _is_numpys]
    torch: _TORCH


_Before = TypedDict("_Before", {"global": Annotated[_SomeStates, _others_are_states] | None, "sampler": Any})


class _Order(TypedDict):
    before: _Before | None
    sampler: Any
    whole: bool
    num_passes: Count


class _OrderStart(_Order, total=False):
    begun: _TORCH


_Span = TypedDict("_Span", {"from": Count, "to": Count, "world_size": Positive})


class _Loader(TypedDict):
    unit: Literal["samples", "batches", "stateful"] | None


class _Workers(TypedDict):
    next: Count
    stay: bool
    states: dict[Count, _Generators]


class _AnyLoader(_Loader, total=False):
    data_epoch: Any
    generators: int | None
    own: Required[dict[str, _OfGenerator]]


class _OrderedLoader(_AnyLoader):
    epoch: Count
    position: Count
    length: Count
    per_step: list[Positive]
    num_sharing: Positive
    began_again: bool
    digest: int | None
    in_order: bool
    order: _OrderStart
    ledger: list[_Span]
    workers: _Workers | None


class _Shards(TypedDict):
    num_shards: Count
    dealt: Any


class _StatefulLoader(_AnyLoader):
    batch_size: Any
    num_workers: Any
    state: Any
    shards: NotRequired[_Shards]


class _Data(TypedDict):
    world_size: Positive
    batches: Count
    loaders: list[_Loader]
    micro_batch_size: Positive | None
    sample_seed: int | None


class _Rank(TypedDict):
    random: _Generators
    data: _Data
    compression: dict[str, Any]
    strategy: dict[str, Any]


class _Run(TypedDict):
    id: str
    lineage: list[str]


class _Trained(TypedDict):
    is_trained: dict[str, bool]
    tracks: dict[str, bool]
    added: list[list[str]]


class _Engine(TypedDict):
    between_epochs: bool
    between_steps: bool
    in_validation: bool
    batches: Count
    world_size: Positive
    accumulate_grad_batches: Positive
    accumulation_asked: Positive
    version: Count
    cut_short: bool
    loaders_of_epoch: Count
    validation_loaders_of_epoch: Count | None
    layout: dict[str, Positive]
    trained: _Trained
    run: _Run
    strategy: dict[str, Any]
    optimizers: NotRequired[list[str]]
    """Missing where a process saves what the workers that it had started have returned."""


# --- the check


def check_state(rest: Any, ranks: Any, manifest: Manifest | None) -> None:
    """Checks the content of a checkpoint, with marks or with tensors in it.

    Args:
        rest: Lightning's dictionary, with the engine's own entry.
        ranks: the state of each rank, in rank order.
        manifest: the checkpoint's manifest; None for a file of Lightning's.

    Raises:
        CheckpointError: the first field that is wrong, and what it should be.
    """
    if wrong := problem(rest, _Lightnings, "the checkpoint"):
        raise CheckpointError(wrong)
    own = rest.get(OURS, {})
    wrong = problem(own, dict[str, Any], OURS) or next(_wrong_names(rest, own), None)
    if wrong is None and (own.keys() - {MANIFEST_KEY, NAMES} or (manifest is not None and manifest.kind == "snapshot")):
        wrong = next(_wrong_state(rest, own, ranks, manifest), None)
    elif wrong is None:
        wrong = problem(rest.get("loops", {}), _SomeLoops, "the checkpoint.loops")
    if wrong:
        raise CheckpointError(wrong)


def _wrong_names(rest: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the names of the optimizers' parameters in a file."""
    if NAMES not in own:
        return
    states, names = rest.get("optimizer_states", []), own[NAMES]
    if wrong := problem(names, list[list[str]], NAMES) or problem(states, list[_OptimizerState], "optimizer_states"):
        yield wrong
    elif names and len(names) != len(states):
        yield f"{NAMES} has {len(names)} parts, and optimizer_states has {len(states)}"
    else:
        for number, (state, of_state) in enumerate(zip(states, names, strict=False)):
            of_parameters = [key for key in state["state"] if not isinstance(key, str)]
            numbers = [*of_parameters, *(number for group in state["param_groups"] for number in group["params"])]
            if any(type(number) is not int or not 0 <= number < len(of_state) for number in numbers):
                yield f"optimizer_states[{number}] has a parameter without a name"


def _wrong_state(rest: Any, own: dict[str, Any], ranks: Any, manifest: Manifest | None) -> Iterator[str]:
    """Yields what is wrong with the state of a run."""
    for value, kind, where in ((rest, _Fit, "the checkpoint"), (own, _Engine, OURS), (ranks, list[_Rank], "ranks")):
        if wrong := problem(value, kind, where):
            yield wrong
            return
    if manifest is not None:  # in a directory, parameters have names
        wrong = problem(rest["optimizer_states"], list[Annotated[_NamedState, _of_its_groups]], "optimizer_states")
        if wrong:
            yield wrong
            return
    yield from _contradictions(rest, own, manifest)
    yield from _wrong_ranks(own, ranks)


def _contradictions(rest: dict[str, Any], own: dict[str, Any], manifest: Manifest | None) -> Iterator[str]:
    loop = rest["loops"]["fit_loop"]
    steps = (
        loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"],
        loop["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"],
    )
    if rest["global_step"] not in steps:
        yield f"global_step is {rest['global_step']}, and the loops count {max(steps)} steps"
    if manifest is not None and own["world_size"] != manifest.world_size:
        yield f"{OURS}.world_size is {own['world_size']}, and {manifest.world_size} rank(s) have saved it"
    if own["layout"].get("pp", 1) > own["world_size"]:
        yield f"{OURS}.layout has more stages than the {own['world_size']} rank(s) that have saved it"
    if own["accumulate_grad_batches"] > MOST_RANKS * own["accumulation_asked"]:  # a run of fewer ranks has more
        yield f"{OURS}.accumulate_grad_batches is {own['accumulate_grad_batches']}, more than any number of ranks asks"
    if "optimizers" in own and len(own["optimizers"]) != len(rest["optimizer_states"]):
        yield f"{OURS}.optimizers names {len(own['optimizers'])}, and {len(rest['optimizer_states'])} have a state"


def _wrong_ranks(own: dict[str, Any], ranks: list[Any]) -> Iterator[str]:
    if len(ranks) != own["world_size"]:
        yield f"it has the state of {len(ranks)} rank(s), and {own['world_size']} have saved it"
        return
    done = 0 if own["between_epochs"] else own["batches"]
    units = [loader["unit"] for loader in ranks[0]["data"]["loaders"]]
    for rank, state in enumerate(ranks):
        data = state["data"]
        if data["batches"] != done:
            yield f"ranks[{rank}].data.batches is {data['batches']}, and the run has done {done}"
        if [loader["unit"] for loader in data["loaders"]] != units:
            yield f"ranks[{rank}].data.loaders has other loaders than rank 0"
        for number, loader in enumerate(data["loaders"]):
            where = f"ranks[{rank}].data.loaders[{number}]"
            if wrong := problem(loader, _KINDS_OF_LOADERS.get(loader["unit"], _OrderedLoader), where):
                yield wrong
            elif loader["unit"] not in (None, "stateful") and loader["position"] > loader["length"]:
                yield f"{where}.position is behind its end"


_KINDS_OF_LOADERS = {None: _AnyLoader, "stateful": _StatefulLoader}
