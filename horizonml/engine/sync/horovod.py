"""Sums gradients with Horovod (Sergeev and Del Balso, 2018).

Horovod fuses and orders the sums itself, in its own thread and over its own connections, which it makes through the
group that its ranks are in, through their launcher, or through MPI. Everything else works as with the other
implementations of `GradientSync`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from horizonml.comm.group import Group
from horizonml.engine.sync.base import Members, SyncedBuffers, trainable
from horizonml.errors import JobError, PeerLost
from horizonml.machine.network import address_of
from horizonml.state.parts import TensorSplit

_OURS = "HORIZONML_HOROVOD"  # set where the rendezvous comes from this module
# The variable that each MPI sets for its ranks, and the library that Horovod must be built with to use that MPI.
_MPI = {"OMPI_COMM_WORLD_RANK": b"libmpi.so", "PMI_RANK": b"libmpich.so"}


def connect(group: Group) -> Any:
    """Return Horovod, connected among the ranks of `group`.

    `horovodrun` and MPI bring their own connections; otherwise rank 0 serves the rendezvous of Horovod's gloo. Where
    the ranks do not all come within HOROVOD_GLOO_TIMEOUT_SECONDS (30 by default), Horovod itself aborts the process.
    Raises PeerLost and JobError.
    """
    import horovod.torch as hvd

    given = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ and not os.environ.get(_OURS)
    if not given and not _under_mpi():
        os.environ.update(rendezvous(group))
    group.at_close(hvd.shutdown)  # which ends Horovod's thread, also where its start fails
    try:
        hvd.init()
    except (RuntimeError, ValueError) as error:
        raise PeerLost(f"rank {group.rank}: Horovod could not connect the ranks: {error}") from error
    if (hvd.rank(), hvd.size()) != (group.rank, group.world_size):
        raise JobError(
            f"Horovod's launcher made this rank {hvd.rank()} of {hvd.size()}, but the job knows it as rank "
            f"{group.rank} of {group.world_size}; start all ranks with one launcher, or set no RANK"
        )
    return hvd


def _under_mpi() -> bool:
    """Return whether this process was started by the MPI that Horovod was built with."""
    wanted = {library for variable, library in _MPI.items() if variable in os.environ}
    import horovod.torch

    content = (
        b"".join(path.read_bytes() for path in Path(horovod.torch.__file__).parent.glob("*.so")) if wanted else b""
    )
    return any(library in content for library in wanted)


def rendezvous(group: Group) -> dict[str, str]:
    """Return the environment that Horovod needs.

    Rank 0 runs a rendezvous server that lives as long as the group.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    address: Any = None
    if group.rank == 0:
        from horovod.runner.http.http_server import RendezvousServer

        server = RendezvousServer()
        address = [address_of(interface), server.start()]
        server.init([])
        group.at_close(server.stop)
    host, port = group.broadcast(address)
    size = str(group.world_size)
    return {
        _OURS: "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": address_of(interface),
        "HOROVOD_RANK": str(group.rank),
        "HOROVOD_SIZE": size,
        "HOROVOD_LOCAL_RANK": "0",  # treats each rank as a machine of its own, which avoids hierarchies
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": str(group.rank),
        "HOROVOD_CROSS_SIZE": size,
    }


_LOOK_SECONDS = 1e-4  # between two looks at whether a sum is done; Horovod's own thread looks every millisecond


@dataclass
class _Sum:
    """Stands for a sum of Horovod's, for which a rank waits no longer than its group lasts.

    Horovod's `synchronize` has no deadline of its own.
    """

    hvd: Any
    group: Group
    handle: int
    context: Any = None  # what decompresses the sum

    def wait(self) -> Tensor:
        """Return the sum. Raises PeerLost."""
        late = time.monotonic() + self.group.timeout
        while not self.hvd.poll(self.handle):
            if self.group.is_over:
                raise PeerLost("the group was broken off")
            if time.monotonic() > late:
                raise PeerLost(f"a peer did not answer Horovod within {self.group.timeout:g} s", timed_out=True)
            time.sleep(_LOOK_SECONDS)
        try:
            total: Tensor = self.hvd.synchronize(self.handle)
        except RuntimeError as error:
            raise _lost(error) from error
        return total

    def forget(self) -> None:
        """Let go of the tensors of a sum that nobody waits for any more; Horovod has been shut down."""
        with suppress(RuntimeError, ValueError):  # raised for a sum that has failed, or was waited for before
            if self.hvd.poll(self.handle):
                self.hvd.synchronize(self.handle)


