"""Writes what a service announces by mDNS, checks what others announce, and describes a device to others.

Anyone on the network may write an announcement.
"""

from __future__ import annotations

import ipaddress
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from pathlib import Path

from horizonml import __version__
from horizonml.machine.host import available_cores, device_name, memory_limit, processor_name
from horizonml.rendezvous.device_messages import DeviceInfo
from horizonml.rendezvous.discovery.multicast import Interface, reachable
from horizonml.text import shown

PORT, STANDBY_PORT = 29400, 29402  # of the service, and of those that ranks keep in reserve, unless the job says more
TYPE = "_horizonml._tcp.local."
MOST_ADDRESSES = 8  # of one service
_FORMAT = "1"  # of the text record
_LABEL_BYTES = 63  # of a part of a DNS name
_MOST_NAME, _MOST_VERSION, _MOST_JOB = 63, 32, 128  # characters
_TOKEN_ID = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True)
class FoundService:
    """A service that announces itself. Nothing of it is proven: who answers at its addresses must show the token.

    `host` is the address to try first, and `addresses` are all of them, the likeliest first. `token_id` is empty where
    the service has no token, and `job` where it does not say.
    """

    name: str
    host: str
    port: int
    token_id: str
    version: str
    job: str
    addresses: tuple[str, ...]
    pairing: int = 0  # the number of the codes that it offers to devices without a token; 0 if it offers none


def instance(name: str) -> str:
    """Return a DNS name for a service of a device, which no other service has.

    It begins with the device's name as far as that is safe, for those who look at the network with other tools.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    suffix = f"-{secrets.token_hex(4)}"
    return (plain[: _LABEL_BYTES - len(suffix)].rstrip("-") or "device") + suffix


def text(name: str, token_id: str, version: str, job: str, pairing: int = 0) -> dict[str, str]:
    """Return the text record of a service: all that is announced beside its addresses and its port."""
    shortened = {"name": plain(name, _MOST_NAME), "version": version[:_MOST_VERSION], "job": plain(job, _MOST_JOB)}
    return {"format": _FORMAT, "token": token_id, **shortened, **({"pairing": str(pairing)} if pairing else {})}


def plain(text: str, most: int) -> str:
    """Return a text as it may be announced: without control characters, and at most so many characters and bytes."""
    kept = "".join(character if character.isprintable() else "?" for character in text)[:most]
    return kept.encode("utf-8", errors="replace")[:200].decode("utf-8", errors="ignore")


def read(
    properties: Mapping[bytes, bytes | None], port: int | None, addresses: Iterable[str], own: Sequence[Interface]
) -> FoundService:
    """Return the service of a text record, a port and addresses from the network. Raises ValueError.

    `own` are the interfaces of this machine, which say what addresses others can have.
    """
    if _field(properties, "format", 8) != _FORMAT:
        raise ValueError("it is of another kind")
    token_id = _field(properties, "token", 8)
    if token_id and not _TOKEN_ID.fullmatch(token_id):
        raise ValueError(f"its token is called {shown(token_id)}")
    if type(port) is not int or not 1 <= port <= 65535:
        raise ValueError(f"its port is {shown(port)}")
    usable = order(addresses, own)
    if not usable:
        raise ValueError("it has no address that this device could reach")
    name = _field(properties, "name", _MOST_NAME) or usable[0]
    version, job = _field(properties, "version", _MOST_VERSION), _field(properties, "job", _MOST_JOB)
    pairing = _field(properties, "pairing", 2)
    offered = int(pairing) if pairing.isdecimal() else 0
    return FoundService(name, usable[0], port, token_id, version, job, usable, offered)


def order(addresses: Iterable[str], own: Sequence[Interface]) -> tuple[str, ...]:
    """Return the addresses that a device on a local network can have, the likeliest first.

    Those on the networks of this machine come before those behind a router, and IPv4 before IPv6. An address elsewhere
    on the internet is left out, so that nobody on the network can have this device connect there.
    """
    ranked: list[tuple[bool, int, int, str]] = []
    for text in dict.fromkeys(list(addresses)[: 4 * MOST_ADDRESSES]):
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if address.is_loopback or address.is_multicast or address.is_unspecified or address.is_reserved:
            continue
        scope = text.partition("%")[2]
        if isinstance(address, ipaddress.IPv6Address) and address.is_link_local and not scope:
            continue  # nobody knows on which link
        near = reachable(text, own)
        if near or (not scope and address.is_private):
            ranked.append((not near, address.version, len(ranked), text))
    return tuple(text for *_, text in sorted(ranked)[:MOST_ADDRESSES])


def distinct(found: Iterable[FoundService]) -> list[FoundService]:
    """Return services by name; where several have one name, the second is called "name-2", and so on."""
    taken: set[str] = set()
    named = []
    for service in sorted(found, key=lambda each: (each.name, each.host, each.port)):
        name, number = service.name, 1
        while name in taken:
            number += 1
            name = f"{service.name}-{number}"
        taken.add(name)
        named.append(replace(service, name=name))
    return named


def _field(properties: Mapping[bytes, bytes | None], name: str, most: int) -> str:
    """Return a field of a text record, or nothing if it is missing. Raises ValueError."""
    raw = properties.get(name.encode()) or b""
    try:
        value = raw.decode()
    except UnicodeDecodeError:
        raise ValueError(f"its {name} is not text") from None
    if len(value) > most or not value.isprintable():
        raise ValueError(f"its {name} is {shown(value)}")
    return value


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
    lines = _read(root / "etc/os-release").splitlines()
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
