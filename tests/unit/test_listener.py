"""What a rank says when it cannot make gloo deaf to others."""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import ExitStack
from typing import Any

import pytest

from horizonml.comm.connect import guard, others_there
from horizonml.comm.tunnel.addresses import Published, own_address
from horizonml.errors import PeerLost
from tests.programs import need_root, not_portable

pytestmark = not_portable


def published(listener: socket.socket) -> Published:
    address, port = listener.getsockname()
    at = struct.pack("=H", socket.AF_INET) + struct.pack(">H", port) + socket.inet_aton(address)
    return Published(at.ljust(128, b"\0"), 0)


@pytest.fixture
def listener() -> Any:
    with socket.create_server((own_address(0), 0)) as opened:
        yield opened


def test_a_listener_that_is_watched_is_watched_no_more(listener: socket.socket, caplog: Any) -> None:
    with select.epoll() as poll, ExitStack() as opened:
        poll.register(listener, select.EPOLLIN)
        guard([published(listener)])
        opened.enter_context(socket.create_connection(listener.getsockname()))
        assert poll.poll(0.2) == []
    assert not caplog.records


def test_another_user_is_noticed_although_the_listener_is_not_deaf(listener: socket.socket) -> None:
    need_root("become another user")
    own = published(listener)
    os.seteuid(65534)
    try:
        stranger = socket.socket()
    finally:
        os.seteuid(0)
    with stranger:
        stranger.connect(listener.getsockname())
        assert others_there(own)
        with pytest.raises(PeerLost, match="another user of this machine"):
            guard([own])
