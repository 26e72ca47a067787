"""Chooses the device that a rank computes on, and determines how much memory it has there.

The temperature and the utilization of an NVIDIA GPU come from its driver's library, or from a Jetson's kernel.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from horizonml.errors import JobError
from horizonml.machine.host import check_device, memory_limit, processor_name, text
from horizonml.machine.sensors import number

_LIBRARY = "libnvidia-ml.so.1"  # is a part of the driver
_CORE = 0  # the temperature sensor that every GPU has


class GpuReadings(NamedTuple):
    """Holds what a GPU tells of itself; a value is None where it does not."""

    temperature: float | None = None  # degrees Celsius
    utilisation: float | None = None  # the part of the last moment in which it computed, from 0 to 1


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def readings(uuid: str, root: Path = Path("/sys")) -> GpuReadings:
    """Return what the GPU with this identifier tells now."""
    handle = _handle(uuid)
    return _jetson(root) if handle is None else _asked(*handle)


@functools.cache
def _handle(uuid: str) -> tuple[Any, Any] | None:
    """Return the driver's library and a handle of a GPU, or None where there is no such library."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        found = library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    except (OSError, AttributeError) as error:
        _log.debug("the GPU's driver has no %s: %s", _LIBRARY, error)
        return None
    return None if found else (library, handle)


def _asked(library: Any, handle: Any) -> GpuReadings:
    degrees, rates = ctypes.c_uint(), _Rates()
    hot = library.nvmlDeviceGetTemperature(handle, _CORE, ctypes.byref(degrees)) == 0
    used = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0
    return GpuReadings(float(degrees.value) if hot else None, rates.gpu / 100 if used else None)


def _jetson(root: Path) -> GpuReadings:
    """Return what the kernel of a Jetson tells of its GPU."""
    zones = (zone for zone in sorted(root.glob("class/thermal/thermal_zone*")) if "gpu" in text(zone / "type").lower())
    degrees = next((number(zone / "temp", 1e3) for zone in zones), None)
    loads = [*root.glob("devices/gpu.0/load"), *root.glob("devices/platform/*gpu*/load")]
    return GpuReadings(degrees, number(loads[0], 1e3) if loads else None)


_DOCS = "docs/speed.md says how"
_log = logging.getLogger(__name__)


PROCESSOR = torch.device("cpu")