class HorovodSync:
    """Sums gradients over all ranks of a plan with one stage; Horovod must be installed."""

    replicas = 1
    are_finite = False

    def __init__(self, module: nn.Module, members: Members) -> None:
        """Connect Horovod's ranks. Raises PeerLost, or JobError if Horovod's launcher numbers them differently."""
        self.parts: Mapping[str, TensorSplit] = {}
        members.group.at_close(self._forget)  # before `connect`, and so called after it has shut Horovod down
        self._hvd, self._clock, self._first = connect(members.group), members.clock, members.place == 0
        self._group = members.group
        half = not members.stage.sync.exact
        self._compression = self._hvd.Compression.fp16 if half else self._hvd.Compression.none
        self._parameters = trainable(module)
        self._buffers = SyncedBuffers(module)
        averaged, copied = self._buffers.float_and_other()
        size = sum(parameter.nbytes for parameter in self._parameters.values()) // (2 if half else 1)
        size += 4 * (sum(buffer.numel() for buffer in averaged) + sum(buffer.nbytes for buffer in copied))
        count = len(members.ranks)
        self.bytes_sent = 2 * (count - 1) * size // count  # as a ring sends them
        self._armed = self._measure = False
        self._own: dict[str, Tensor] = {}
        self._under_way: dict[str, _Sum] = {}
        names = {id(parameter): name for name, parameter in self._parameters.items()}

        def ready(parameter: nn.Parameter) -> None:
            if self._armed:
                self._send(names[id(parameter)])

        self._hooks = [parameter.register_post_accumulate_grad_hook(ready) for parameter in self._parameters.values()]

    def begin(self, measure_divergence: bool) -> None:
        """See `GradientSync`."""
        self._armed, self._measure, self._own, self._under_way = False, measure_divergence, {}, {}
        self._buffers.begin()

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
        self._under_way[name] = self._sum(sent, name, context)

    def _sum(self, tensor: Tensor, name: str, context: Any = None) -> _Sum:
        """Begin to sum a tensor in place. Raises PeerLost if Horovod has ended, as it does when a peer is gone."""
        try:
            handle = self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum)
        except (RuntimeError, ValueError) as error:
            raise _lost(error) from error
        return _Sum(self._hvd, self._group, handle, context)

    def send_rest(self, weight: float) -> None:
        """Do nothing: what is left is sent at the end."""

    def finish(self, weight: float) -> float | None:
        """See `GradientSync`."""
        self._clock.switch("transfer", "all-reduce")
        for name in self._parameters:
            if name not in self._under_way:
                self._send(name)
        for name, one in self._under_way.items():
            self._parameters[name].grad = self._compression.decompress(one.wait(), one.context)
        self._under_way = {}
        self._sum_buffers(weight)
        self._armed = False
        self._clock.switch("compute", "update")
        return self._divergence(weight) if self._measure and weight > 0 else None

    def _forget(self) -> None:
        for one in self._under_way.values():
            one.forget()
        self._under_way = {}

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
        own = self._buffers.to_sum(weight, self._first)
        if own.numel():
            self._buffers.take(self._sum(own, "buffers").wait())

    def close(self) -> None:
        """See `GradientSync`."""
        for hook in self._hooks:
            hook.remove()


def _lost(error: Exception) -> PeerLost:
    """Return what is to be raised instead of an error of Horovod's, of which the first sentence says what happened."""
    reason = str(error).strip().partition("\n")[0].partition(". ")[0]
    return PeerLost(f"a peer closed its connection, or did not answer Horovod ({reason})")
