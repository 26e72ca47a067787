"""A relay passes bytes between devices, and nobody can take more of it than a little."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from horizonml.errors import RendezvousError, SecurityError
from horizonml.machine import relay as machine
from horizonml.machine.network import AddressProbe, listen, route_to
from horizonml.machine.relay import PAIRING_ROOM, Relay, address_in, ask, connect, is_relayed, query, through
from horizonml.rendezvous import relay as module
from horizonml.rendezvous.pairing import Pairing, find_and_pair
from horizonml.rendezvous.relay import OPEN_PORTS, Registration, RelayServer, find_at_relay, registered, room_of
from horizonml.rendezvous.service import Service
from horizonml.security.tls import issue, server_context
from horizonml.security.token import make_token
from tests.distributed.processes import wait_for

ROOM = "a-room"


class Running:
    """A relay that runs in a thread."""

    def __init__(self) -> None:
        self.server = RelayServer()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.at = ("127.0.0.1", int(self._listener.getsockname()[1]))
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._begun.wait(10)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(self.server.serve(self._listener))
        self._begun.set()
        await self._ended.wait()
        serving.cancel()

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(10)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.delenv(machine.RELAY, raising=False)
    monkeypatch.setattr(machine, "_ways", {})
    with closing(Running()) as found:
        yield found


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the devices were in different networks."""
    monkeypatch.setattr(machine, "_is_there", lambda *arguments: False)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server of this device that sends back what it gets; the relay may pass connections to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with connection:
                while content := connection.recv(1 << 16):
                    connection.sendall(content)

        def serve() -> None:
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        port = int(listener.getsockname()[1])
        monkeypatch.setattr(module, "OPEN_PORTS", {port})
        yield port
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.usefixtures("apart")
def test_what_is_dialled_at_a_relay_arrives_at_the_port_of_the_device_and_back(relay: Running, echo: int) -> None:
    with Registration(relay.at, ROOM) as there, registered(relay.at, ROOM) as own:
        assert there.relay is not None
        assert is_relayed(there.relay.own)
        assert route_to(there.relay.own, 1)[0] == own.own
        with closing(connect(there.relay.own, echo, 5.0)) as connection:
            connection.settimeout(10.0)
            content = bytes(range(256)) * 4096
            sending = threading.Thread(target=connection.sendall, args=(content,))
            sending.start()
            got = bytearray()
            while len(got) < len(content):
                got += connection.recv(1 << 16)
            sending.join()
            assert got == content
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        probe = AddressProbe([(there.relay.own, echo)])

        def answered() -> bool:
            probe.look()
            return not probe.silent

        wait_for(answered, "the relay's answer", 5)
        probe.close()
    assert not is_relayed(there.relay.own)  # as none is used any more
    wait_for(lambda: not relay.server.rooms, "the end of the registrations", 5)


def test_devices_on_one_network_speak_without_the_relay(relay: Running, echo: int) -> None:
    assert module.usable(), "this machine has no network"
    with Registration(relay.at, ROOM) as there, registered(relay.at, ROOM) as own:
        assert there.relay is not None
        with listen("0.0.0.0", 0) as listener:
            port = int(listener.getsockname()[1])
            assert port not in module.OPEN_PORTS  # so that the relay would not lead there
            with closing(connect(there.relay.own, port, 5.0)) as connection:
                assert connection.getpeername()[1] == port
        with closing(connect(own.own, echo, 5.0)) as connection:  # this device itself
            assert connection.getpeername() == ("127.0.0.1", echo)