@dataclass(frozen=True)
class Compute:
    """Describes what a rank computes on: the processor, or an accelerator."""

    device: torch.device = PROCESSOR
    name: str = field(default_factory=processor_name)
    why: str = ""  # why an accelerator is left alone that the rank might have used
    shared: bool = False  # whether its memory is also the host's, as on a Jetson

    @property
    def accelerates(self) -> bool:
        """Return whether this is an accelerator."""
        return self.device.type != "cpu"

    @property
    def described(self) -> str:
        """Return the device in words."""
        return f"{self.name} ({self.device})" if self.accelerates else self.name

    @property
    def label(self) -> str:
        """Return the device's number on its machine, such as "cuda:0", which is empty for the processor."""
        return str(self.device) if self.accelerates else ""

    def has_bf16(self) -> bool:
        """Return whether the device computes with bfloat16 itself; on processors, a trial of layers finds that out."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        return not self.accelerates or _bf16_works(self.device)

    def taken(self) -> float | None:
        """Return the bytes that this process has taken there; None for the processor."""
        if self.device.type == "cuda":
            return float(torch.cuda.memory_reserved(self.device))
        return float(torch.mps.driver_allocated_memory()) if self.device.type == "mps" else None

    def readings(self) -> GpuReadings:
        """Return the temperature and the use of the accelerator, where it tells them."""
        if self.device.type != "cuda":
            return GpuReadings()
        return readings(str(getattr(torch.cuda.get_device_properties(self.device), "uuid", "")))

    def memory(self) -> float | None:
        """Return the bytes that this process may use there; None for the processor."""
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            fraction = torch.cuda.get_per_process_memory_fraction(self.device)
            return float(min(free + torch.cuda.memory_reserved(self.device), fraction * total))
        if self.device.type == "mps":
            return float(min(torch.mps.recommended_max_memory(), memory_limit()))
        return None


_used = [Compute()]


def computing() -> Compute:
    """Return what this process computes on; like the number of threads, it holds for all that it does."""
    return _used[0]


def use(compute: Compute) -> None:
    """Compute on a device from now on."""
    _used[0] = compute


def synchronised() -> float:
    """Wait until the accelerator is done with all that it has been given, and return the time (`perf_counter`)."""
    (torch.cuda if _used[0].device.type == "cuda" else torch.mps).synchronize()
    return time.perf_counter()


def choose_device(requested: str, place: int, source: str = "device") -> Compute:
    """Return what a rank computes on that is number `place` of the ranks on its machine.

    `requested` is what the field `device` may say, and `source` the name of what says it. With "auto", the ranks take
    one GPU each, as far as there are any that can be used; with "cuda", they share what there is. Raises JobError.
    """
    check_there(requested, source)
    processor = Compute()
    if requested == "cpu":
        return processor
    if requested == "mps":
        return _mps(source)
    if requested == "auto":
        if _without_cuda() is not None or place >= torch.cuda.device_count():
            return processor
        found, trouble = _cuda(place)
        return found if trouble is None else Compute(PROCESSOR, processor.name, f"{found.name} is not used: {trouble}")
    number = int(requested.partition(":")[2] or place % torch.cuda.device_count())
    found, trouble = _cuda(number)
    if trouble is not None:
        raise JobError(f"{source}: {requested}, but {found.name} cannot be used: {trouble} ({_DOCS}); or choose cpu")
    return found


def check_there(requested: str, source: str) -> None:
    """Raise JobError if the requested device does not exist.

    Nothing is computed on the device, so that this process takes none of its memory.
    """
    check_device(requested, source)
    if requested == "mps" and not torch.backends.mps.is_available():
        raise JobError(f"{source}: mps, but PyTorch finds no Apple GPU here; choose cpu, or cuda for an NVIDIA GPU")
    if not requested.startswith("cuda"):
        return
    trouble = _without_cuda()
    if trouble is not None:
        raise JobError(f"{source}: {requested}, but {trouble} ({_DOCS}); or choose cpu")
    count = torch.cuda.device_count()
    if int(requested.partition(":")[2] or 0) >= count:
        raise JobError(
            f"{source}: {requested}, but the GPUs here have the numbers 0 to {count - 1}; choose one of them"
        )


def cuda_devices() -> int:
    """Return how many CUDA devices this process can compute on."""
    return 0 if _without_cuda() is not None else torch.cuda.device_count()


def _without_cuda() -> str | None:
    """Return why no NVIDIA GPU can be used here, or None if there is one."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this build of PyTorch ({torch.__version__}) is for processors only: install a CUDA build"
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return "PyTorch finds no GPU here: see whether `nvidia-smi` does, and whether the container may use it"
    return None


def _cuda(number: int) -> tuple[Compute, str | None]:
    """Return a GPU, and why it cannot be used, or None if it has computed something."""
    device = torch.device("cuda", number)
    properties = torch.cuda.get_device_properties(device)
    found = Compute(device, properties.name, shared=bool(getattr(properties, "is_integrated", False)))
    return found, _try(device)


def _mps(source: str) -> Compute:
    device = torch.device("mps", 0)
    trouble = _try(device)
    if trouble is not None:
        raise JobError(f"{source}: mps, but the GPU cannot be used: {trouble}; choose cpu")
    return Compute(device, "Apple GPU", shared=True)


def _try(device: torch.device) -> str | None:
    """Return what goes wrong when a device computes something small, or None."""
    try:
        weight = torch.ones(8, 8, device=device, requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad is not None
        right = float(weight.grad.sum()) == 2 * 8**3
    except (RuntimeError, AssertionError) as error:  # such as a GPU that is too old or too new for the build
        _log.debug("trying %s", device, exc_info=True)
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None if right else "it computes a wrong result"


def _bf16_works(device: torch.device) -> bool:
    """Return whether a device multiplies small matrices in bfloat16, where PyTorch cannot say so."""
    try:
        weight = torch.ones(8, 8, device=device, requires_grad=True)
        with torch.autocast(device.type, torch.bfloat16):
            product = weight @ weight
        product.float().sum().backward()
        return product.dtype == torch.bfloat16 and weight.grad is not None and float(weight.grad.sum()) == 2 * 8**3
    except (RuntimeError, TypeError):
        _log.debug("trying bfloat16 on %s", device, exc_info=True)
        return False
