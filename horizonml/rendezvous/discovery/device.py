"""Describes a device to those that it trains with: what it is, what it has, and how fast it is."""

from __future__ import annotations

import platform
import re
import shutil
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path

from horizonml import __version__
from horizonml.machine.host import device_name, processor_name
from horizonml.machine.resources import available_cores, memory_limit
from horizonml.rendezvous.device_messages import (
    DeviceInfo,
)

_MEASURE_SECONDS = 0.3
_REPEATS = 3  # multiplications, at least
_SIZES = (256, 1024)  # of the matrices: one that any device multiplies at once, and one that keeps a fast one busy
_DMI = "sys/class/dmi/id"
_FILLER = re.compile(r"(to be filled|default string|system product|system version|none|unknown|not specified)", re.I)


def this_device(measure: bool = True, root: Path = Path("/")) -> DeviceInfo:
    """Return the description of this device; unless told not to, measure its speed, which takes half a second."""
    return DeviceInfo(
        name=device_name(),
        cores=available_cores(),
        memory=int(memory_limit()),
        architecture=_short(platform.machine()),
        system=_short(system(root)),
        model=_short(model(root)),
        processor=_short(processor_name()),
        accelerator=_short(accelerator(root)),
        gflops=measure_gflops() if measure else 0.0,
        horizonml=__version__,
        torch=_short(_version("torch")),
    )


def system(root: Path = Path("/")) -> str:
    """Return the name of the operating system for people, such as "Debian GNU/Linux 12 (bookworm)"."""
    try:
        lines = (root / "etc/os-release").read_text().splitlines()
    except OSError:
        return platform.platform()
    named = next((line.partition("=")[2].strip().strip('"') for line in lines if line.startswith("PRETTY_NAME=")), "")
    return named or platform.platform()


def model(root: Path = Path("/")) -> str:
    """Return the name of the board or of the computer's model, or nothing where it is not known."""
    for path in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
        named = _read(root / path)
        if named:
            return named
    maker, product = (_read(root / _DMI / name) for name in ("sys_vendor", "product_name"))
    if maker == "LENOVO":  # which puts the name that people know elsewhere
        product = _read(root / _DMI / "product_version") or product
    known = [word for word in (maker, product) if word and not _FILLER.match(word)]
    return " ".join(dict.fromkeys(known))


def accelerator(root: Path = Path("/")) -> str:
    """Return the name of a GPU or the like, or nothing; what PyTorch can use of it is another question."""
    for information in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        for line in _read(information).splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    if (root / "etc/nv_tegra_release").exists():
        return "NVIDIA Jetson's GPU"
    if (root / "dev/kfd").exists():
        return "AMD GPU"
    for device, named in (("dev/hailo0", "Hailo"), ("dev/apex_0", "Coral Edge TPU")):
        if (root / device).exists():
            return named
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return "Apple GPU"
    return "NVIDIA GPU" if root == Path("/") and shutil.which("nvidia-smi") else ""


@cache
def measure_gflops(seconds: float = _MEASURE_SECONDS) -> float:
    """Return how many 10^9 operations of 32 bits this device does in a second when it multiplies matrices.

    All its cores take part. The fastest multiplication counts, so that other programs disturb it less. The first one
    does not: it starts the threads, and by it a fast device was once taken for a slow one, and measured as such.
    """
    import numpy as np  # takes a while

    tried = np.ones((_SIZES[0], _SIZES[0]), dtype=np.float32)
    small = min([_time_product(tried) for _ in range(1 + _REPEATS)][1:])
    size = _SIZES[1] if small * (_SIZES[1] / _SIZES[0]) ** 3 < seconds / 3 else _SIZES[0]
    matrix = np.full((size, size), 1 / size, dtype=np.float32)
    until, times = time.perf_counter() + seconds, list[float]()
    while len(times) < _REPEATS or time.perf_counter() < until:
        times.append(_time_product(matrix))
    fastest = 2 * size**3 / min(times) * 1e-9
    return round(fastest, 3)


def _time_product(matrix: object) -> float:
    import numpy as np

    start = time.perf_counter()
    np.matmul(matrix, matrix)  # type: ignore[call-overload]
    return max(1e-9, time.perf_counter() - start)


def _version(package: str) -> str:
    """Return the version of an installed package, without importing it, or nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    """Return the text of a file, without the zeros that end those of a device tree, or nothing."""
    try:
        return path.read_text(errors="replace").strip(" \0\n\t")
    except OSError:
        return ""


def _short(text: str) -> str:
    """Return a text as others accept it."""
    return "".join(character if character.isprintable() else " " for character in text)[:255].strip()
