"""Reads and writes YAML files of devices and links, so that you can plan for a cluster that you do not have at hand.

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

import itertools
import json
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from horizonml.errors import JobError
from horizonml.files import write_atomically
from horizonml.planner.problem import MOST_WATTS, Watts
from horizonml.planner.profile import Host, Network, Profile
from horizonml.spec.base import PlainName, explain, read_yaml
from horizonml.text import nearest

_BYTES = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_RATES = {"bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_MOST_DEVICES = 10_000
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _unit(units: dict[str, float], example: str) -> BeforeValidator:
    def read(value: Any) -> float:
        match = re.fullmatch(r"\s*(\d+\.?\d*(?:e[-+]?\d{1,2})?)\s*([A-Za-z]*)\s*", str(value))
        if match is None or match[2] not in units:
            known = ", ".join(unit for unit in units if unit)
            raise ValueError(f"{str(value)[:80]!r} is not a number with one of {known}; write {example}")
        return float(match[1]) * units[match[2]]

    return BeforeValidator(read)


Bytes = Annotated[float, _unit(_BYTES, "512MiB"), Field(gt=0)]
Rate = Annotated[float, _unit(_RATES, "100Mbit"), Field(gt=0)]
Seconds = Annotated[float, _unit(_SECONDS, "2ms"), Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DeviceWatts(_Section):
    """Says what a device draws."""

    idle: float = Field(ge=0, le=MOST_WATTS, description="Watts while it waits.")
    busy: float = Field(ge=0, le=MOST_WATTS, description="Watts while it computes or transfers.")

    @model_validator(mode="after")
    def _fits(self) -> DeviceWatts:
        if self.busy < self.idle:
            raise ValueError(f"busy: {self.busy:g} is less than idle, {self.idle:g}; a device draws more when it works")
        return self


class DeviceEntry(_Section):
    """Describes one device, or several identical ones."""

    name: PlainName
    count: int = Field(1, ge=1, le=_MOST_DEVICES)
    kind: Literal["cpu", "cuda", "mps"] = Field(
        "cpu",
        description="What a rank computes on there. For a GPU (`cuda` or `mps`), `memory` is that of the GPU, `speed` "
        "is that of the GPU relative to a core where the profile was measured, and `cores` are of no account.",
    )
    speed: float = Field(1.0, gt=0, description="Speed of one core, relative to where the profile was measured.")
    profile: str | None = Field(
        None,
        description="File of `horizonml plan --profile`, measured on such a device; then `speed` is relative to that.",
    )
    cores: float = Field(1.0, gt=0, description="Cores that a rank may use; below 1 under a quota, e.g. a container's.")
    bursts: bool = Field(
        True,
        description="Whether, below 1 core, it may use a whole one for a moment, as containers may; an emulated "
        "device may not.",
    )
    machine: str = Field("", description="For containers: which machine they share; empty if this is one.")
    machine_cores: float = Field(0.0, ge=0, description="Cores that the containers of this machine share.")
    contention: list[tuple[float, float]] = Field(
        default_factory=list,
        description="How much longer work takes while several cores of the machine compute, as measured: pairs of "
        "cores and factor, e.g. [[2, 1.05], [4, 1.12]].",
    )
    memory: Bytes = Field(
        description="Memory that a rank may use, e.g. 1GiB, without what the process itself takes (about 250MiB)."
    )
    bandwidth: Rate | None = Field(None, description="Bandwidth of the device's own link, e.g. 100Mbit.")
    watts: DeviceWatts | None = Field(None, description="What it draws, e.g. {idle: 2.5, busy: 6}, to plan for energy.")

    @model_validator(mode="after")
    def _speed_of_gpu(self) -> DeviceEntry:
        if self.kind != "cpu" and self.profile is None and "speed" not in self.model_fields_set:
            raise ValueError(
                f"kind: {self.kind} needs a profile that was measured on such a device (horizonml plan JOB --profile "
                f"--device {self.kind} --out FILE), or its speed relative to a core of this machine"
            )
        return self


class DeviceLink(_Section):
    """Describes a link between two named devices."""

    between: Annotated[list[str], Field(min_length=2, max_length=2)]
    bandwidth: Rate
    latency: Seconds = 1e-3


class Cluster(_Section):
    """Describes the devices of a cluster and what connects them."""

    devices: Annotated[list[DeviceEntry], Field(min_length=1)]
    bandwidth: Rate = 125e6
    latency: Seconds = 5e-4
    links: list[DeviceLink] = Field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Return the name of every rank's device; identical devices are numbered."""
        return [
            device.name if device.count == 1 else f"{device.name}-{number}"
            for device in self.devices
            for number in range(device.count)
        ]

    def only(self, names: Collection[str]) -> Cluster:
        """Return the cluster with the devices of these names alone, in the same order."""
        left, kept = list(self.names), []
        for device in self.devices:
            own, left = left[: device.count], left[device.count :]
            count = sum(name in names for name in own)
            if count:
                kept.append(device.model_copy(update={"count": count}))
        return self.model_copy(update={"devices": kept})

    @property
    def ranks(self) -> list[DeviceEntry]:
        """Return the kind of device of every rank."""
        return [device for device in self.devices for _ in range(device.count)]

    def hosts(self) -> list[Host]:
        """Return a machine for each rank."""
        return [
            Host(
                (rank,),
                device.cores,
                device.memory,
                device.machine,
                device.machine_cores,
                tuple(sorted((cores, max(1.0, factor)) for cores, factor in device.contention)),
                device.bursts,
            )
            if device.kind == "cpu"
            else Host((rank,), 1.0, device.memory)
            for rank, device in enumerate(self.ranks)
        ]

    def watts(self) -> list[Watts | None]:
        """Return what every rank's device draws, as far as the file says it."""
        return [Watts(one.watts.idle, one.watts.busy) if one.watts is not None else None for one in self.ranks]

    def network(self) -> Network:
        """Return the links between all ranks."""
        ranks = self.ranks
        pairs = {}
        for link in self.links:
            for a, one in enumerate(ranks):
                for b, other in enumerate(ranks):
                    if a != b and {one.name, other.name} == set(link.between):
                        pairs[a, b] = (link.latency, link.bandwidth)
        access = tuple(device.bandwidth or self.bandwidth for device in ranks)
        return Network(self.latency, self.bandwidth, access, pairs)

    def profiles(self, base: Callable[[], Profile], layers: Sequence[str], folder: Path = Path()) -> list[Profile]:
        """Return every rank's profile of a model with these layers. Raises JobError.

        A profile comes from the device's file in `folder`, or from `base`, which is called only if a device has no
        file. It is scaled by the device's speed.
        """
        made, here = {}, None
        for device in self.devices:
            if device.profile is not None:
                own = read_profile(folder / device.profile, layers)
            else:
                own = here = here or base()
            made[device.name] = own.scaled(1 / device.speed)
        return [made[device.name] for device in self.ranks]


