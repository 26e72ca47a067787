"""Sums the gradients of a stage over its members, while the backward pass still runs where it can.

Every member's loss is its samples' sum divided by the size of the global batch, so the plain sum of the members'
gradients is exactly `sum_d (b_d / B) g_d`, whatever their shares. Gradients are gathered in flat buckets in the order
in which the backward pass makes them; a full bucket is sent on its way while earlier layers still compute (Li et al.,
VLDB 2020). A stage with few parameters is summed along a tree in one piece instead (see `TreeSum`).

BatchNorm's running statistics travel in the last bucket and are averaged by samples, so that all members of a stage
hold the same state after every step. Where gradients are compressed, they do so in a message of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from horizonml.engine.clock import Clock
from horizonml.engine.group import Group, TreeSum, Work
from horizonml.engine.sync.compressed import Compressed, compressed
from horizonml.plan.gradients import BUCKET_BYTES, in_buckets

# Up to these sizes a tree is faster than a ring: over a network, where its root carries n times the bytes, and on one
# machine, where only the number of messages counts.
TREE_BYTES = 128 << 10
TREE_BYTES_ON_ONE_HOST = 4 << 20


@dataclass
class _Bucket:
    """Parameters whose gradients travel together; `extra` values follow them in the buffer."""

    parameters: list[nn.Parameter]
    extra: int = 0
    flat: Tensor = field(init=False)
    views: list[Tensor] = field(init=False)
    missing: int = 0
    own: Tensor | None = None  # a copy of this member's own gradients, on steps that measure divergence

    def __post_init__(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        self.flat = torch.zeros(sum(sizes) + self.extra)
        parts = self.flat[: sum(sizes)].split(sizes) if sizes else ()
        self.views = [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]

    @property
    def tail(self) -> Tensor:
        return self.flat[self.flat.numel() - self.extra :]


class GradientSum(Protocol):
    """Sums gradients within a stage. For each step: `begin`, then `arm` before the last backward pass, `finish`."""

    bytes_per_step: int

    def begin(self, measure_divergence: bool) -> None: ...

    def arm(self, weight: float) -> None: ...

    def finish(self, weight: float) -> float | None: ...


class Reducer:
    """Sums gradients over `ranks`, the members of a stage, of which this rank is one."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        buffers: Iterable[Tensor],
        group: Group,
        ranks: tuple[int, ...],
        clock: Clock,
        tag: int,
        alike: bool = False,
        compression: str = "none",
    ) -> None:
        """All parameters must be float32. `tag` must be free for this stage's tree.

        `alike` says that all members compute the same gradients, so that they are averaged. `compression` is "none",
        "fp16" or "powersgd"; of the sums only, so that all members still hold the same.
        """
        self._group, self._ranks, self._clock, self._alike = group, ranks, clock, alike
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._lead = ranks[0] == group.rank
        averaged, copied = float_and_other(buffers)
        self._averaged, self._copied = averaged, copied
        extra = sum(buffer.numel() for buffer in [*self._averaged, *self._copied])
        self._buckets: list[_Bucket] = []
        self.bytes_per_step = 0  # sent, and as many received
        if len(ranks) == 1:
            return
        # torch's PowerSGD hangs with more than one bucket on gloo.
        limit = float("inf") if compression == "powersgd" else BUCKET_BYTES
        parts = in_buckets([parameter.nbytes for parameter in self._parameters], limit)
        self._buckets = [_Bucket([self._parameters[i] for i in part]) for part in parts] or [_Bucket([])]
        self._compressed: Compressed | None = None
        if compression != "none":
            self._compressed = compressed(compression, group, ranks, [p.shape for p in self._parameters])
            if extra:
                self._buckets.append(_Bucket([], extra))
        elif extra:
            last = self._buckets[-1]
            self._buckets[-1] = _Bucket(last.parameters, extra)
        total = sum(bucket.flat.nbytes for bucket in self._buckets)
        self._tree = None
        if self._compressed is not None:
            self._whole = (total - 4 * extra, 4 * extra)
        elif total <= (TREE_BYTES_ON_ONE_HOST if group.on_one_host(ranks) else TREE_BYTES):
            assert len(self._buckets) == 1
            self._tree = TreeSum(group, ranks, tag, self._buckets[0].flat)
            self.bytes_per_step = total * self._tree.messages
        else:
            self.bytes_per_step = 2 * (len(ranks) - 1) * total // len(ranks)
        if self._tree is None:
            # Now, while all members are here: one without samples comes to its first sum only after the others' loss,
            # for which they would wait while they wait for it to connect.
            group.among(ranks)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._armed = False
        self._measure = False
        self._works: list[Work] = []
        # A strong reference would be a circle through autograd, which Python cannot collect: connections stay open.
        me = weakref.ref(self)

        def ready(parameter: nn.Parameter) -> None:
            reducer = me()
            if reducer is not None:
                reducer._ready(parameter)

        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(ready)

    def begin(self, measure_divergence: bool) -> None:
        """Before a step; no parameter has a gradient."""
        if self._buckets:
            self._measure = measure_divergence
            self._works = []
            for bucket in self._buckets:
                bucket.missing, bucket.own = len(bucket.parameters), None
            if self._compressed is not None:
                sent = self._compressed.ratio * self._whole[0] + self._whole[1]
                self.bytes_per_step = int(2 * (len(self._ranks) - 1) * sent / len(self._ranks))
            if self._tree is not None:
                self._tree.post()

    def arm(self, weight: float) -> None:
        """Before the last backward pass of the step; `weight` is this member's part of the batch.

        All forward passes are done, so the running statistics are final.
        """
        if not self._buckets:
            return
        self._armed, self._weight = True, weight
        if self._buckets[-1].extra:
            averaged = [buffer.flatten() * weight for buffer in self._averaged]
            copied = [buffer.flatten().float() * self._lead for buffer in self._copied]
            torch.cat(averaged + copied, out=self._buckets[-1].tail)

    def _ready(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient of the whole step."""
        if self._armed:
            self._bucket_of[id(parameter)].missing -= 1
            self._send_full()

    def _send_full(self) -> None:
        """Send the buckets that are full, in their order, which is the same on all members."""
        while len(self._works) < len(self._buckets) and not self._buckets[len(self._works)].missing:
            self._works.append(self._send(self._buckets[len(self._works)]))

    def _send(self, bucket: _Bucket) -> Work:
        gradients = []
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:  # this member had no samples, or the loss does not depend on it
                view.zero_()
                gradients.append(view)
            else:
                gradients.append(parameter.grad)
        if gradients:
            torch._foreach_copy_(bucket.views, gradients)
        if self._alike:
            bucket.flat[: bucket.flat.numel() - bucket.extra].mul_(self._weight)
        for parameter in bucket.parameters:
            parameter.grad = None
        if self._measure:
            bucket.own = bucket.flat[: bucket.flat.numel() - bucket.extra].clone()
        if self._tree is not None:
            return _Done()
        if self._compressed is not None and bucket.parameters:
            return self._compressed.begin(bucket.flat, bucket.views)
        return self._group.all_reduce(bucket.flat, self._ranks)

    def finish(self, weight: float) -> float | None:
        """After the last backward pass: wait for the sums and make them the parameters' gradients.

        Returns the divergence `|g_i - g| / |g|` of this member's own mean gradient from the stage's, if `begin`
        asked for it and this member had samples. `weight` as for `arm`.
        """
        if not self._buckets:
            return None
        if not self._armed:  # no samples here, so no backward pass either
            self.arm(weight)
        for bucket in self._buckets:
            bucket.missing = 0
        self._send_full()
        self._armed = False
        self._clock.switch("transfer", "all-reduce")
        if self._tree is not None:
            total = self._tree.sum(self._buckets[0].flat)
            if total is not self._buckets[0].flat:
                self._buckets[0].flat.copy_(total)
        for work in self._works:
            self._group.wait(work)
        self._clock.switch("compute", "update")
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self._take_buffers()
        # Where all compute the same gradients there is nothing to compare.
        return self._divergence(weight) if self._measure and weight > 0 and not self._alike else None

    def _take_buffers(self) -> None:
        if not self._buckets[-1].extra:
            return
        buffers = [*self._averaged, *self._copied]
        parts = self._buckets[-1].tail.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))

    def _divergence(self, weight: float) -> float:
        difference = norm = 0.0
        for bucket in self._buckets:
            assert bucket.own is not None
            total = bucket.flat[: bucket.own.numel()]
            norm += float(total.square().sum())
            difference += float((bucket.own / weight - total).square().sum())
            bucket.own = None
        return float((difference / norm) ** 0.5) if norm > 0 else 0.0


def float_and_other(buffers: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Buffers that can be averaged, and those that are counts or flags."""
    every = list(buffers)
    return [b for b in every if b.is_floating_point()], [b for b in every if not b.is_floating_point()]


class _Done:
    """The sum of a bucket that waits for the tree."""

    def wait(self) -> None:
        return None
