"""Connects Horovod's ranks through the group they are in, through their launcher, or through MPI."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from horizonml.comm.group import Group
from horizonml.errors import JobError, PeerLost
from horizonml.machine.network import address_of

_OURS = "HORIZONML_HOROVOD"  # set where the rendezvous comes from this module
# The variable that each MPI sets for its ranks, and the library that Horovod must be built with to use that MPI.
_MPI = {"OMPI_COMM_WORLD_RANK": b"libmpi.so", "PMI_RANK": b"libmpich.so"}


def connect(group: Group) -> Any:
    """Return Horovod, connected among the ranks of `group`.

    `horovodrun` and MPI bring their own connections; otherwise rank 0 serves the rendezvous of Horovod's gloo. Where
    the ranks do not all come within HOROVOD_GLOO_TIMEOUT_SECONDS (30 by default), Horovod itself aborts the process.
    Raises PeerLost and JobError.
    """
    import horovod.torch as hvd

    given = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ and not os.environ.get(_OURS)
    if not given and not _under_mpi():
        os.environ.update(rendezvous(group))
    group.at_close(hvd.shutdown)  # which ends Horovod's thread, also where its start fails
    try:
        hvd.init()
    except (RuntimeError, ValueError) as error:
        raise PeerLost(f"rank {group.rank}: Horovod could not connect the ranks: {error}") from error
    if (hvd.rank(), hvd.size()) != (group.rank, group.world_size):
        raise JobError(
            f"Horovod's launcher made this rank {hvd.rank()} of {hvd.size()}, but the job knows it as rank "
            f"{group.rank} of {group.world_size}; start all ranks with one launcher, or set no RANK"
        )
    return hvd


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
