"""Connects Horovod's ranks through the group they are in, through their launcher, or through MPI."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from horizonml.comm.group import Group
from horizonml.errors import JobError, PeerLost
from horizonml.machine.network import address_of

_OURS = "HORIZONML_HOROVOD"  # set where the rendezvous comes from this module
# The variable that each MPI sets for its ranks, and the library that Horovod must be built with to use that MPI.
_MPI = {"OMPI_COMM_WORLD_RANK": b"libmpi.so", "PMI_RANK": b"libmpich.so"}
_TIMEOUT = 30.0  # seconds that Horovod gives each connection, unless HOROVOD_GLOO_TIMEOUT_SECONDS says otherwise
_CONNECTIONS = 3  # which it makes one after another: of all ranks, of those on one machine, and across machines
_LOOK_SECONDS = 0.01
_has_failed = False  # whether a start of Horovod has failed in this process


def connect(group: Group) -> Any:
    """Return Horovod, connected among the ranks of `group`.

    `horovodrun` and MPI bring their own connections; otherwise rank 0 serves the rendezvous of Horovod's gloo.
    """
    import horovod.torch as hvd

    given = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ and not os.environ.get(_OURS)
    if not given and not _under_mpi():
        os.environ.update(rendezvous(group))
    group.at_close(hvd.shutdown)  # which ends Horovod's thread, also where its start fails
    _start(hvd, group)
    if (hvd.rank(), hvd.size()) != (group.rank, group.world_size):
        raise JobError(
            f"Horovod's launcher made this rank {hvd.rank()} of {hvd.size()}, but the job knows it as rank "
            f"{group.rank} of {group.world_size}; start all ranks with one launcher, or set no RANK"
        )
    return hvd


def _start(hvd: Any, group: Group) -> None:
    """Start Horovod's thread, and wait until it has connected the ranks. Raises PeerLost.

    After a start that has failed, `init` says of every later one in this process that it has failed, too, and does so
    before it can know (the flag that it looks at is never cleared, up to Horovod 0.28.1). Whether a later one succeeds
    shows in `is_initialized`, for which this waits as long as Horovod tries.
    """
    global _has_failed
    try:
        hvd.init()
        return
    except (RuntimeError, ValueError) as error:
        again, _has_failed = _has_failed, True
        if not again:
            raise PeerLost(f"rank {group.rank}: Horovod could not connect the ranks: {error}") from error
    late = time.monotonic() + _CONNECTIONS * float(os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", _TIMEOUT))
    while not hvd.is_initialized():
        if group.is_over:
            raise PeerLost("the group was broken off")
        if time.monotonic() > late:
            raise PeerLost(f"rank {group.rank}: Horovod could not connect the ranks again")
        time.sleep(_LOOK_SECONDS)


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
