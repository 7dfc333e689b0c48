"""Hooks on the gradients of parameters, called as in one process: with the whole gradient of the whole batch.

torch calls `register_hook` and `register_post_accumulate_grad_hook` when a rank has its own gradient: before ranks
average it, once for each micro-batch of a pipeline, with a part of it under tensor parallelism, and under FSDP2 not at
all. A hook that clamps or normalises then gives another result than in one process. Here they wait for the end of the
strategy's backward, when the gradients are averaged. Then they are called for one parameter after the other, the last
of the module first, as in a backward.

Within an accumulation window each micro-batch is averaged by itself, since a hook gets the gradient of one backward. A
backward that the strategy does not run, such as that of `torch.autograd.grad`, calls hooks at once.

Communication: an all-gather of each sharded gradient that has a hook; before training the names of the parameters with
hooks, so that all ranks take part if only one of them has a hook. Of a hook that is registered later, the ranks count
in the job's key-value store how many have it; after the next backward, to which all have come, it must be all.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from ..contract import EngineStrategy
from ..distributed.object_group import WORLD
from ..reliability.rendezvous import current_job
from .whole_steps import whole_results

__all__ = ["ParameterHooks", "call_before_use"]

_ON_GRADIENT, _AFTER_SUM = "_backward_hooks", "_post_accumulate_grad_hooks"
"""torch: the attributes of a Tensor with the hooks of `register_hook` and `register_post_accumulate_grad_hook`."""

_runs = itertools.count()


class ParameterHooks:
    """The hooks of a module's parameters while it is trained by several ranks; `end` gives them back to torch.

    Args:
        module: all ranks have its parameters under the same names.
        strategy: the strategy that trains it.
        average: averages gradients over the ranks, where backward does not; None: backward does.
    """

    def __init__(
        self,
        module: nn.Module,
        strategy: EngineStrategy,
        average: Callable[[list[Tensor | None]], list[Tensor | None]] | None = None,
    ) -> None:
        self._module, self._strategy, self._average = module, strategy, average
        self._parameters = dict(module.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self.defers = False
        """Whether a backward of the strategy runs, so that hooks wait for its end."""
        self._is_running = False
        """Whether a backward of the strategy runs; in a pipeline, its forward, too."""
        self._backward: Any = None
        self._late: set[str] = set()
        """The parameters that got their first hook after training began."""
        self._run = next(_runs)  # the same on all ranks, since they all run the same code
        self._num_changes: Counter[str] = Counter()
        """For each parameter, how often a hook was registered or removed after training began."""
        self._num_hooks: Counter[str] = Counter()
        """For each parameter, its hooks after the latest backward."""
        self._to_check: list[tuple[str, str]] = []
        """The keys by which the ranks count these changes, and the names of the parameters, until the next backward."""
        own = [name for name, parameter in self._parameters.items() if self._take(parameter)]
        of_ranks = WORLD.all_gather_object(own)
        self._num_ranks = len(of_ranks)
        self._agreed = {name for names in of_ranks for name in names}
        """The parameters that had a hook on some rank when training began."""
        if self._agreed or strategy.capabilities.averages_whole_gradients:
            self._wrap_backward()
        _watch(self)

    @property
    def synchronises_always(self) -> bool:
        """Whether inner micro-batches are averaged, too, since hooks get their gradients; the same on all ranks.

        Raises:
            RuntimeError: a hook that only some ranks may know would get a gradient that is not averaged.
        """
        if self._late and not self._agreed:
            raise RuntimeError(self._why_too_late(min(self._late)))
        return bool(self._agreed)

    def end(self) -> None:
        """Gives the hooks back to torch."""
        _forget(self)
        for parameter in self._parameters.values():
            for hooks in _hooks_of(parameter):
                for key, hook in hooks.items():
                    hooks[key] = hook.hook if isinstance(hook, _Deferred) else hook
        if self._backward is not None and vars(self._module).get("backward") is self._backward:
            del vars(self._module)["backward"]

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """Context of a backward with the averages over the ranks; calls the hooks at its end."""
        self._is_running = True
        try:
            with self._deferring():
                yield
        finally:
            self._is_running = False

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        frozen = self._strategy.frozen_since_forward()
        if not (self._agreed or self._late) or not self._strategy.averages_gradients:
            yield
            _drop_gradients(frozen)
            return
        # The memory of a gradient may be that of a bucket, which the next backward fills.
        earlier = [(p, p.grad.clone()) for p in self._parameters.values() if p.grad is not None]
        for parameter, _ in earlier:
            parameter.grad = None
        self.defers = True
        try:
            yield
        finally:
            self.defers = False
        _drop_gradients(frozen)
        self._check_known_to_all()
        with torch.no_grad():
            self._call_hooks({id(p): gradient for p, gradient in earlier})

    def _call_hooks(self, earlier: dict[int, Tensor]) -> None:
        hooked = {name: p for name, p in self._parameters.items() if name in self._agreed or name in self._late}
        if self._average is not None:
            averaged = self._average([parameter.grad for parameter in hooked.values()])
            for parameter, gradient in zip(hooked.values(), averaged, strict=True):
                parameter.grad = gradient
        for name, parameter in reversed(self._parameters.items()):
            is_used = name in hooked and parameter.grad is not None
            if is_used:
                self._change(parameter, name)
            if (gradient := earlier.get(id(parameter))) is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
            hooks = _deferred(parameter, _AFTER_SUM) if is_used else ()
            with whole_results() if hooks and isinstance(parameter, DTensor) else nullcontext():
                for hook in hooks:
                    hook(parameter)

    def _change(self, parameter: Tensor, name: str) -> None:
        """Gives the gradient of a parameter to its hooks, which may change it."""
        own = parameter.grad
        assert own is not None
        # Also without a hook here: another rank may have one, which waits for this rank's part.
        whole: Tensor = own.full_tensor() if isinstance(own, DTensor) else own
        hooks = _deferred(parameter, _ON_GRADIENT)
        for hook in hooks:
            result = hook(whole)
            if result is not None and result.shape != whole.shape:
                raise RuntimeError(
                    f"a hook of {name!r} returned a gradient of shape {tuple(result.shape)}, not {tuple(whole.shape)}."
                )
            whole = whole if result is None else result
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            replica = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            parameter.grad = replica.redistribute(placements=parameter.placements)
        elif whole is own:
            return
        elif own.layout == whole.layout == torch.strided:
            own.copy_(whole)  # it may be the memory of a bucket
        else:
            parameter.grad = whole

    def _wrap_backward(self) -> None:
        """Enters `around_backward` in the module's `backward`, which every strategy calls between the same hooks."""
        if self._backward is not None:
            return
        module: Any = self._module
        run, around = module.backward, self.around_backward

        @functools.wraps(run)
        def backward(*args: Any, **kwargs: Any) -> Any:
            with around():
                return run(*args, **kwargs)

        self._backward = vars(self._module)["backward"] = backward

    def _take(self, parameter: Tensor) -> bool:
        """Makes hooks of the program wait; returns whether there are any. Torch calls the engine's own."""
        has_any = False
        for hooks in _hooks_of(parameter):
            for key, hook in hooks.items():
                if not isinstance(hook, _Deferred) and not _is_engines(hook):
                    if _is_of_several(hook):
                        raise RuntimeError(self._why_not_several(parameter))
                    hooks[key], has_any = _Deferred(hook, self), True
        return has_any

    # --- hooks that are registered in mid-run

    def parameter_of(self, tensor: Tensor) -> nn.Parameter | None:
        """Returns the parameter that `tensor` is, or is a temporary whole copy of; None if there is none."""
        if (name := self._names.get(id(tensor))) is None and isinstance(tensor, nn.Parameter):
            name = next((name for name, parameter in self._module.named_parameters() if parameter is tensor), None)
        return None if name is None else self._parameters[name]

    def register(self, method: Callable[..., Any], parameter: nn.Parameter, hook: Callable[..., Any]) -> Any:
        """Registers a hook of the program; returns its handle.

        Raises:
            RuntimeError: the other ranks would have to know of it, which gather the gradient.
        """
        name = self._names[id(parameter)]
        if self._is_running:
            raise RuntimeError(
                f"a hook of {name!r} is registered within backward, or a step of a pipeline, under {self._strategy!r},"
                " where it would be registered once for each micro-batch and trial run: register it earlier, in the"
                " module's constructor, configure_model, setup or on_fit_start."
            )
        if _is_of_several(hook):
            raise RuntimeError(self._why_not_several(parameter))
        if name not in self._agreed:
            if isinstance(parameter, DTensor) or self._average is not None:
                raise RuntimeError(self._why_too_late(name))
            self._late.add(name)
        handle = method(parameter, hook)
        self._take(parameter)
        self._wrap_backward()
        self._tell_change(name)
        return handle

    def _tell_change(self, name: str) -> None:
        """Tells the other ranks that a hook was registered or removed."""
        self._num_changes[name] += 1
        self._to_check.append((f"polyphase/hooks/{self._run}/{self._num_changes[name]}/{name}", name))
        if (job := current_job()) is not None:
            job.count(self._to_check[-1][0], 1)

    def _check_known_to_all(self) -> None:
        """Checks late hooks after a backward: all ranks have come to it, and so past the place of the registration.

        That a hook was removed is seen here, and checked after the next backward.

        Raises:
            RuntimeError: another rank has no such hook, or has it still, and would train with another gradient.
        """
        late, self._to_check = self._to_check, []
        for name in self._agreed | self._late:
            parameter, before = self._parameters[name], self._num_hooks[name]
            self._num_hooks[name] = sum(len(_deferred(parameter, kind)) for kind in (_ON_GRADIENT, _AFTER_SUM))
            if self._num_hooks[name] < before:
                self._tell_change(name)
        if not late or (job := current_job()) is None:
            return
        if self._strategy.root_device.type != "cpu":  # the host may be ahead of the others
            torch.accelerator.synchronize()
        expected = min(self._num_ranks, WORLD.size)  # a rank may have left the run
        for key, name in late:
            if (num_ranks := job.count(key)) < expected:
                raise RuntimeError(
                    f"a hook of {name!r} was registered or removed in mid-run on {num_ranks} of {expected} ranks: under"
                    f" {self._strategy!r} these would train with another gradient than the others. Do it on all ranks,"
                    " at the same place, and not by what a rank alone has (its number, its samples)."
                )

    def _why_not_several(self, parameter: Tensor) -> str:
        return (
            f"a hook of torch's register_multi_grad_hook on {self._names[id(parameter)]!r} and others is called within"
            " backward, when a rank has the gradients of its own samples only, or of a part of a layer: under"
            f" {self._strategy!r} it would not get those of one process. Read the gradients in"
            " on_before_optimizer_step, when they are averaged, or register a hook on each parameter."
        )

    def _why_too_late(self, name: str) -> str:
        return (
            f"a hook of {name!r} was registered after training had begun, but under {self._strategy!r} all ranks must"
            " know of it, since they gather or average this gradient for it: register it earlier, in the module's"
            " constructor, configure_model, setup or on_fit_start."
        )


