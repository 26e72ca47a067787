"""Sums gradients with Horovod (Sergeev and Del Balso, 2018).

Horovod fuses and orders the sums itself, in its own thread and over its own connections. Everything else works as with
the other implementations of `GradientSync`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.engine.sync.base import Members, float_and_other, synced_buffers, trainable
from horizonml.engine.sync.horovod_connect import connect
from horizonml.errors import PeerLost
from horizonml.plan.plan import Sync
from horizonml.state.parts import Part


class HorovodSync:
    """Sums gradients over all ranks of a plan with one stage; Horovod must be installed."""

    replicas = 1

    def __init__(self, module: nn.Module, members: Members) -> None:
        """Connect Horovod's ranks. Raises PeerLost, or JobError if Horovod's launcher numbers them differently."""
        self.parts: Mapping[str, Part] = {}
        self._hvd, self._clock, self._first = connect(members.group), members.clock, members.place == 0
        half = members.stage.sync is Sync.HOROVOD_FP16
        self._compression = self._hvd.Compression.fp16 if half else self._hvd.Compression.none
        self._parameters = trainable(module)
        self._averaged, self._copied = float_and_other(synced_buffers(module).values())
        size = sum(parameter.nbytes for parameter in self._parameters.values()) // (2 if half else 1)
        size += 4 * sum(buffer.numel() for buffer in [*self._averaged, *self._copied])
        count = len(members.ranks)
        self.bytes_sent = 2 * (count - 1) * size // count  # as a ring sends them
        self._armed = self._measure = False
        self._own: dict[str, Tensor] = {}
        self._under_way: dict[str, tuple[int, Any]] = {}
        names = {id(parameter): name for name, parameter in self._parameters.items()}

        def ready(parameter: nn.Parameter) -> None:
            if self._armed:
                self._send(names[id(parameter)])

        self._hooks = [parameter.register_post_accumulate_grad_hook(ready) for parameter in self._parameters.values()]

    def begin(self, measure_divergence: bool) -> None:
        """See `GradientSync`."""
        self._armed, self._measure, self._own, self._under_way = False, measure_divergence, {}, {}

    def arm(self, weight: float, pending: Collection[Tensor] | None = None) -> None:
        """See `GradientSync`."""
        self._armed = True
        if pending is not None:
            missing = {id(parameter) for parameter in pending}
            for name, parameter in self._parameters.items():
                if id(parameter) not in missing:
                    self._send(name)

    def _send(self, name: str) -> None:
        parameter = self._parameters[name]
        if parameter.grad is None:  # this member had no samples, or the loss does not depend on the parameter
            parameter.grad = torch.zeros_like(parameter)
        if self._measure:
            self._own[name] = parameter.grad.detach().clone()
        sent, context = self._compression.compress(parameter.grad)
        self._under_way[name] = self._hvd.allreduce_async_(sent, name=name, op=self._hvd.Sum), context

    def finish(self, weight: float) -> float | None:
        """See `GradientSync`."""
        self._clock.switch("transfer", "all-reduce")
        try:
            for name in self._parameters:
                if name not in self._under_way:
                    self._send(name)
            for name, (handle, context) in self._under_way.items():
                total = self._hvd.synchronize(handle)
                self._parameters[name].grad = self._compression.decompress(total, context)
            self._sum_buffers(weight)
        except RuntimeError as error:
            raise PeerLost(
                f"a peer closed its connection, or did not answer Horovod ({str(error).strip().splitlines()[0]})"
            ) from error
        self._armed = False
        self._clock.switch("compute", "update")
        return self._divergence(weight) if self._measure and weight > 0 else None

    def _divergence(self, weight: float) -> float:
        difference = norm = 0.0
        for name, own in self._own.items():
            total = self._parameters[name].grad
            assert total is not None
            norm += float(total.square().sum())
            difference += float((own / weight - total).square().sum())
        self._own = {}
        return float((difference / norm) ** 0.5) if norm > 0 else 0.0

    def _sum_buffers(self, weight: float) -> None:
        """Average BatchNorm's running statistics by samples, as `AllReduce` does."""
        buffers = [*self._averaged, *self._copied]
        if not buffers:
            return
        parts = [buffer.flatten() * weight for buffer in self._averaged]
        parts += [buffer.flatten().float() * float(self._first) for buffer in self._copied]
        total = self._hvd.allreduce_(torch.cat(parts), op=self._hvd.Sum, name="buffers")
        for buffer, part in zip(buffers, total.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))

    def close(self) -> None:
        """See `GradientSync`."""
        for hook in self._hooks:
            hook.remove()
