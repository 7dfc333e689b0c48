"""The stages of a pipeline one after the other, in one process: what they hand over, without anything that sends it."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from polyphase.engine.strategies.pipeline.partitioned_module import PartitionedModule, StepJob
from polyphase.engine.strategies.pipeline.plan import RemoteTensor, plan_stages, replace_absent
from polyphase.engine.strategies.pipeline.shapes import Shapes
from polyphase.engine.strategies.pipeline.stage_module import StageModule
from polyphase.engine.strategies.step_guard import StepSnapshot

CPU = torch.device("cpu")


class Relay:
    """`num_stages` copies of a module, each with the parameters of one stage."""

    def __init__(self, module: nn.Module, num_stages: int, step: Callable[[nn.Module], Any]) -> None:
        self.shapes = Shapes()
        self.parts: list[StageModule] = []
        self.result: Any = None
        for stage in range(num_stages):
            own = copy.deepcopy(module)
            plan = plan_stages(own, num_stages)
            replace_absent(own, plan, [p for p, stages in plan.holders.items() if stage not in stages])
            partitioned = PartitionedModule(own, plan, CPU, [stage])
            partitioned.job = StepJob(
                step=lambda index, own=own: step(own),
                begin=lambda index, stage: None,
                resume=lambda index, stage: None,
                finish=self._finish,
                context=nullcontext,
                shapes=self.shapes,
            )
            partitioned.written = {}
            self.parts.append(StageModule(partitioned, stage))
        for part in self.parts:
            undo = StepSnapshot(part.partitioned.module, random=False)
            part.try_out()
            undo.undo()
            self._tell(part.stage)
        self.shapes.carry()

    def _tell(self, stage: int) -> None:
        """What a stage has noted, to all of them."""
        for part in self.parts:
            if (written := (self.parts[stage].partitioned.written or {}).get(stage)) is not None:
                part.partitioned.guard.learn("step", stage, written, len(self.parts))

    def _finish(self, index: int, output: Any) -> Tensor:
        self.result = output
        return output

    def run(self, backward: bool = True) -> Any:
        """What the last stage returns; gradients are in the copies then."""
        self._lend()
        handed: list[tuple[tuple[Tensor, ...], Any]] = []
        received: tuple[Tensor, ...] = ()
        for part in self.parts:
            part.micro_batch = 0
            output = part(*received)
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
        """What `lend` and `return_gradients` do, without anything that sends it."""
        for stage, names in self.shapes.borrowed.items():
            own = dict(self.parts[stage].partitioned.module.named_parameters())
            for name in names:
                holder = self.parts[stage].partitioned.plan.holders[own[name]][0]
                content = dict(self.parts[holder].partitioned.module.named_parameters())[name]
                self.parts[stage].partitioned.borrowed.put(own[name], content.detach().clone())

    def gradients(self) -> dict[str, Tensor]:
        """Summed over the stages."""
        total: dict[str, Tensor] = {}
        for part in self.parts:
            for name, parameter in part.partitioned.module.named_parameters():
                if not isinstance(parameter, RemoteTensor) and parameter.grad is not None:
                    total[name] = total.get(name, 0) + parameter.grad
        return total
