"""The stages of a pipeline one after the other, in one process: what they hand over, without anything that sends it."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polyphase.engine.loop.undo import Undo
from polyphase.engine.strategies.pipeline.part import Cut, Job, Part
from polyphase.engine.strategies.pipeline.plan import leave_out, plan_stages
from polyphase.engine.strategies.pipeline.shapes import Shapes

CPU = torch.device("cpu")


class Relay:
    """`num_stages` copies of a module, each with the parameters of one stage."""

    def __init__(self, module: nn.Module, num_stages: int, step: Callable[[nn.Module], Any]) -> None:
        self.shapes = Shapes()
        self.parts: list[Part] = []
        self.result: Any = None
        for stage in range(num_stages):
            own = copy.deepcopy(module)
            plan = plan_stages(own, num_stages)
            leave_out(own, plan, [p for p, stages in plan.holders.items() if stage not in stages])
            cut = Cut(own, plan, CPU, [stage])
            cut.job = Job(
                step=lambda index, own=own: step(own),
                begin=lambda index, stage: None,
                resume=lambda index, stage: None,
                finish=self._finish,
                context=nullcontext,
                shapes=self.shapes,
            )
            cut.written = {}
            self.parts.append(Part(cut, stage))
        for part in self.parts:
            undo = Undo(part.cut.module, random=False)
            part.try_out()
            undo.undo()
            self._tell(part.stage)
        self.shapes.carry()

    def _tell(self, stage: int) -> None:
        """What a stage has noted, to all of them."""
        for part in self.parts:
            if (written := (self.parts[stage].cut.written or {}).get(stage)) is not None:
                part.cut.readers.learn("step", stage, written, len(self.parts))

    def _finish(self, index: int, output: Any) -> Tensor:
        self.result = output
        return output

    def run(self, backward: bool = True) -> Any:
        """What the last stage returns; gradients are in the copies then."""
        index = torch.zeros(1, dtype=torch.int64)
        self._lend()
        handed: list[tuple[tuple[Tensor, ...], Any]] = []
        received: tuple[Tensor, ...] = ()
        for part in self.parts:
            output = part(*received, index=index)
            handed.append((received, output))
            if part.is_last:
                self._tell(part.stage)
            else:
                received = tuple(t.detach().requires_grad_(t.requires_grad) for t in output)
        if backward:
            gradients: list[Any] = [None]
            for received, output in reversed(handed):
                tensors = [output] if isinstance(output, Tensor) else list(output)
                torch.autograd.backward(tensors, gradients)
                gradients = [tensor.grad for tensor in received]
        return self.result

    def _lend(self) -> None:
        """What `loans.py` does, without anything that sends it."""
        for stage, names in self.shapes.borrowed.items():
            own = dict(self.parts[stage].cut.module.named_parameters())
            for name in names:
                holder = self.parts[stage].cut.plan.holders[own[name]][0]
                content = dict(self.parts[holder].cut.module.named_parameters())[name]
                self.parts[stage].cut.borrowed.put(own[name], content.detach().clone())

    def gradients(self) -> dict[str, Tensor]:
        """Summed over the stages."""
        total: dict[str, Tensor] = {}
        for part in self.parts:
            for name, parameter in part.cut.module.named_parameters():
                if not parameter.is_meta and parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad
        return total
