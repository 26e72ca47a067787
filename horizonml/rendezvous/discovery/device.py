"""Describes a device to those that it trains with: what it is, what it has, and how fast it is.

Says in a sentence why a service at a known address (`horizonml join --peer HOST`) cannot be used.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import platform
import re
import shutil
import socket
import ssl
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from horizonml import __version__
from horizonml.machine.host import device_name, processor_name
from horizonml.machine.network import route_to
from horizonml.machine.resources import available_cores, memory_limit
from horizonml.rendezvous.checks import Fields, shown, text, whole
from horizonml.rendezvous.client import Client, ServiceError, ServiceRefuses
from horizonml.security.tls import client_context, is_of_a_token
from horizonml.security.token import TOKEN, Token

_MOST_MEMORY = 1 << 60  # bytes
_MOST_SPEED = 1e9  # GFLOP/s
_MOST_CORES = 1 << 16
_MEASURE_SECONDS = 0.3
_REPEATS = 3  # multiplications, at least
_SIZES = (256, 1024)  # of the matrices: one that any device multiplies at once, and one that keeps a fast one busy
_DMI = "sys/class/dmi/id"
_FILLER = re.compile(r"(to be filled|default string|system product|system version|none|unknown|not specified)", re.I)


@dataclass(frozen=True)
class Device:
    """Describes a device. Nothing of it is proven; it serves people, and a first guess at a plan."""

    name: str
    cores: float  # that it lets a process use
    memory: int  # bytes that it lets a process use
    architecture: str = ""
    system: str = ""
    model: str = ""  # such as "Raspberry Pi 5 Model B Rev 1.0"
    processor: str = ""
    accelerator: str = ""  # such as a GPU; empty if there is none that is known
    gflops: float = 0.0  # measured: 10^9 multiplications and additions of 32 bits in a second; 0 if not measured
    horizonml: str = ""  # version
    torch: str = ""  # version; empty if it is not installed

    def to_json(self) -> dict[str, str | int | float]:
        """Return the fields as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Fields) -> Device:
        """Return the device that fields from the network describe. Raises ValueError."""
        words = ("architecture", "system", "model", "processor", "accelerator", "horizonml", "torch")
        name = text(values, "name")
        if not name.strip():
            raise ValueError("name must not be empty")
        return cls(
            name,
            _number(values, "cores", _MOST_CORES),
            whole(values, "memory", 0, _MOST_MEMORY),
            **{word: text(values, word) if word in values else "" for word in words},
            gflops=_number(values, "gflops", _MOST_SPEED) if "gflops" in values else 0.0,
        )


def this_device(measure: bool = True, root: Path = Path("/")) -> Device:
    """Return the description of this device; unless told not to, measure its speed, which takes half a second."""
    return Device(
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


def _number(values: Fields, name: str, most: float) -> float:
    """Return a number from 0 to `most`. Raises ValueError."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a number from 0 to {most:g}, not {shown(value)}")
    assert math.isfinite(value)
    return float(value)


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


_NO_ROUTE = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.EINVAL}


def diagnose_peer(
    host: str, port: int, token: Token | None, version: str = __version__, seconds: float = 5.0
) -> str | None:
    """Return why the service at an address cannot be used, as one or two sentences, or None if it can be.

    It tries one thing after the other (the name, the route, the port, the token, the protocol) within some seconds.
    """
    problem = _unreachable(host, port) or _closed(host, port, seconds)
    if problem is not None:
        return problem
    place = f"{host}:{port}"
    try:
        client = Client((host, port), None if token is None else client_context(token), seconds)
    except ServiceError as error:
        if isinstance(error.__cause__, ServiceRefuses):
            return f"{place} refuses this device: {error.__cause__}."
        return _misunderstood(host, port, token, seconds, error) or f"{place} cannot be used: {str(error).rstrip('?')}."
    client.close()
    if client.version != version:
        return (
            f"{place} runs HorizonML {client.version}, and this device runs {version}: install the same version on "
            "both."
        )
    return None


def _unreachable(host: str, port: int) -> str | None:
    """Return why this device knows no way to a host, or None if it knows one."""
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        if _is_address(host):
            return f"{host} is an address that this device cannot use: it has no network of that kind."
        advice = "give its address instead, which `ip address` or `hostname -I` shows there"
        if host.endswith(".local") or "." not in host:
            return (
                f"The name {host} does not resolve on this device, as names on a local network often do not: {advice}."
            )
        return f"The name {host} does not resolve: check the spelling, or {advice}."
    try:
        route_to(host, port)
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return f"This device has no route to {host}: connect both to one network."
    return None


def _closed(host: str, port: int, seconds: float) -> str | None:
    """Return why no connection to a port can be made, or None if one can."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except TimeoutError:
        return (
            f"{host} does not answer on port {port}: it is off, has another address by now, or a firewall drops what "
            f"is sent there; let in TCP ports {port} and {port + 1} on it."
        )
    except ConnectionRefusedError:
        return (
            f"{host} is there, but nothing listens on port {port}: check that `horizonml up JOB` runs on it, and "
            "on which port."
        )
    except OSError as error:
        if error.errno in _NO_ROUTE:
            return (
                f"Nobody on the network answers for {host} ({_words(error)}): it is off or has another address by now, "
                "or a firewall rejects what is sent there."
            )
        return f"No connection to {host}:{port} can be made: {_words(error)}."
    return None


def _misunderstood(host: str, port: int, token: Token | None, seconds: float, error: ServiceError) -> str | None:
    """Return why a service that can be reached cannot be understood, or None if that is not clear."""
    place = f"{host}:{port}"
    encrypts = _encrypts(host, port, seconds)
    if encrypts is False:
        return f"{place} encrypts, but is not a service of HorizonML: check which port the service has."
    if encrypts and token is None:
        return (
            f"{place} has a token, and this device has none: copy the file ~/.config/horizonml/token from there, or "
            f"set ${TOKEN}."
        )
    if encrypts and token is not None:
        if not isinstance(error.__cause__, ssl.SSLError):
            return None  # it is not for the token
        return (
            f"{place} has another token than this device ({token.id}): if it is yours, copy its file "
            "~/.config/horizonml/token to this device."
        )
    if token is None:
        return None
    try:
        Client((host, port), None, seconds).close()
    except ServiceError:
        return f"{place} is not a service of HorizonML: check which port the service has."
    return (
        f"{place} has no token (--insecure), and this device has one: run `horizonml token` there, and start the "
        "service again."
    )


def _encrypts(host: str, port: int, seconds: float) -> bool | None:
    """Return whether a service shows the certificate of a token, False if it shows another, None if it shows none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent; only who is there is looked at
    try:
        with (
            socket.create_connection((host, port), timeout=seconds) as plain,
            context.wrap_socket(plain) as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
    except OSError:
        return None
    return shown is not None and is_of_a_token(shown)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    return True


def _words(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
