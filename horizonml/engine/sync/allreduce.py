"""Sums the gradients of a stage over its members, overlapping with the backward pass where possible.

Every member's loss is the sum over its samples divided by the size of the global batch, so the plain sum of the
members' gradients is exactly `sum_d (b_d / B) g_d`, whatever their shares. Gradients are gathered in flat buckets in
the order in which the backward pass computes them; a full bucket is sent while earlier layers are still being computed
(Li et al., VLDB 2020). The gradients of a stage with few parameters are instead summed in one piece along a tree (see
`TreeSum`).

BatchNorm's running statistics travel in the last bucket and are averaged by samples, so all members of a stage hold the
same state after every step. With them travels which parameters have a gradient at all: the optimizer leaves those alone
that have none, as it does in one process. Where gradients are compressed, both travel in a message of their own.

Where each member has its own GPU in the same machine, NCCL sums without leaving the GPUs. NCCL is tried before it is
used, and all members agree on the result; where it fails for any of them, gloo sums, as everywhere else. A member that
is lost would leave NCCL waiting forever, so the process waits with a deadline of its own and breaks the sums off.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore

from horizonml.comm.group import TreeSum
from horizonml.comm.work import Done, Work
from horizonml.engine.staging import CPU
from horizonml.engine.sync.base import Members, SyncedBuffers, trainable
from horizonml.errors import ModelError, PeerLost
from horizonml.plan.syncs import BUCKET_BYTES, TREE_BYTES, TREE_BYTES_ON_ONE_HOST, in_buckets
from horizonml.state.parts import TensorSplit


@dataclass
class Bucket:
    """Groups parameters whose gradients travel together; `extra` numbers follow them in the buffer."""

    parameters: list[nn.Parameter]
    extra: int = 0
    device: torch.device = CPU
    wide: bool = False  # whether what follows needs 64 bits
    flat: Tensor = field(init=False)
    views: list[Tensor] = field(init=False)
    missing: int = 0
    own: Tensor | None = None  # this member's own gradients, copied on steps that measure divergence

    def __post_init__(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        double = self.wide or any(parameter.dtype == torch.float64 for parameter in self.parameters)
        dtype = torch.float64 if double else torch.float32
        self.flat = torch.zeros(sum(sizes) + self.extra, dtype=dtype, device=self.device)
        parts = self.flat[: sum(sizes)].split(sizes) if sizes else ()
        # In the parameter's own memory format, since the fused update walks through memory as it lies.
        self.views = [
            part.as_strided(parameter.size(), parameter.stride(), part.storage_offset())
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]

    @property
    def tail(self) -> Tensor:
        return self.flat[self.flat.numel() - self.extra :]


class AllReduce:
    """Sums gradients as 32-bit floats over two or more members."""

    def __init__(self, module: nn.Module, members: Members, split: Mapping[str, TensorSplit] | None = None) -> None:
        """Join the sums of a stage. Raises PeerLost.

        `split` names the parameters and buffers of which each member holds its own part; these are not summed. With
        `split`, all members compute the same gradients of the remaining parameters, and these are averaged.
        """
        self.replicas = 1 if split is None else len(members.ranks)
        self.parts: Mapping[str, TensorSplit] = split or {}
        self._members, self._group, self._clock = members, members.group, members.clock
        self._staging, self._device = members.staging, members.staging.device
        self._named = {name: parameter for name, parameter in trainable(module).items() if name not in self.parts}
        self._parameters = list(self._named.values())
        self._seen: set[int] = set()  # those whose gradients are complete, by their hooks
        self._buffers = SyncedBuffers(module, lambda name: name not in self.parts)
        averaged, copied = self._buffers.float_and_other()
        numbers = sum(buffer.numel() for buffer in averaged) + sum(buffer.nbytes for buffer in copied)
        self._wide = any(buffer.dtype == torch.float64 for buffer in averaged)
        self._has_buffers = bool(averaged or copied)
        self._buckets = self._make_buckets(len(self._parameters) + numbers)
        self._present: list[bool] = []  # whether each parameter that has been sent has a gradient, in their order
        total = sum(bucket.flat.nbytes for bucket in self._buckets)
        self._tree = self._make_tree(total)
        count = len(members.ranks)
        self._bytes = total * self._tree.messages if self._tree else 2 * (count - 1) * total // count
        self.bytes_sent, self.are_finite = 0, False
        if self._tree is None:
            # Connect while all members are here. A member without samples would begin its first sum only after the loss
            # has been exchanged, and the others would wait for its connection before they exchange the loss.
            self._group.among(members.ranks, members.number)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._armed = self._measure = False
        self._works: list[Work] = []
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._ready) for parameter in self._parameters]

    def _make_buckets(self, extra: int) -> list[Bucket]:
        """Return the buckets in the order in which they are sent; the last has room for `extra` values of buffers."""
        parts = in_buckets([parameter.nbytes for parameter in self._parameters], BUCKET_BYTES)
        grouped = [[self._parameters[index] for index in part] for part in parts] or [[]]
        last = Bucket(grouped[-1], extra, self._device, self._wide)
        return [*(Bucket(own, device=self._device) for own in grouped[:-1]), last]

    def _make_tree(self, total: int) -> TreeSum | None:
        """Return a tree if it is faster than a ring for `total` bytes, or None."""
        ranks = self._members.ranks
        if total > (TREE_BYTES_ON_ONE_HOST if self._group.on_one_host(ranks) else TREE_BYTES):
            return None
        assert len(self._buckets) == 1
        tag = self._group.channel("gradients").tag(self._members.number)
        return TreeSum(self._group, ranks, tag, self._staging.to_host(self._buckets[0].flat))

    def close(self) -> None:
        """See `GradientSync`. The gradients are dropped too, because they lie in the buckets."""
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None
        self._buckets, self._bucket_of, self._works, self._tree = [], {}, [], None

    def begin(self, measure_divergence: bool) -> None:
        """See `GradientSync`."""
        self._measure, self._works, self._present, self._armed = measure_divergence, [], [], False
        self._seen = set()
        self._buffers.begin()
        self.bytes_sent, self.are_finite = self._bytes, False
        for bucket in self._buckets:
            bucket.missing, bucket.own = len(bucket.parameters), None
        if self._tree is not None:
            self._tree.post()

    def arm(self, weight: float, pending: Collection[Tensor] | None = None) -> None:
        """See `GradientSync`."""
        self._armed, self._weight = True, weight
        if pending is not None:
            missing = {id(parameter) for parameter in pending}
            for parameter in self._parameters:
                self._bucket_of[id(parameter)].missing -= id(parameter) not in missing
            self._send_full()

    def _ready(self, parameter: nn.Parameter) -> None:
        """Note that a parameter has its gradient of the whole step. Raises ModelError if it had it before."""
        if self._armed:
            if id(parameter) in self._seen:
                name = next(name for name, one in self._named.items() if one is parameter)
                raise ModelError(
                    f"parameter {name} gets its gradient in several pieces, as with a checkpoint that uses the same "
                    "module more than once; call torch.utils.checkpoint with use_reentrant=False"
                )
            self._seen.add(id(parameter))
            bucket = self._bucket_of[id(parameter)]
            bucket.missing -= 1
            if not bucket.missing:
                self._send_full()

    def _send_full(self, all_done: bool = False) -> None:
        """Send the buckets that are full, in their order, which is the same on all members.

        The last one has the buffers, which are final when `all_done` is true: after the backward pass, in which the
        hooks of a module, or a forward that is repeated for a checkpoint, may change them.
        """
        until = len(self._buckets) - (self._has_buffers and not all_done)
        while len(self._works) < until and not self._buckets[len(self._works)].missing:
            self._works.append(self._send(self._buckets[len(self._works)]))

    def _put_buffers(self, weight: float) -> None:
        if self._has_buffers:
            self._buckets[-1].tail[len(self._parameters) :].copy_(self._buffers.to_sum(weight, self._members.leads))

    def _send(self, bucket: Bucket) -> Work:
        gradients = []
        self._present += [parameter.grad is not None for parameter in bucket.parameters]
        if bucket is self._buckets[-1]:
            present = torch.tensor(self._present, dtype=bucket.flat.dtype)
            bucket.tail[: len(self._parameters)] = self._staging.to_device(present)
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is None:  # this member had no samples, or the loss does not depend on the parameter
                view.zero_()
                gradients.append(view)
            else:
                gradients.append(parameter.grad)
        if gradients:
            torch._foreach_copy_(bucket.views, gradients)
        if self.replicas > 1:
            bucket.flat[: bucket.flat.numel() - bucket.extra].mul_(self._weight)
        for parameter in bucket.parameters:
            parameter.grad = None
        if self._measure:
            bucket.own = bucket.flat[: bucket.flat.numel() - bucket.extra].clone()
        return Done() if self._tree is not None else self._sum(bucket.flat, bucket.views)  # a tree sums in `finish`

    def _sum(self, flat: Tensor, views: Sequence[Tensor]) -> Work:
        """Begin to sum a bucket in place; `views` are its gradients."""
        return self._staging.sum(flat, self._all_reduce)

    def _all_reduce(self, flat: Tensor) -> Work:
        return self._group.all_reduce(flat, self._members.ranks, self._members.number)

    def send_rest(self, weight: float) -> None:
        """See `GradientSync`."""
        if not self._armed:  # no samples here, so no backward pass either
            self.arm(weight)
        for bucket in self._buckets:
            bucket.missing = 0
        if len(self._works) < len(self._buckets):
            self._put_buffers(weight)
            self._send_full(all_done=True)

    def finish(self, weight: float) -> float | None:
        """See `GradientSync`."""
        self.send_rest(weight)
        self._armed = False
        self._staging.drain()
        own = self._staging.to_host(self._buckets[0].flat) if self._tree is not None else None
        self._clock.switch("transfer", "all-reduce")
        if self._tree is not None and own is not None:
            total = self._tree.sum(own)
            if total is not self._buckets[0].flat:
                self._buckets[0].flat.copy_(self._staging.to_device(total))
        seen = 0.0
        for bucket, work in zip(self._buckets, self._works, strict=True):
            self._group.wait(work)
            # It is in the processor's cache now, and later ones may still be on their way.
            seen += float(bucket.flat[: bucket.flat.numel() - bucket.extra].sum())
        # Members that split channels sum only some gradients, and smaller numbers may overflow on their way back.
        alike = all(view.dtype == p.dtype for b in self._buckets for p, view in zip(b.parameters, b.views, strict=True))
        self.are_finite = math.isfinite(seen) and alike and not self.parts
        self._clock.switch("compute", "update")
        present = iter(self._buckets[-1].tail[: len(self._parameters)].tolist())
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                # No gradient at all, if no member has one: then the optimizer leaves the parameter alone.
                summed = view if view.dtype == parameter.dtype else view.to(parameter.dtype)
                parameter.grad = summed if next(present) else None
        if self._has_buffers:
            self._buffers.take(self._buckets[-1].tail[len(self._parameters) :])
        # Where all members compute the same gradients, there is nothing to compare.
        return self._divergence(weight) if self._measure and weight > 0 and self.replicas == 1 else None

    def _divergence(self, weight: float) -> float:
        difference = norm = 0.0
        for bucket in self._buckets:
            assert bucket.own is not None
            total = bucket.flat[: bucket.own.numel()]
            norm += float(total.square().sum())
            difference += float((bucket.own / weight - total).square().sum())
            bucket.own = None
        return float((difference / norm) ** 0.5) if norm > 0 else 0.0


_log = logging.getLogger(__name__)
_LOOK_SECONDS = 5e-5  # between two looks at whether a sum is complete
_TRIAL_SECONDS = 60.0


def has_gpus_of_its_own(members: Members) -> bool:
    """Return whether each member of a stage has an NVIDIA GPU of its own, all of them in one machine."""
    devices = [members.group.devices.get(rank, "") for rank in members.ranks]
    gpus = all(device.startswith("cuda") for device in devices) and len({*devices}) == len(devices)
    return gpus and members.group.on_one_host(members.ranks)


def exact_sums(module: nn.Module, members: Members) -> AllReduce:
    """Return what sums the gradients of a stage as 32-bit floats; all members call this together. Raises PeerLost."""
    return (NcclAllReduce if has_gpus_of_its_own(members) else AllReduce)(module, members)


class NcclAllReduce(AllReduce):
    """Sums the buckets where they are, while the backward pass goes on."""

    def __init__(self, module: nn.Module, members: Members) -> None:
        """Join the sums of a stage. Raises PeerLost."""
        self._nccl = _connect(members)
        super().__init__(module, members)

    def _make_tree(self, total: int) -> None:
        return None if self._nccl is not None else super()._make_tree(total)  # type: ignore[return-value]

    def _sum(self, flat: Tensor, views: Any) -> Work:
        if self._nccl is None:
            return super()._sum(flat, views)
        return _Sum(self._nccl, self._nccl.allreduce([flat]), self._members)

    def close(self) -> None:
        """See `GradientSync`."""
        super().close()
        self._nccl = None


class _Sum:
    """Stands for a sum that is under way."""

    def __init__(self, nccl: Any, work: Any, members: Members, seconds: float | None = None) -> None:
        self._nccl, self._work, self._group = nccl, work, members.group
        self._seconds = members.group.timeout if seconds is None else seconds

    def wait(self) -> None:
        until = time.monotonic() + self._seconds
        while not self._work.is_completed():
            if self._group.is_over or time.monotonic() > until:
                self._nccl.abort()
                raise PeerLost("a peer did not take part in a sum by NCCL in time", timed_out=True)
            time.sleep(_LOOK_SECONDS)
        self._work.wait()  # lets the stream that computes wait, and raises what went wrong


def _connect(members: Members) -> Any | None:
    """Return a process group of NCCL that has summed once, or None if that fails for any member. Raises PeerLost."""
    made, problem = None, ""
    try:
        made = _make(members)
        tensor = torch.ones(1, device=members.staging.device)
        _Sum(made, made.allreduce([tensor]), members, _TRIAL_SECONDS).wait()
        problem = "" if float(tensor) == len(members.ranks) else "it computes a wrong sum"
    except (RuntimeError, ImportError, AttributeError, PeerLost) as error:
        problem = str(error).strip().partition("\n")[0]
    works = members.group.all_gather(torch.tensor([float(not problem)]), members.ranks)
    if all(float(one) for one in works):
        return made
    _log.warning("gloo sums instead of NCCL%s", f": {problem}" if problem else "; it fails for another rank")
    if made is not None:
        made.abort()
    return None


def _make(members: Members) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only in builds for GPUs

    # Or NCCL's own watchdog would end the process when a peer is lost.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=members.group.timeout)
    store = PrefixStore(f"nccl-{members.number}", members.group.store)
    return ProcessGroupNCCL(store, members.place, len(members.ranks), options)
