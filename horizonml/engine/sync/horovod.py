"""Data parallelism whose gradients Horovod sums: `parallel.strategy: horovod` (Sergeev and Del Balso, 2018).

The engine, the data, the records and the checkpoints are those of all other plans. Horovod's are the broadcast of
parameters and optimizer state, the DistributedOptimizer with its compression, and the average of evaluations.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.engine.clock import Clock
from horizonml.engine.engine import Engine, Step, Totals
from horizonml.engine.group import Group
from horizonml.engine.optim import Optimizer
from horizonml.engine.sync.allreduce import GradientSum, float_and_other
from horizonml.engine.sync.horovod_connect import connect
from horizonml.errors import PeerLost
from horizonml.job.schema import Adam, Sgd
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan
from horizonml.tasks.task import Batch, Task


class HorovodEngine(Engine):
    """An engine for a plan of one stage."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        group: Group,
        optimizer: Sgd | Adam,
        batch_size: int,
        task: Task,
        compression: str = "none",
    ) -> None:
        """As for `Engine`; `compression` is "none" or "fp16". Horovod must be installed (see `launch`)."""
        assert len(plan.stages) == 1
        self._hvd, self._alike_everywhere = connect(group), False
        super().__init__(plan, model, group, optimizer, batch_size, task, compression)

    def _update_by(self, spec: Sgd | Adam) -> tuple[Optimizer, GradientSum]:
        hvd, compression = self._hvd, self._compression
        updates = _DistributedOptimizer(spec, self.module, hvd, compression)
        sums = _GradientSum(hvd, updates.wrapped, self.module, self.clock, self.group.world_size, compression)
        return updates, sums

    def load_state(self, read: Any, names: Any) -> None:
        """As for `Engine`."""
        super().load_state(read, names)
        self._alike_everywhere = False

    def step(self, batch: Batch, lr: float, number: int, **options: bool) -> Step:
        """As for `Engine`. Before the first step all ranks take over what rank 0 has."""
        if not self._alike_everywhere:
            assert isinstance(self.optimizer, _DistributedOptimizer)
            self._hvd.broadcast_parameters(self.module.state_dict(), root_rank=0)
            self._hvd.broadcast_optimizer_state(self.optimizer.wrapped, root_rank=0)
            self._alike_everywhere = True
            self.clock.pause()
        return super().step(batch, lr, number, **options)

    def _evaluated(self, loss: float, judged: Tensor, samples: float) -> Totals:
        """By Horovod. In a step the engine's own sum stays, for it also separates waiting from transfer."""
        vector = torch.cat([torch.tensor([loss, samples], dtype=torch.float64), judged])
        try:
            total = self._hvd.allreduce(vector, op=self._hvd.Sum, name="evaluation")
        except RuntimeError as error:
            raise _lost(error) from error
        loss, samples, *sums = total.tolist()
        return Totals(loss, self._means(sums, samples), int(samples))


class _DistributedOptimizer(Optimizer):
    """Horovod's wrapper around torch.optim, with state by parameter name."""

    def __init__(self, spec: Sgd | Adam, module: nn.Module, hvd: Any, compression: str) -> None:
        super().__init__(spec, module)
        parameters = list(self._parameters.values())
        if isinstance(spec, Sgd):
            plain: torch.optim.Optimizer = torch.optim.SGD(
                parameters, spec.lr, spec.momentum, 0.0, spec.weight_decay, spec.nesterov, fused=True
            )
        else:
            kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
            first, second = spec.betas
            plain = kind(parameters, spec.lr, (first, second), weight_decay=spec.weight_decay, fused=True)
        self.wrapped = hvd.DistributedOptimizer(
            plain, self._parameters.items(), compression=getattr(hvd.Compression, compression), op=hvd.Sum
        )
        # Without state Horovod's broadcast would take a step to make some.
        self.load({name: self._initial(parameter) for name, parameter in self._parameters.items()})

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """As for `Optimizer`."""
        super().load(state)
        for name, parameter in self._parameters.items():
            self.wrapped.state[parameter] = self.state.setdefault(name, {})

    def step(self, lr: float) -> None:
        """Update, with gradients that are summed already."""
        for group in self.wrapped.param_groups:
            group["lr"] = lr
        with self.wrapped.skip_synchronize():
            self.wrapped.step()
        self.state = {name: self.wrapped.state[parameter] for name, parameter in self._parameters.items()}


class _GradientSum:
    """Gradients are on their way as soon as the backward pass has made them; here their end is awaited."""

    def __init__(
        self, hvd: Any, optimizer: Any, module: nn.Module, clock: Clock, world_size: int, compression: str
    ) -> None:
        self._hvd, self._optimizer, self._clock = hvd, optimizer, clock
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._averaged, self._copied = float_and_other(module.buffers())
        size = sum(parameter.nbytes for parameter in self._parameters) // (2 if compression == "fp16" else 1)
        size += 4 * sum(buffer.numel() for buffer in [*self._averaged, *self._copied])
        self.bytes_per_step = 2 * (world_size - 1) * size // world_size  # as a ring sends them
        self._measure = False
        self._own: dict[int, Tensor] = {}
        me = weakref.ref(self)

        def keep(place: int, gradient: Tensor) -> None:
            mine = me()
            if mine is not None and mine._measure:
                mine._own[place] = gradient.detach().clone()

        for place, parameter in enumerate(self._parameters):
            parameter.register_hook(functools.partial(keep, place))

    def begin(self, measure_divergence: bool) -> None:
        """Before a step."""
        self._measure, self._own = measure_divergence, {}

    def arm(self, weight: float) -> None:
        """Horovod has hooks of its own."""

    def finish(self, weight: float) -> float | None:
        """Wait for the sums; BatchNorm's running statistics are averaged by samples, as in all plans."""
        self._clock.switch("transfer", "all-reduce")
        try:
            self._optimizer.synchronize()
            if self._averaged or self._copied:
                self._sum_buffers(weight)
        except RuntimeError as error:
            raise _lost(error) from error
        self._clock.switch("compute", "update")
        if not self._measure or weight == 0:
            return None
        difference = norm = 0.0
        for place, parameter in enumerate(self._parameters):
            assert parameter.grad is not None
            own = self._own.get(place, torch.zeros(()))
            norm += float(parameter.grad.square().sum())
            difference += float((own / weight - parameter.grad).square().sum())
        self._own = {}
        return float((difference / norm) ** 0.5) if norm > 0 else 0.0

    def _sum_buffers(self, weight: float) -> None:
        first = float(self._hvd.rank() == 0)
        parts = [buffer.flatten() * weight for buffer in self._averaged]
        parts += [buffer.flatten().float() * first for buffer in self._copied]
        total = self._hvd.allreduce_(torch.cat(parts), op=self._hvd.Sum, name="buffers")
        buffers = [*self._averaged, *self._copied]
        for buffer, part in zip(buffers, total.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


def _lost(error: RuntimeError) -> PeerLost:
    return PeerLost(f"a peer closed its connection, or did not answer Horovod ({str(error).strip().splitlines()[0]})")