@pytest.mark.usefixtures("apart")
def test_only_ports_for_training_are_passed_on(relay: Running, echo: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TAKE_SECONDS", 0.5)
    monkeypatch.setattr(module, "OPEN_PORTS", OPEN_PORTS)
    with Registration(relay.at, ROOM) as there, through(Relay(*relay.at, ROOM, "x")):
        assert there.relay is not None
        with pytest.raises(ConnectionRefusedError, match="that device does not take the call"):
            connect(there.relay.own, echo, 5.0)


def test_a_room_is_for_those_who_know_its_name_and_names_are_taken_once(relay: Running) -> None:
    with Registration(relay.at, ROOM) as there:
        assert there.relay is not None
        for request, words in (
            ({"do": "dial", "room": "other", "to": there.relay.own, "port": 1}, "that device is not here"),
            ({"do": "where", "room": "other", "of": there.relay.own}, "that device is not here"),
            ({"do": "register", "room": ROOM, "as": there.relay.own, "near": []}, "that name is taken"),
            ({"do": "accept", "number": "guessed"}, "nobody waits for that"),
            ({"do": "other"}, "does not know that request"),
            ({}, "do"),
        ):
            with pytest.raises(ConnectionRefusedError, match=words):
                ask(relay.at, request, 5.0)
        assert query(relay.at, {"do": "members", "room": ROOM}, 5.0) == {"members": [there.relay.own]}
        assert query(relay.at, {"do": "members", "room": "other"}, 5.0) == {"members": []}
        with pytest.raises(RendezvousError, match="cannot be used: that name is taken"):
            Registration(relay.at, ROOM, there.relay.own).__enter__()


def test_rooms_differ_between_tokens_and_are_the_same_for_those_that_one_has_issued() -> None:
    one, other = make_token(), make_token()
    assert room_of(one) == room_of(issue(one, 1 << 28)) != room_of(other)


def test_who_says_nothing_or_nonsense_is_dropped(relay: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.3)
    for content in (b"", b"nonsense\n", b"[]\n", b"x" * 100_000, json.dumps({"do": "dial"}).encode() + b"\n"):
        with socket.create_connection(relay.at, 10.0) as connection:
            try:
                connection.sendall(content)
                answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
                assert b"error" in answer
            except ConnectionError:
                pass  # it was dropped with what it still sent
    wait_for(lambda: not relay.server._from, "that nothing is kept of those that have gone", 5)


def test_one_address_takes_no_more_connections_than_it_may(relay: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FROM", 5)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(relay.at, 5.0))
        wait_for(lambda: relay.server._from.total() == 5, "five connections", 5)
        with pytest.raises(ConnectionRefusedError, match="there are too many connections"):
            ask(relay.at, {"do": "members", "room": ROOM}, 5.0)


def test_a_device_registers_again_after_the_relay_was_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.1)
    first = Running()
    with Registration(first.at, ROOM) as there:
        own = there.relay
        assert own is not None
        first.close()
        with socket.create_server(first.at) as listener:
            listener.settimeout(10.0)
            with listener.accept()[0] as connection:
                request = json.loads(machine.read_line(connection))
        assert (request["do"], request["as"]) == ("register", own.own)


def test_what_is_no_relay_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RendezvousError, match=rf"the relay at 127\.0\.0\.1:{port} cannot be used"):
        Registration(("127.0.0.1", port), ROOM).__enter__()


@pytest.mark.usefixtures("apart")
def test_a_device_pairs_through_a_relay(
    relay: Running, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("HORIZONML_TOKEN_FILE", str(tmp_path_factory.mktemp("home") / "token"))
    token, over = make_token(), threading.Event()
    pairing, listener = Pairing(token), socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr(module, "OPEN_PORTS", {listener.getsockname()[1]})
    monkeypatch.setattr("horizonml.rendezvous.pairing.PORT", listener.getsockname()[1])
    service = Service(listener, server_context(token), strangers=pairing)
    thread = threading.Thread(target=service.run, args=(over.is_set,))
    thread.start()
    try:
        with Registration(relay.at, PAIRING_ROOM, address_in(pairing.offer.number)):
            found = find_and_pair(str(pairing.offer.code()), None, relay.at, lambda: False)
            assert found is not None
            assert found[0].id == token.id
            with pytest.raises(SecurityError, match="this is not the code"):
                find_and_pair(f"{pairing.offer.number}-lantern-orbit", None, relay.at, lambda: False)
    finally:
        over.set()
        thread.join()


def test_where_no_run_is_at_a_relay_that_is_said(relay: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.5)
    with registered(relay.at, ROOM) as own, pytest.raises(RendezvousError, match="no run was found at the relay"):
        find_at_relay(own, make_token(), lambda found: None, lambda: False)
