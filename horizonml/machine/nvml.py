"""Reads the temperature and the utilization of an NVIDIA GPU, from its driver's library or from a Jetson's kernel."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"  # is a part of the driver
_CORE = 0  # the temperature sensor that every GPU has


class Readings(NamedTuple):
    """Holds what a GPU tells of itself; a value is None where it does not."""

    temperature: float | None = None  # degrees Celsius
    utilisation: float | None = None  # the part of the last moment in which it computed, from 0 to 1


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


def readings(uuid: str, root: Path = Path("/sys")) -> Readings:
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


def _asked(library: Any, handle: Any) -> Readings:
    degrees, rates = ctypes.c_uint(), _Rates()
    hot = library.nvmlDeviceGetTemperature(handle, _CORE, ctypes.byref(degrees)) == 0
    used = library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0
    return Readings(float(degrees.value) if hot else None, rates.gpu / 100 if used else None)


def _jetson(root: Path) -> Readings:
    """Return what the kernel of a Jetson tells of its GPU."""
    zones = (zone for zone in sorted(root.glob("class/thermal/thermal_zone*")) if "gpu" in _text(zone / "type").lower())
    degrees = next((_number(zone / "temp", 1e3) for zone in zones), None)
    loads = [*root.glob("devices/gpu.0/load"), *root.glob("devices/platform/*gpu*/load")]
    return Readings(degrees, _number(loads[0], 1e3) if loads else None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path, parts: float) -> float | None:
    """Return the number in a file, which counts in so many parts, or None."""
    try:
        return float(_text(path)) / parts
    except ValueError:
        return None
