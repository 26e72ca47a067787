"""Two tunnels as on two machines, without ranks: what they carry, to whom, and what strangers get."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields

import psutil
import pytest

from horizonml.comm.tunnel.addresses import Target, TunnelAnswer, is_portable, own_address, stand_in_address, vouch
from horizonml.comm.tunnel.client import Tunnel, TunnelGone, TunnelUsage
from horizonml.errors import SecurityError
from horizonml.security.tls import client_context
from horizonml.security.token import Token, make_token
from tests.distributed.processes import wait_for
from tests.programs import need_ipv6, need_root, not_portable

TOKEN = make_token()
HERE = "127.0.0.1"
Start = Callable[..., Tunnel]


def free_port() -> int:
    with socket.create_server((HERE, 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def start() -> Iterator[Start]:
    """Start tunnels, which must end by themselves."""
    started: list[psutil.Process] = []
    with ExitStack() as undo:

        def begin(port: int, token: object = TOKEN, encrypt: bool = True) -> Tunnel:
            tunnel = Tunnel(token, HERE, port, encrypt)  # type: ignore[arg-type]
            undo.callback(tunnel.close)
            assert tunnel._process is not None
            started.append(psutil.Process(tunnel._process.pid))
            return tunnel

        yield begin
    while VOUCHERS:
        VOUCHERS.popitem()[1].close()
    _, left = psutil.wait_procs(started, timeout=10)
    for process in left:
        process.kill()
    assert not left


def two(start: Start, token: Token = TOKEN, encrypt: bool = True) -> tuple[int, Tunnel, Tunnel]:
    """The port of one machine's tunnel, that tunnel, and the one of another machine."""
    port = free_port()
    return port, start(port, token, encrypt), start(free_port(), TOKEN, encrypt)


def rank(number: int, token: Token = TOKEN) -> socket.socket:
    """A socket as gloo's of this rank."""
    listener = socket.create_server((own_address(number), 0))
    listener.settimeout(10)
    place = listener.getsockname()
    if place in VOUCHERS:  # the port is used again
        VOUCHERS.pop(place).close()
    VOUCHERS[place] = vouch(token, *place)
    return listener


VOUCHERS: dict[tuple[str, int], ExitStack] = {}


def connect(tunnel: Tunnel, port: int, listener: socket.socket) -> tuple[socket.socket, int]:
    """Connect as gloo does, through a tunnel to the one at a port."""
    target = listener.getsockname()
    number, at = tunnel.open(HERE, port, stand_in_address(0, connects_here=False), target, own_port=60_000)
    connection = socket.create_connection(at, timeout=10)
    return connection, number


