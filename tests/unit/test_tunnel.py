"""What tunnels are made of: addresses, gloo's blobs, headers, ciphers."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import socket
import subprocess
import sys
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonml.comm.tunnel.addresses import (
    HEADER_BYTES,
    Target,
    connected_from,
    entries,
    is_ours,
    is_portable,
    listener_of,
    others_connected,
    own_address,
    read_blob,
    stand_in_address,
)
from horizonml.comm.tunnel.client import AES, CHACHA, configuration, link_port, offered
from horizonml.comm.tunnel.ends import SecureEnd
from horizonml.errors import SecurityError
from horizonml.security.tls import client_context, server_context
from horizonml.security.token import make_token
from tests.programs import not_portable

# What gloo of PyTorch 2.13 published for rank 1 of 3 at 127.64.0.4:33949 on a machine called "vm".
BLOB = bytes.fromhex(
    "0200000000000000766d88000000000000000200849d7f400004"
    + "00" * 8
    + "00" * 112
    + "ffffffffffffffff"
    + "000000000000000001000000000000000200000000000000"
)
TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0400407F:849D 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 7865581 1 0 100 0 0 10 0
   1: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1 0 100 0 0 10 0
   2: 0100007F:D431 0400407F:849D 01 00000000:00000000 00:00000000 00000000  1001        0 12 1 0 20 4 30 10 -1
   a line that is something else
"""


@not_portable
def test_of_two_ranks_both_find_the_same_one_greater() -> None:
    for one, other in itertools.combinations([*range(40), 1000, 4095], 2):
        for near, far in ((one, other), (other, one)):
            own, seen = IPv4Address(own_address(near)), IPv4Address(stand_in_address(far, far > near))
            assert (own > seen) == (near > far)
        assert is_ours(own_address(one))
        assert is_ours(stand_in_address(other, other > one))
        assert own_address(one) != stand_in_address(other, other > one)


def test_a_tunnel_leads_to_no_other_address() -> None:
    for address in ("127.128.0.0", "10.0.0.1", "0.0.0.0", "::1", "nonsense", ""):
        assert not is_ours(address)
    assert is_ours("127.0.0.1") == is_portable()
    assert is_ours("127.64.0.4") != is_portable()


@pytest.mark.skipif(sys.byteorder != "little", reason="the table was written by such a machine")
def test_the_kernels_table_tells_who_listens_and_who_connects() -> None:
    assert listener_of(TABLE, "127.64.0.4", 33949) == 1000
    assert listener_of(TABLE, "127.64.0.6", 33949) is None
    assert listener_of(TABLE, "127.64.0.4", 22) is None, "a socket that listens everywhere is another service's"
    assert connected_from(TABLE, ("127.0.0.1", 0xD431), ("127.64.0.4", 33949)) == 1001
    assert connected_from(TABLE, ("127.0.0.1", 0xD430), ("127.64.0.4", 33949)) is None
    assert others_connected(TABLE, ("127.64.0.4", 33949), 1000)
    assert not others_connected(TABLE, ("127.64.0.4", 33949), 1001)
    assert not others_connected(TABLE, ("127.64.0.6", 33949), 1000)
    assert len(list(entries(TABLE))) == 3


def test_a_published_address_is_found_and_moved() -> None:
    published = read_blob(BLOB)
    assert (published.address, published.port) == ("127.64.0.4", 33949)
    moved = published.moved("127.64.0.5", 80)
    assert (read_blob(moved).address, read_blob(moved).port) == ("127.64.0.5", 80)
    assert len(moved) == len(BLOB)
    assert [at for at, (a, b) in enumerate(zip(moved, BLOB, strict=True)) if a != b] == [20, 21, 25]


def altered(at: int, new: bytes) -> bytes:
    return BLOB[:at] + new + BLOB[at:]


@given(st.binary(max_size=300) | st.builds(altered, st.integers(0, 30), st.binary()))
def test_a_damaged_address_is_refused_or_read_within_its_bounds(content: bytes) -> None:
    try:
        published = read_blob(content)
    except ValueError:
        return
    assert published.at + 128 <= len(content)
    assert len(published.moved("127.64.0.5", 80)) == len(content)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_foreign_bytes_are_no_header(content: bytes) -> None:
    with pytest.raises(ValueError, match="header"):
        Target.from_bytes(content)


def test_a_header_comes_back_as_it_was_unless_it_leads_elsewhere() -> None:
    for target in (Target(own_address(3), 4711, False), Target(own_address(3), 4711, True)):
        assert len(target.to_bytes()) == HEADER_BYTES
        assert Target.from_bytes(target.to_bytes()) == target
    with pytest.raises(ValueError, match="no tunnel sends"):
        Target.from_bytes(Target("127.0.0.2", 22, False).to_bytes())


def test_a_processor_without_instructions_for_aes_offers_nothing_else_than_chacha() -> None:
    for processors, ciphers in (
        ("processor\t: 0\nflags\t\t: fpu sse2 aes avx\n", [AES, CHACHA]),
        ("Features\t: fp asimd aes pmull\n", [AES, CHACHA]),
        ("Features\t: fp asimd evtstrm crc32 cpuid\nHardware : aes\n", [CHACHA]),  # a Raspberry Pi 4
        ("", [CHACHA]),
        (None, [AES, CHACHA]),
    ):
        assert offered(processors) == ciphers


def test_a_process_offers_the_ciphers_that_its_configuration_names(tmp_path: Path) -> None:
    file = tmp_path / "openssl.cnf"
    file.write_text(configuration([CHACHA]))
    program = (
        "import ssl; c = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT); c.minimum_version = ssl.TLSVersion.TLSv1_3; "
        "print(*[one['name'] for one in c.get_ciphers() if one['protocol'] == 'TLSv1.3'])"
    )
    env = {**os.environ, "OPENSSL_CONF": str(file)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [CHACHA]


def test_a_machine_may_have_another_port() -> None:
    assert link_port(29401, {}) == 29401
    assert link_port(29401, {"HORIZONML_LINK_PORT": "5000"}) == 5000
    for text in ("x", "0", "65536", "-1"):
        with pytest.raises(SecurityError, match="HORIZONML_LINK_PORT must be a port"):
            link_port(29401, {"HORIZONML_LINK_PORT": text})


async def shake_hands() -> tuple[SecureEnd, SecureEnd]:
    token = make_token()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there = listener.accept()[0]
    for one in (here, there):
        one.setblocking(False)
    ends = SecureEnd(here, client_context(token), False), SecureEnd(there, server_context(token), True)
    await asyncio.gather(*(end.handshake() for end in ends))
    return ends


def wakes(end: SecureEnd, seconds: float) -> bool:
    return bool(select.select([end.socket], [], [], seconds)[0])


def test_nobody_is_woken_for_a_part_of_a_record() -> None:
    """Neither for less than its header, which says how long it is, nor for less than all of it."""
    here, there = asyncio.run(shake_hands())
    content = os.urandom(40_000)
    with here.socket, there.socket:
        sealed, found, at = bytes(here.seal(memoryview(content))), b"", 0
        for stop, woken in ((3, True), (4, False), (100, True), (10_000, False), (20_000, True), (len(sealed), True)):
            here.socket.sendall(sealed[at:stop])
            at = stop
            assert wakes(there, 10 if woken else 0.3) is woken, stop
            if woken:
                found += bytes(there.read() or b"")
        while len(found) < len(content):
            assert wakes(there, 10)
            found += bytes(there.read() or b"")
        assert found == content
