"""Makes gloo ignore further connections once a group has connected.

gloo listens as long as a process group lasts, and every connection of a stranger costs the process a descriptor, until
it has none left and is aborted.
"""

from __future__ import annotations

import logging
import os
import re
import select
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from horizonml.errors import PeerLost
from horizonml.tunnel.addresses import kernel_table, others_connected
from horizonml.tunnel.blob import Published

_log = logging.getLogger(__name__)
_WATCHED = re.compile(r"^tfd:\s*(\d+)", re.MULTILINE)


def guard(own: Sequence[Published]) -> None:
    """Make gloo deaf at all the sockets that it has published, and check who has connected to them by now.

    Raises PeerLost.
    """
    deaf = [silence(one) for one in own]
    if not all(deaf) and sys.platform == "linux":  # other systems have no such lists
        _warn()
    if any(others_there(one) for one in own):  # who may have taken a rank's place
        raise PeerLost("another user of this machine has connected to this rank while its group connected")


@cache
def _warn() -> None:
    """Say it once in the life of this process, and not for each group."""
    _log.warning(
        "gloo's listening sockets cannot be found in /proc/self (fd, fdinfo), so they stay open to every process of "
        "this machine: many connections to them would use up this rank's file descriptors and end it. Let this "
        "process read /proc, and train beside nobody else until then"
    )


def silence(own: Published) -> bool:
    """Let gloo take no more notice of connections to the socket that it has published; return whether that worked.

    The socket stays open, and watched for nothing, because gloo itself takes it from its list when it closes it.
    """
    listener = next((number for number in _descriptors() if _is(number, own)), None)
    if listener is None:
        return False
    for number, watched in _watchers():
        if listener in watched:
            with select.epoll.fromfd(os.dup(number)) as poll, suppress(OSError):
                poll.modify(listener, 0)
                return True
    return False


def others_there(own: Published) -> bool:
    """Return whether another user of this machine is connected to a loopback socket that gloo has published."""
    if own.address is None or not own.address.startswith("127."):
        return False
    with suppress(OSError):  # a container may hide the kernel's list
        return others_connected(kernel_table(), (own.address, own.port), os.geteuid())
    return False


def _descriptors() -> Iterator[int]:
    """Yield the descriptors of this process that are sockets."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            if os.readlink(f"/dev/fd/{name}").startswith("socket:"):
                yield int(name)


def _is(number: int, own: Published) -> bool:
    """Return whether a descriptor is the listening socket that was published."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
        if one.family != own.family or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        name = one.getsockname()
        return name[1] == own.port and (own.address is None or name[0] == own.address)
    return False


def _watchers() -> Iterator[tuple[int, list[int]]]:
    """Yield each epoll descriptor of this process, and those that it watches."""
    try:
        names = os.listdir("/proc/self/fdinfo")
    except OSError:  # not Linux
        return
    for name in names:
        with suppress(OSError):
            found = _WATCHED.findall(Path(f"/proc/self/fdinfo/{name}").read_text())
            if found:
                yield int(name), [int(number) for number in found]