def exactly(connection: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        more = connection.recv(1 << 20)
        assert more, "closed too early"
        content += more
    return content


@pytest.mark.parametrize("encrypt", [True, False], ids=["encrypted", "plain"])
def test_bytes_arrive_as_they_were_sent_both_ways_at_once(start: Start, encrypt: bool) -> None:
    port, there, here = two(start, encrypt=encrypt)
    content, answer = os.urandom(5_000_001), os.urandom(3_000_007)
    with rank(0) as listener:
        near, number = connect(here, port, listener)
        far, _ = listener.accept()
        with near, far:
            sending = [
                threading.Thread(target=near.sendall, args=(content,)),
                threading.Thread(target=far.sendall, args=(answer,)),
            ]
            for thread in sending:
                thread.start()
            received: list[bytes] = []
            reading = threading.Thread(target=lambda: received.append(exactly(near, len(answer))))
            reading.start()
            assert exactly(far, len(content)) == content
            for thread in (*sending, reading):
                thread.join(10)
            assert received == [answer]
            assert here.failures([number], 5.0) == {}
            used = here.usage()
            assert (used.sent, used.received) == (len(content), len(answer))
            assert used.seconds > 0
            assert (used.cipher == "none") != encrypt
            assert there.usage().received == len(content)
            near.close()  # the last bytes come before the end
            assert far.recv(1) == b""
    wait_for(lambda: here.usage().connections == there.usage().connections == 0, "the end of the connection", 10)


def test_the_last_bytes_of_a_rank_that_ends_arrive(start: Start) -> None:
    port, _, here = two(start)
    with rank(0) as listener:
        near, _ = connect(here, port, listener)
        near.sendall(b"x" * 300_000)
        here.close()  # while the tunnel still shakes hands; its process ends only after all has been carried
        far, _ = listener.accept()
        near.close()
        with far:
            far.settimeout(10)
            assert exactly(far, 300_000) == b"x" * 300_000
            assert far.recv(1) == b""


def test_what_a_slow_receiver_leaves_is_not_kept_in_memory(start: Start) -> None:
    port, there, here = two(start)
    with rank(0) as listener:
        near, _ = connect(here, port, listener)
        far, _ = listener.accept()
        with near, far:
            processes = [psutil.Process(one._process.pid) for one in (here, there) if one._process is not None]
            before = [process.memory_info().rss for process in processes]
            near.settimeout(1.0)
            with pytest.raises(TimeoutError):
                near.sendall(bytes(200 << 20))  # which nobody reads
            for process, size in zip(processes, before, strict=True):
                assert process.memory_info().rss < size + (8 << 20)


def test_a_rank_that_has_the_token_reaches_nothing_but_ranks_of_its_run(start: Start) -> None:
    port = free_port()
    start(port)
    with (
        rank(0) as own,
        socket.create_server(("0.0.0.0", 0)) as service,
        socket.create_server((HERE, 0)) as local,
        rank(0, make_token()) as other,  # of another run of the same user
        socket.create_server((own_address(1), 0)) as unknown,
    ):
        own_port, everywhere, inside = (one.getsockname()[1] for one in (own, service, local))
        assert ask(port, Target(own_address(0), own_port, False).to_bytes()) == TunnelAnswer.CONNECTED
        assert ask(port, Target(own_address(0), everywhere, False).to_bytes()) == TunnelAnswer.NOBODY
        assert is_portable() or ask(port, Target(own_address(1), own_port, False).to_bytes()) == TunnelAnswer.NOBODY
        for listener in (other, unknown):
            assert ask(port, Target(*listener.getsockname(), False).to_bytes()) == TunnelAnswer.NOBODY
        for content in (Target("127.0.0.2", inside, False).to_bytes(), b"GET / HTTP/1.1\r\n"):
            assert ask(port, content) is None
        for listener in (service, local, other, unknown):
            listener.settimeout(0.0)
            with pytest.raises(BlockingIOError):
                listener.accept()


def ask(port: int, content: bytes) -> int | None:
    """What a tunnel answers to somebody with the token."""
    with socket.create_connection((HERE, port), timeout=10) as raw, client_context(TOKEN).wrap_socket(raw) as line:
        line.sendall(content)
        try:
            answer = line.recv(1)
        except ConnectionResetError:
            return None
        return answer[0] if answer else None


@contextmanager
def as_another_user(at: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Connect as another user of this machine: the kernel notes who has made a socket."""
    with ExitStack() as opened:
        os.seteuid(65534)
        try:
            strangers = [opened.enter_context(socket.socket()) for _ in range(count)]
        finally:
            os.seteuid(0)
        for stranger in strangers:
            stranger.settimeout(10)
            stranger.connect(at)
        yield strangers


@not_portable
def test_another_user_of_this_machine_cannot_use_a_ranks_way_out(start: Start) -> None:
    need_root("become another user")
    port, _, here = two(start)
    with rank(0) as listener:
        number, at = here.open(
            HERE, port, stand_in_address(0, connects_here=False), listener.getsockname(), own_port=60_000
        )
        with as_another_user(at, 1) as (stranger,):
            assert stranger.recv(1) == b""
        with socket.create_connection(at, timeout=10), listener.accept()[0]:
            assert here.failures([number], 5.0) == {}


@not_portable
def test_a_tunnel_without_a_descriptor_for_a_moment_says_so_and_goes_on(start: Start) -> None:
    port, _, here = two(start)
    assert here._process is not None
    process = psutil.Process(here._process.pid)
    with rank(0) as listener:
        number, at = here.open(
            HERE, port, stand_in_address(0, connects_here=False), listener.getsockname(), own_port=60_000
        )
        with descriptors_left(process, 1), socket.create_connection(at, timeout=10) as near:
            near.settimeout(10)  # it is accepted, but the kernel's list of connections cannot be opened
            assert near.recv(1) == b""
        assert "the kernel does not say who connects (too many open files)" in here.failures([number], 5.0)[number]
        near, number = connect(here, port, listener)
        with near, listener.accept()[0]:
            assert here.failures([number], 5.0) == {}


@contextmanager
def descriptors_left(process: psutil.Process, count: int) -> Iterator[None]:
    """Let a process open no more files than this."""
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{process.pid}/fd")}
    free = itertools.islice((number for number in itertools.count() if number not in taken), count + 1)
    process.rlimit(psutil.RLIMIT_NOFILE, (list(free)[-1], before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)


def test_what_keeps_a_rank_from_another_is_named(start: Start) -> None:
    port, _, here = two(start, make_token())
    with rank(0) as listener:
        near, number = connect(here, port, listener)
        with near:
            assert "does not have this job's token" in here.failures([number], 10.0)[number]
            assert near.recv(1) == b""
    own = free_port()
    start(own)
    number, at = here.open(HERE, own, stand_in_address(0, connects_here=False), (own_address(0), 9), own_port=60_000)
    with socket.create_connection(at, timeout=10) as near:
        assert here.failures([number], 10.0)[number].startswith("no rank of that machine's user listens there")
        assert near.recv(1) == b""


def test_a_second_rank_stands_by_and_takes_over(start: Start) -> None:
    port = free_port()
    first, second, far_away = start(port), start(port), start(free_port())
    assert [tunnel._serving()[0] for tunnel in (first, second)] == ["yes", "standby"]
    first.close()
    with rank(0) as listener:
        near, number = connect(far_away, port, listener)  # before the second one has noticed
        with near, listener.accept()[0]:
            assert far_away.failures([number], 10.0) == {}
    assert second.usage().received == 0
    wait_for(lambda: second.usage().connections == 0, "the end of the connection")


def test_a_tunnel_that_failed_to_serve_is_told_to_serve_again(start: Start) -> None:
    tunnel = start(free_port())
    process = tunnel._process
    tunnel._ask({"do": "serve", "address": "192.0.2.1", "port": 9})  # an address that no machine has
    wait_for(lambda: tunnel._serving()[0] == "failed", "the failure", 10)
    tunnel.ensure()
    assert tunnel._serving()[0] == "yes"
    assert tunnel._process is process


def test_a_rank_that_has_ended_still_carries_what_belongs_to_another(start: Start) -> None:
    port = free_port()
    first, second, far_away = start(port), start(port), start(free_port())
    with rank(0) as listener:
        near, _ = connect(far_away, port, listener)
        far, _ = listener.accept()
        first.close()  # which has accepted the connection of the other's
        wait_for(lambda: second._serving()[0] == "yes", "the port")
        with near, far:
            near.sendall(b"go on")
            assert exactly(far, 5) == b"go on"


def test_a_port_that_something_else_has_is_named_with_what_to_do(start: Start) -> None:
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]

        def hang_up() -> None:
            connection, _ = other.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(SecurityError, match=r"free the port, or choose another one with security\.port"):
            start(port)


def test_a_process_that_was_killed_is_started_again(start: Start) -> None:
    tunnel = start(free_port())
    killed = tunnel._process
    assert killed is not None
    killed.kill()
    killed.wait(10)
    assert tunnel.usage() == TunnelUsage()
    with pytest.raises(TunnelGone):
        tunnel.open(HERE, 1, stand_in_address(0, connects_here=False), (own_address(0), 1), own_port=60_000)
    tunnel.ensure()
    assert tunnel._process is not None
    assert tunnel._process.pid != killed.pid
    assert set(tunnel._ask({"do": "stats"})) == {field.name for field in fields(TunnelUsage)}, (
        "nothing is counted in vain"
    )
    assert tunnel.usage().seconds > 0


def test_it_ends_with_its_rank_although_a_child_of_that_holds_the_line() -> None:
    program = (
        "import os, sys, time; from horizonml.security.token import make_token; "
        "from horizonml.comm.tunnel.client import Tunnel; "
        f"tunnel = Tunnel(make_token(), '127.0.0.1', {free_port()}); "
        "child = os.fork(); child or [os.close(1), os.close(2), time.sleep(20), os._exit(0)]; "
        "print(tunnel._process.pid, child, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    tunnel, child = map(int, done.stdout.split())
    try:
        wait_for(lambda: not psutil.pid_exists(tunnel), "the end of the tunnel", 10)
    finally:
        os.kill(child, signal.SIGKILL)


def test_machines_may_have_addresses_of_version_6(start: Start) -> None:
    need_ipv6()
    port = free_port()
    there = Tunnel(TOKEN, "::1", port)
    here = start(free_port())
    with rank(0) as listener:
        number, at = here.open(
            "::1", port, stand_in_address(0, connects_here=False), listener.getsockname(), own_port=60_000
        )
        with socket.create_connection(at, timeout=10) as near, listener.accept()[0] as far:
            near.sendall(b"hello")
            assert exactly(far, 5) == b"hello"
            assert here.failures([number], 5.0) == {}
    there.close()
