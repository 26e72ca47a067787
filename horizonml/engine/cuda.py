"""Stages tensors through pinned memory for an NVIDIA GPU (or an AMD one, which PyTorch also calls CUDA).

Copies run on two streams beside the one that computes, one for each way. PyTorch's allocator of pinned memory reuses a
block only when the copies that use it are complete, so consecutive messages use different blocks.

Stages tensors for an Apple GPU, which computes in the same memory but has no streams: copies wait for it.

Chooses how a rank stages tensors between the host and the device that it computes on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import perf_counter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from horizonml.engine.staging import Copying, Overlapping, Staging

_log = logging.getLogger(__name__)
_SECONDS = 10.0  # for which the device's clock and that of the process are taken to run equally fast


class _Copy:
    """See `staging.Copy`."""

    def __init__(self, host: Tensor, source: Tensor, event: Any) -> None:
        self.host, self._source, self._event = host, source, event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


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

    def _begin_copy(self, tensor: Tensor) -> _Copy:
        source = tensor.detach()
        host = torch.empty_like(source, device="cpu", memory_format=torch.contiguous_format, pin_memory=self._pins)
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
            event = self._out.record_event()
        source.record_stream(self._out)
        return _Copy(host, source, event)

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
