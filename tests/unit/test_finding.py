"""Which of the services that announce themselves show the token: on this machine, with the real service."""

from __future__ import annotations

import socket
from typing import Any

from horizonml import __version__
from horizonml.job.jobfile import from_values
from horizonml.rendezvous.devices import Devices
from horizonml.rendezvous.discovery import finding
from horizonml.rendezvous.discovery.finding import MOST_AT_ONCE, Prover
from horizonml.rendezvous.discovery.records import FoundService
from horizonml.runtime.lobby.offer import offer
from horizonml.security.tls import server_context
from horizonml.security.token import make_token
from tests.unit.test_join import LINEAGE, serving

TOKEN = make_token()


def run() -> Devices:
    return offer(from_values({"name": "test"}, "the test's job"), LINEAGE).devices()


def announced(name: str, port: int, *hosts: str) -> FoundService:
    hosts = hosts or ("127.0.0.1",)
    return FoundService(name, hosts[0], port, TOKEN.id, __version__, "test", hosts)


def test_only_runs_that_show_the_token_count_and_each_of_them_once() -> None:
    first, second, strange = run(), run(), run()
    with (
        serving(first, server_context(TOKEN)) as one,
        serving(second, server_context(TOKEN)) as two,
        serving(strange, server_context(make_token())) as other,
        serving(strange, None) as plain,
        socket.create_server(("127.0.0.1", 0)) as mute,
    ):
        real = [announced("a", one.port), announced("b", two.port, "127.0.0.9", "127.0.0.1")]
        copy = announced("c", one.port)
        fakes = [announced(f"d{port}", port) for port in (other.port, plain.port, mute.getsockname()[1], 1)]
        prover = Prover(TOKEN)
        assert all(prover.is_new(service) for service in fakes)
        found = prover.prove([*fakes, *real, copy], lambda: False)
        assert [(service.name, service.port) for service in found] == [("a", one.port), ("b", two.port)]
        assert found[1].host in found[1].addresses
        assert not any(prover.is_new(service) for service in [*fakes, *real, copy])
        assert Prover(TOKEN).prove(fakes[:2], lambda: False) == []
        assert Prover(None).prove([announced("e", plain.port)], lambda: False)[0].name == "e"


def test_of_several_addresses_of_a_run_the_one_with_the_fastest_way_there_is_taken(monkeypatch: Any) -> None:
    wifi, cable, gone = "127.0.0.1", "127.0.0.2", "192.0.2.1"
    monkeypatch.setattr(finding, "rate_to", lambda host, port: {wifi: 0, cable: 1000, gone: 10_000}[host])
    with serving(run(), server_context(TOKEN), "0.0.0.0") as place:
        (found,) = Prover(TOKEN).prove([announced("a", place.port, wifi, cable, gone)], lambda: False)
        assert found.host == cable
        assert found.addresses == (cable, wifi, gone)


def test_who_announces_a_thousand_ports_does_not_come_before_another_device() -> None:
    """Nothing answers at these ports, and each search tries a few of them."""
    with serving(run(), server_context(TOKEN)) as place:
        flood = [announced(f"x{port}", port, "127.0.0.2") for port in range(1, 1001)]
        found = Prover(TOKEN).prove([*flood, announced("laptop", place.port)], lambda: False)
        assert [service.name for service in found] == ["laptop"]
        assert len(flood) > MOST_AT_ONCE


def test_an_address_is_tried_twice_and_no_more() -> None:
    prover, gone = Prover(TOKEN), announced("gone", 1)
    for worth in (True, True, False):
        assert prover.is_worth_a_try(gone) is worth
        assert prover.prove([gone], lambda: False) == []