def write_profile(profile: Profile, about: dict[str, Any], path: Path) -> None:
    """Write a profile as YAML for people, with seconds by micro-batch size, and bytes. Raises OSError."""
    content = profile.to_json(for_people=True)
    sizes, layers = content.pop("sizes"), content.pop("layers")
    for layer in layers:
        layer |= {name: dict(zip(sizes, layer[name], strict=True)) for name in ("forward", "backward")}
    content = {"device": profile.device, **about, **content, "layers": layers}
    text = yaml.safe_dump(content, sort_keys=False, width=120)
    write_atomically(path, f"# Made by `horizonml plan --profile`: seconds by micro-batch size.\n{text}".encode())


def write_cluster(
    folder: Path,
    names: Sequence[str],
    hosts: Sequence[Host],
    network: Network,
    profiles: Sequence[Profile],
    watts: Sequence[Watts | None] = (),
) -> Path:
    """Write measurements as a file of devices in `folder`, beside a profile for each machine; return the file's path.

    `names[r]` is the machine of rank r; ranks that share a machine become devices that share its cores. Raises OSError.
    """
    machine = {rank: host for host in hosts for rank in host.ranks}
    devices = {}
    for rank, name in enumerate(names):
        own = name if names.count(name) == 1 else f"{name}-rank{rank}"
        host = machine[rank]
        # A machine whose ranks compute on different devices has a profile of each.
        several = len({machine[other].ranks for other, its in enumerate(names) if its == name}) > 1
        file = f"profile-{name}-rank{host.ranks[0]}.yaml" if several else f"profile-{name}.yaml"
        if rank == host.ranks[0]:
            write_profile(profiles[rank], {}, folder / file)
        shared, part = len(host.ranks) > 1, host.cores / len(host.ranks)
        devices[own] = {
            "name": own,
            "cores": round(max(1.0, part) if shared and host.cores >= 1 else part, 3),
            "memory": f"{machine[rank].memory / 2**20:.0f}MiB",
            "profile": file,
        }
        if not host.bursts:
            devices[own]["bursts"] = False
        if host.machine:
            devices[own] |= {"machine": host.machine, "machine_cores": host.machine_cores}
        elif shared and host.cores >= 1:
            devices[own] |= {"machine": f"{name}-{host.ranks[0]}", "machine_cores": host.cores}
        if host.contention:
            devices[own]["contention"] = [[round(cores, 3), round(factor, 4)] for cores, factor in host.contention]
        draws = watts[rank] if watts else None
        if draws is not None:
            devices[own]["watts"] = {"idle": round(draws.idle, 3), "busy": round(draws.busy, 3)}
    links = []
    for (a, one), (b, other) in itertools.combinations(enumerate(devices), 2):
        ways = [network.between(a, b), network.between(b, a)]
        links.append(
            {
                "between": [one, other],
                "bandwidth": f"{min(bandwidth for _, bandwidth in ways) * 8 / 1e6:.1f}Mbit",
                "latency": f"{max(latency for latency, _ in ways) * 1e6:.0f}us",
            }
        )
    lines = [f"  - {json.dumps(value)}" for value in devices.values()]
    text = "\n".join(["# Measured at the start of a run: horizonml plan JOB --devices THIS", "devices:", *lines, ""])
    if links:
        text += "\n".join(["links:", *(f"  - {json.dumps(link)}" for link in links), ""])
    path = folder / "cluster.yaml"
    write_atomically(path, text.encode())
    return path