def _drop_gradients(parameters: list[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


class _Deferred:
    """A hook of the program, in the dict of its parameter, so that its handle removes it."""

    def __init__(self, hook: Callable[..., Any], owner: ParameterHooks) -> None:
        self.hook, self._owner = hook, owner

    def __call__(self, *args: Any) -> Any:
        """Called by torch, in a backward; does nothing in one of the strategy."""
        return None if self._owner.defers else self.hook(*args)


def _hooks_of(parameter: Tensor) -> Iterator[dict[int, Any]]:
    for kind in (_ON_GRADIENT, _AFTER_SUM):
        yield getattr(parameter, kind) or {}


def _deferred(parameter: Tensor, kind: str) -> list[Callable[..., Any]]:
    return [hook.hook for hook in (getattr(parameter, kind) or {}).values() if isinstance(hook, _Deferred)]


def _is_of_several(hook: Any) -> bool:
    """Whether a hook is one of torch's `register_multi_grad_hook`, which works within a backward of torch only."""
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename == torch.autograd.graph.__file__


def _is_engines(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(__name__.rpartition(".strategies")[0] + ".")


# --- torch's two methods, which know of hooks that are registered in mid-run; a look at each parameter in each step
# would take longer than a short step

_watching: list[ParameterHooks] = []
_METHODS = ("register_hook", "register_post_accumulate_grad_hook")
_torchs = {name: getattr(Tensor, name) for name in _METHODS}


def _watch(hooks: ParameterHooks) -> None:
    _watching.append(hooks)
    for name in _METHODS:
        setattr(Tensor, name, _registering(_torchs[name]))


def _forget(hooks: ParameterHooks) -> None:
    if hooks in _watching:
        _watching.remove(hooks)
    if not _watching:
        for name in _METHODS:
            setattr(Tensor, name, _torchs[name])


def _registering(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def register(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        for watching in _watching:
            if not _is_engines(hook) and (parameter := watching.parameter_of(tensor)) is not None:
                return watching.register(method, parameter, hook)
        return method(tensor, hook)

    return register


def call_before_use(
    function: Callable[[Optimizer], None], optimizer: Optimizer, args: Any, kwargs: Any
) -> tuple[Any, Any] | None:
    """Calls `function` at once, or after the closure that computes the gradients, which Lightning always gives.

    Args:
        function: called with the optimizer.
        optimizer: the optimizer, with which torch has called a hook before its step.
        args: what the hook was called with: the optimizer, and maybe the closure.
        kwargs: likewise.

    Returns:
        What the hook returns: the new `args` and `kwargs`; None if they stay.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        function(optimizer)
        return None
    closure = functools.partial(_close_then, function, optimizer, closure)
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _close_then(function: Callable[[Optimizer], None], optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    result = closure()
    function(optimizer)
    return result
