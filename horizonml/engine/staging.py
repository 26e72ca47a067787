"""Carries tensors between the host's memory, where messages are, and the device that a rank computes on.

Messages, checkpoints and copies of the state consist of tensors in the host's memory. On a rank that computes there,
too, nothing is copied (`Staging`). On an accelerator, what arrives is copied to the device, and what is sent is copied
from it first. `Copying` does both at once. `Overlapping` does not wait for the copies: what has to be done with a
tensor on the host is queued until its copy is complete, and done in the order of the copies: as soon as the rank looks
again, or at the latest before it waits for anybody else (`drain`).

For an NVIDIA GPU (or an AMD one, which PyTorch also calls CUDA), copies run on two streams beside the one that
computes, one for each way, from and to pinned memory. PyTorch's allocator of pinned memory reuses a block only when the
copies that use it are complete, so consecutive messages use different blocks. An Apple GPU computes in the same memory
but has no streams: copies wait for it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from horizonml.comm.work import Work
from horizonml.data.dataset import Tree, mapped
from horizonml.engine.clock import DeviceWatch
from horizonml.models.boundary import Values

CPU = torch.device("cpu")


class Staging:
    """Stages nothing: the rank computes in the host's memory."""

    device = CPU
    has_float64: ClassVar[bool] = True
    host: ClassVar[Mapping[str, Any]] = {}
    """How to allocate memory for messages that arrive: further arguments of `torch.empty`."""

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the host on the device; the host's must not be used any more."""
        return tensor

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the device on the host, at once."""
        return tensor

    def send(self, tensor: Tensor, begin: Callable[[Tensor], None]) -> None:
        """Call `begin` with a tensor of the device on the host, once it is there.

        Nobody may write to the tensor before that.
        """
        begin(tensor)

    def sum(self, tensor: Tensor, begin: Callable[[Tensor], Work]) -> Work:
        """Replace a tensor by its sum: `begin` begins to sum a tensor of the host in place.

        Waiting for the work that is returned completes the sum, on the device.
        """
        return begin(tensor)

    def drain(self) -> None:
        """Wait for all copies to the host that are under way, and begin what waits for them."""

    def clear(self) -> None:
        """Forget what waits for copies."""

    def seed(self, number: int) -> None:
        """Seed the generators that layers draw from: that of the host, and that of the device."""
        torch.default_generator.manual_seed(number)

    def creating(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors that a model or a task creates are on the device."""
        return nullcontext()

    def watch(self) -> DeviceWatch | None:
        """Return what tells the clock until when the device was busy; None if it works while this process does."""
        return None

    def all_to_device(self, tensors: Values) -> Values:
        """Return tensors of the host on the device."""
        return tensors

    def tree_to_device(self, tree: Tree) -> Tree:
        """Return a tree of tensors of the host on the device; those of the host stay as they are."""
        return tree

    def tree_to_host(self, tree: Tree) -> Tree:
        """Return a tree of tensors of the device on the host."""
        return tree


class Copying(Staging):
    """Copies at once, and returns when the copy is complete."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _bring(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the host on the device."""
        return tensor.to(self.device)

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor of the device on the host."""
        return tensor.detach().to(CPU)

    def _put(self, host: Tensor, into: Tensor) -> None:
        """Copy a tensor of the host into one of the device."""
        into.copy_(host)

    def to_device(self, tensor: Tensor) -> Tensor:
        """See `Staging`."""
        return self._bring(tensor)

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Staging`."""
        return self._fetch(tensor)

    def send(self, tensor: Tensor, begin: Callable[[Tensor], None]) -> None:
        """See `Staging`."""
        begin(self._fetch(tensor))

    def sum(self, tensor: Tensor, begin: Callable[[Tensor], Work]) -> Work:
        """See `Staging`."""
        return _Sum(self, tensor, begin)

    def creating(self) -> AbstractContextManager[Any]:
        """See `Staging`."""
        return self.device

    def all_to_device(self, tensors: Values) -> Values:
        """See `Staging`."""
        return tuple(self._bring(tensor) for tensor in tensors)

    def tree_to_device(self, tree: Tree) -> Tree:
        """See `Staging`."""
        return mapped(tree, self._bring)

    def tree_to_host(self, tree: Tree) -> Tree:
        """See `Staging`."""
        return mapped(tree, self._fetch)


class _Sum:
    """Stands for the sum of a tensor of the device, which travels to the host, is summed there, and comes back."""

    def __init__(self, staging: Copying, tensor: Tensor, begin: Callable[[Tensor], Work]) -> None:
        self._staging, self._tensor, self._begin = staging, tensor, begin
        self._under_way: tuple[Tensor, Work] | None = None
        staging.send(tensor, self._start)

    def _start(self, host: Tensor) -> None:
        self._under_way = host, self._begin(host)

    def wait(self) -> None:
        self._staging.drain()
        assert self._under_way is not None
        host, work = self._under_way
        work.wait()
        self._staging._put(host, self._tensor)
        self._under_way = None