def read_profile(path: Path, names: Sequence[str]) -> Profile:
    """Read a profile that `write_profile` wrote, for a model with layers of these names. Raises JobError."""
    content = read_yaml(path, "`horizonml plan JOB --profile --out FILE` writes one", text_keys=False)
    try:
        found = Profile.from_json({**content, "sizes": list(content["layers"][0]["forward"])})
    except ValidationError as error:
        first = error.errors()[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (LookupError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if [layer.name for layer in found.layers] == list(names):
            return found
        raise JobError(f"{path} is the profile of another model: its first layer is {found.layers[0].name}")
    raise JobError(
        f"{path} is not a profile of this version of HorizonML ({problem}); "
        "`horizonml plan JOB --profile --out FILE` writes one"
    )


def load_cluster(path: Path) -> Cluster:
    """Read a file of devices. Raises JobError, which names the field and the fix."""
    values = read_yaml(
        path,
        "give a file of devices, such as `devices: [{name: pc, memory: 8GiB}, {name: pi, count: 3, memory: 1GiB}]`",
    )
    try:
        cluster = Cluster.model_validate(values)
    except ValidationError as error:
        raise JobError(f"{path} is not a valid file of devices:\n{explain(error, Cluster)}") from None
    total = sum(device.count for device in cluster.devices)
    if total > _MOST_DEVICES:
        raise JobError(f"{path}: devices: {total:,} of them are more than {_MOST_DEVICES:,}; lower their counts")
    known = {device.name for device in cluster.devices}
    for link in cluster.links:
        for name in link.between:
            if name not in known:
                there = ", ".join(sorted(known))
                raise JobError(f"{path}: links: {name!r} is not a device; there are {there}{nearest(name, known)}")
    return cluster
