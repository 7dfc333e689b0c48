"""An optimizer's state as hooks see it in a pipeline: beside that of this stage, forms of what the other stages have.

A hook that counts its entries finds as many as in one process; one that changes each by itself does so on the stage
that has it; one that reads values of another stage, as for a norm of all moments, gets an error that names the
parameter. The forms are those of the entries of a parameter of this stage. They are there while a hook runs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..callers import CutError
from ..hook_code import reader_of_state
from ..whole_steps import own_hook, wrap_hooks
from .plan import RemoteTensor
from .remote_values import mark_origin, origin_of

__all__ = ["show_state_of_all"]

_OTHER_HOOKS = "configure_gradient_clipping", "optimizer_step", "lr_scheduler_step"


def show_state_of_all(trainer: Trainer, optimizers: list[Optimizer], schedulers: Iterable[Any]) -> Callable[[], None]:
    """Shows hooks that read an optimizer's state that of all stages; returns what undoes it.

    Raises:
        CutError: a scheduler, or a hook of an optimizer, reads it.
    """
    if line := reader_of_state(schedulers, optimizers):
        raise CutError(
            f"{line} reads the state of an optimizer, of which a pipeline stage has its own part: read it in a hook of"
            " the module or of a callback, such as on_train_batch_end, or choose another strategy, such as 'fsdp'."
        )
    if line := reader_of_state([trainer.lightning_module.training_step], ()):
        raise CutError(
            f"{line} in the step reads the state of an optimizer: do it in a hook, such as on_train_batch_start."
        )
    line = reader_of_state((trainer.lightning_module, *trainer.callbacks), ())  # type: ignore[attr-defined]
    if not line:
        return lambda: None
    state = _StateOfAll(optimizers, line)
    return wrap_hooks(trainer, state.call, _OTHER_HOOKS)


class _StateOfAll:
    def __init__(self, optimizers: list[Optimizer], line: str) -> None:
        self._optimizers, self._line = optimizers, line
        self._stepped: set[Tensor] = set()
        """The parameters of other stages that may have been stepped."""
        self._depth = 0
        """How many hooks run, one within the other."""

    def __deepcopy__(self, memo: Any) -> "_StateOfAll":
        return self  # a copy of a module has its hooks, too

    def call(self, owner: Any, name: str, own: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Calls a hook; see `wrap_hooks`."""
        with self._shown():
            return own_hook(owner, name, own)(*args, **kwargs)

    @contextmanager
    def _shown(self) -> Iterator[None]:
        for optimizer in self._optimizers:
            self._add(optimizer)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            for optimizer in self._optimizers if not self._depth else ():
                for parameter in [p for p in optimizer.state if isinstance(p, RemoteTensor)]:
                    del optimizer.state[parameter]

    def _add(self, optimizer: Optimizer) -> None:
        parameters = [(p, g) for g in optimizer.param_groups for p in g["params"]]
        remote = [(p, g) for p, g in parameters if isinstance(p, RemoteTensor)]
        if remote and not any(p.requires_grad for p, _ in parameters if not isinstance(p, RemoteTensor)):
            raise CutError(
                f"{self._line} reads the state of {type(optimizer).__name__}, which trains no parameter of this"
                " pipeline stage: its part is not known here. Choose another strategy, such as 'fsdp'."
            )
        state = dict(optimizer.state)
        if not state:
            return
        self._stepped.update(p for p, _ in remote if p.requires_grad and id(p) not in RemoteTensor.without_gradient)
        for parameter, group in remote:
            if parameter in self._stepped:
                of_group = [p for p, of in parameters if p in optimizer.state and of is group]
                own = of_group or [*optimizer.state]
                like = next((p for p in own if p.dim() == parameter.dim()), own[0])
                state[parameter] = {key: self._form(v, like, parameter) for key, v in optimizer.state[like].items()}
        optimizer.state.clear()  # and in the order of one process
        in_order = dict.fromkeys([*(p for p, _ in parameters), *state])
        optimizer.state.update({p: state[p] for p in in_order if p in state})

    def _form(self, value: Any, like: Tensor, parameter: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.dim():  # a number of steps
            return value.clone()
        if value.shape != like.shape:
            raise CutError(
                f"{self._line} reads the state of an optimizer, of which {origin_of(parameter)!r} has a part on another"
                " pipeline stage, in a shape that is not its own. Choose another strategy, such as 'fsdp'."
            )
        form: Any = torch.empty(parameter.shape, dtype=value.dtype, device="meta").as_subclass(RemoteTensor)
        mark_origin(form, origin_of(parameter))
        return form