class Overlapping(Copying, ABC):
    """Copies to the host while the device computes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._queue: deque[tuple[Tensor, Any, Callable[[Tensor], None]]] = deque()

    @abstractmethod
    def _begin_copy(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy a tensor of the device; return that of the host, and an event like `torch.cuda.Event`."""

    def send(self, tensor: Tensor, begin: Callable[[Tensor], None]) -> None:
        """See `Staging`."""
        self._queue.append((*self._begin_copy(tensor), begin))
        while self._queue and self._queue[0][1].query():
            self._begin_first()

    def to_host(self, tensor: Tensor) -> Tensor:
        """See `Staging`."""
        host, event = self._begin_copy(tensor)
        event.synchronize()
        return host

    def drain(self) -> None:
        """See `Staging`."""
        while self._queue:
            self._queue[0][1].synchronize()
            self._begin_first()

    def _begin_first(self) -> None:
        host, _, begin = self._queue.popleft()
        begin(host)

    def clear(self) -> None:
        """See `Staging`."""
        self._queue.clear()


_log = logging.getLogger(__name__)
_SECONDS = 10.0  # for which the device's clock and that of the process are taken to run equally fast


class CudaStaging(Overlapping):
    """Copies on streams of their own, from and to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        torch.cuda.set_device(device)  # for kernels that go by the current device
        # 32-bit floats are not shortened to 19 bits, and a run repeats bit for bit, as on processors.
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic = False, True
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pins = self._can_pin()

    @property
    def host(self) -> Mapping[str, Any]:  # type: ignore[override]
        """See `Staging`."""
        return {"pin_memory": True} if self._pins else {}

    def _can_pin(self) -> bool:
        try:
            torch.empty(1, pin_memory=True)
        except RuntimeError as error:  # a container or a system may forbid it
            _log.warning("memory cannot be pinned, so copies to and from %s take longer: %s", self.device, error)
            return False
        return True

    def _bring(self, tensor: Tensor) -> Tensor:
        source = tensor.pin_memory() if self._pins and not tensor.is_pinned() else tensor
        with torch.cuda.stream(self._in):  # whose memory no kernel uses that was begun before
            found = source.to(self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._in)
        found.record_stream(current)
        return found

    def _begin_copy(self, tensor: Tensor) -> tuple[Tensor, Any]:
        source = tensor.detach()
        host = torch.empty_like(source, device="cpu", memory_format=torch.contiguous_format, pin_memory=self._pins)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
            event = self._out.record_event()
        source.record_stream(self._out)
        return host, event

    def _put(self, host: Tensor, into: Tensor) -> None:
        self._in.wait_stream(torch.cuda.current_stream(self.device))  # which may still read what is overwritten
        with torch.cuda.stream(self._in):
            into.copy_(host, non_blocking=True)
        into.record_stream(self._in)
        torch.cuda.current_stream(self.device).wait_stream(self._in)

    def seed(self, number: int) -> None:
        """See `Staging`."""
        super().seed(number)
        generators = cast(tuple[torch.Generator, ...], torch.cuda.default_generators)
        generators[self.device.index or 0].manual_seed(number)

    def watch(self) -> CudaWatch:
        """See `Staging`."""
        return CudaWatch(self.device)


class CudaWatch:
    """Implements `DeviceWatch` with events, which take note of the device's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reference, self._event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._at: float | None = None  # when the reference was there

    def mark(self) -> None:
        """See `DeviceWatch`."""
        stream = torch.cuda.current_stream(self._device)
        if self._at is None or perf_counter() - self._at > _SECONDS:
            self._reference.record(stream)
            self._reference.synchronize()
            self._at = perf_counter()
        self._event.record(stream)

    def finished(self) -> float | None:
        """See `DeviceWatch`."""
        if self._at is None or not self._event.query():
            return None
        return self._at + float(self._reference.elapsed_time(self._event)) / 1e3


class MpsStaging(Copying):
    """Copies at once. These GPUs have no 64-bit floats, so metrics are computed on the host."""

    has_float64: ClassVar[bool] = False

    def seed(self, number: int) -> None:
        """See `Staging`."""
        super().seed(number)
        torch.mps.manual_seed(number)

    def watch(self) -> MpsWatch:
        """See `Staging`."""
        return MpsWatch()


class MpsWatch:
    """Implements `DeviceWatch` by waiting for the device."""

    def __init__(self) -> None:
        self._at = 0.0

    def mark(self) -> None:
        """See `DeviceWatch`."""
        torch.mps.synchronize()
        self._at = perf_counter()

    def finished(self) -> float:
        """See `DeviceWatch`."""
        return self._at


def staging_for(device: torch.device) -> Staging:
    """Return how a rank stages tensors that computes on a device."""
    if device.type == "cpu":
        return Staging()
    if device.type == "cuda":
        return CudaStaging(device)
    return MpsStaging(device)
