"""A cluster on paper: devices and links from a YAML file, to plan for without having them at hand.

```yaml
latency: 1ms
bandwidth: 1Gbit
devices:
  - {name: laptop, memory: 8GiB}
  - {name: pi, count: 3, speed: 0.2, memory: 1GiB, bandwidth: 100Mbit}
links:
  - {between: [laptop, pi], bandwidth: 20Mbit, latency: 5ms}
```
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from horizonml.errors import JobError
from horizonml.files import write_atomically
from horizonml.plan.profile import LayerProfile, Profile
from horizonml.plan.simulate import Host, Network

_BYTES = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_RATES = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _unit(units: dict[str, float], example: str) -> BeforeValidator:
    def read(value: Any) -> float:
        match = re.fullmatch(r"\s*([\d.]+(?:e-?\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2] not in units:
            raise ValueError(
                f"{value!r} is no number with one of {', '.join(unit for unit in units if unit)}: {example}"
            )
        return float(match[1]) * units[match[2]]

    return BeforeValidator(read)


Bytes = Annotated[float, _unit(_BYTES, "for example 512MiB"), Field(gt=0)]
Rate = Annotated[float, _unit(_RATES, "for example 100Mbit"), Field(gt=0)]
Seconds = Annotated[float, _unit(_SECONDS, "for example 2ms"), Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Device(_Section):
    """One device, or several alike."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    count: int = Field(1, ge=1)
    speed: float = Field(1.0, gt=0, description="Of one core, relative to where the profile was measured.")
    profile: str | None = Field(
        None, description="File of `horizonml profile`, measured on such a device; then `speed` is relative to that."
    )
    memory: Bytes = Field(description="That a rank may use, e.g. 1GiB.")
    bandwidth: Rate | None = Field(None, description="Of the device's own link, e.g. 100Mbit.")


class DeviceLink(_Section):
    """Between two devices, by name."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    bandwidth: Rate
    latency: Seconds = 1e-3


class Cluster(_Section):
    """Devices and what connects them."""

    devices: Annotated[list[Device], Field(min_length=1)]
    bandwidth: Rate = 125e6
    latency: Seconds = 5e-4
    links: list[DeviceLink] = Field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The device of every rank; those of several alike are numbered."""
        return [
            device.name if device.count == 1 else f"{device.name}-{number}"
            for device in self.devices
            for number in range(device.count)
        ]

    @property
    def ranks(self) -> list[Device]:
        """The kind of device of every rank."""
        return [device for device in self.devices for _ in range(device.count)]

    def hosts(self) -> list[Host]:
        """A machine for each rank."""
        return [Host((rank,), 1.0, device.memory) for rank, device in enumerate(self.ranks)]

    def network(self) -> Network:
        """Between all ranks."""
        ranks = self.ranks
        pairs = {}
        for link in self.links:
            for a, one in enumerate(ranks):
                for b, other in enumerate(ranks):
                    if a != b and {one.name, other.name} == set(link.between):
                        pairs[a, b] = (link.latency, link.bandwidth)
        access = tuple(device.bandwidth or self.bandwidth for device in ranks)
        return Network(self.latency, self.bandwidth, access, pairs)

    def profiles(self, base: Profile, folder: Path = Path()) -> list[Profile]:
        """Every rank's profile: its own, from a file in `folder`, or `base`, slower or faster. Raises JobError."""
        made = {}
        for device in self.devices:
            own = base if device.profile is None else read_profile(folder / device.profile, base)
            made[device.name] = own.scaled(1 / device.speed)
        return [made[device.name] for device in self.ranks]


def write_profile(profile: Profile, about: dict[str, Any], path: Path) -> None:
    """A profile as YAML for people: seconds by micro-batch size, bytes. Raises OSError."""
    layers = [
        {
            "name": layer.name,
            "forward": dict(zip(profile.sizes, layer.forward, strict=True)),
            "backward": dict(zip(profile.sizes, layer.backward, strict=True)),
            "parameter_bytes": layer.parameter_bytes,
            "saved_bytes_per_sample": layer.saved_bytes,
            "output_bytes_per_sample": layer.output_bytes,
        }
        for layer in profile.layers
    ]
    content = {
        "device": profile.device,
        **about,
        "update_seconds_per_byte": profile.update_seconds_per_byte,
        "codec_seconds_per_byte": profile.codec_seconds_per_byte,
        "layers": layers,
    }
    text = yaml.safe_dump(content, sort_keys=False, width=120)
    write_atomically(path, f"# Made by `horizonml profile`: seconds by micro-batch size.\n{text}".encode())


def read_profile(path: Path, base: Profile) -> Profile:
    """A profile that `write_profile` wrote, of the same model as `base`. Raises JobError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        layers = tuple(
            LayerProfile(
                str(layer["name"]),
                tuple(map(float, layer["forward"].values())),
                tuple(map(float, layer["backward"].values())),
                int(layer["parameter_bytes"]),
                int(layer["saved_bytes_per_sample"]),
                int(layer["output_bytes_per_sample"]),
            )
            for layer in content["layers"]
        )
        sizes = tuple(map(int, content["layers"][0]["forward"]))
        codecs = {str(name): float(seconds) for name, seconds in content["codec_seconds_per_byte"].items()}
        found = Profile(str(content["device"]), sizes, float(content["update_seconds_per_byte"]), layers, codecs)
    except OSError as error:
        raise JobError(f"{path}: {error.strerror or error}; `horizonml profile JOB --out FILE` writes one") from None
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise JobError(f"{path} is no profile of `horizonml profile` ({type(error).__name__}: {error})") from None
    if [layer.name for layer in layers] != [layer.name for layer in base.layers]:
        raise JobError(f"{path} is the profile of another model: its first layer is {layers[0].name}")
    return found


def load_cluster(path: Path) -> Cluster:
    """Read a file of devices. Raises JobError, which names the field and the fix."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(
            f"{path}: {error.strerror or error}; give a file of devices (see examples/devices.yaml)"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: not YAML: {error}") from None
    try:
        cluster = Cluster.model_validate(values)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()]
        raise JobError(f"{path} is no valid file of devices:\n" + "\n".join(lines)) from None
    known = {device.name for device in cluster.devices}
    for link in cluster.links:
        for name in link.between:
            if name not in known:
                raise JobError(f"{path}: links: {name!r} is no device; there are {', '.join(sorted(known))}")
    return cluster
