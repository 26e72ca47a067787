"""What devices announce, how what others announce is checked, and the sentences that say why nobody is found."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizonml.rendezvous.discovery import records
from horizonml.rendezvous.discovery.diagnosis import explain_clocks, explain_misfits
from horizonml.rendezvous.discovery.multicast import Interface, choose, reachable, read_interfaces
from horizonml.rendezvous.discovery.records import FoundService
from horizonml.rendezvous.discovery.service import _Search

ETH = Interface(
    "eth0",
    ("192.168.1.5",),
    ("fe80::5%eth0", "2001:db8::5"),
    (ipaddress.ip_network("192.168.1.0/24"), ipaddress.ip_network("2001:db8::/64")),
)
DOCKER = Interface("docker0", ("172.17.0.1",), (), (ipaddress.ip_network("172.17.0.0/16"),))
LAPTOP = FoundService("laptop", "192.168.1.9", 29400, "0123abcd", "1.0", "digits", ("192.168.1.9",))


def entry(address: str, netmask: str | None = None) -> SimpleNamespace:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SimpleNamespace(family=family, address=address, netmask=netmask)


def state(up: bool = True, flags: str = "up,multicast") -> SimpleNamespace:
    return SimpleNamespace(isup=up, flags=flags)


def test_interfaces_are_those_that_are_up_with_an_address_of_their_own() -> None:
    addresses = {
        "lo": [entry("127.0.0.1", "255.0.0.0"), entry("::1")],
        "wlan0": [entry("192.168.1.5", "255.255.255.0"), entry("fe80::5%wlan0", "ffff:ffff:ffff:ffff::")],
        "eth0": [entry("10.0.0.7", "255.0.0.0")],
        "eth1": [],
        "tun0": [entry("fd00::7", "ffff:ffff:ffff:ffff::/64")],
        "docker0": [entry("172.17.0.1", "255.255.0.0")],
    }
    states = {name: state() for name in addresses} | {"eth0": state(up=False), "tun0": state(flags="up,pointopoint")}
    found = read_interfaces(addresses, states)
    assert [interface.name for interface in found] == ["docker0", "tun0", "wlan0"]
    docker, tunnel, wireless = found
    assert wireless.addresses == ("192.168.1.5", "fe80::5%wlan0")
    assert [str(network) for network in wireless.networks] == ["192.168.1.0/24", "fe80::/64"]
    assert tunnel.addresses == ("fd00::7",)
    assert (tunnel.multicast, wireless.multicast) == (False, True)
    assert docker.virtual
    assert not wireless.virtual


def test_only_addresses_at_which_a_service_listens_are_announced() -> None:
    for host, addresses in (
        ("::", ("192.168.1.5", "fe80::5%eth0")),
        ("0.0.0.0", ("192.168.1.5",)),
        ("fe80::5%eth0", ("fe80::5%eth0",)),
        ("127.0.0.1", ()),
    ):
        assert ETH.listening(host) == addresses


def test_networks_of_containers_are_used_only_where_there_is_nothing_else() -> None:
    for name in ("docker0", "veth12ab", "br-0f3a", "virbr0", "podman1", "cni0", "lxcbr0"):
        virtual = Interface(name, ("172.17.0.1",))
        assert choose([virtual, ETH]) == [ETH]
        assert choose([virtual]) == [virtual]
    for name in ("eth0", "wlp3s0", "br0", "br-lan"):
        assert not Interface(name, ("192.168.1.5",)).virtual


def test_any_host_name_becomes_a_safe_name_and_no_two_are_the_same() -> None:
    for name in ("raspberrypi", "Käse Brett\n", "", "x" * 300, "日本語", "a.b.local", "\0", "🍓" * 99):
        first, second = records.instance(name), records.instance(name)
        assert first != second
        assert len(first) <= 63
        assert all(character in "abcdefghijklmnopqrstuvwxyz0123456789-" for character in first)
        text = records.text(name, "0123abcd", "1.0", "日" * 500)
        assert all(len(f"{key}={value}".encode()) <= 255 for key, value in text.items())
        raw: dict[bytes, bytes | None] = {key.encode(): value.encode() for key, value in text.items()}
        found = records.read(raw, 29400, ["192.168.1.9"], [ETH])
        assert found.name == (records.plain(name, 63) or "192.168.1.9")


def properties(**changes: bytes) -> dict[bytes, bytes | None]:
    plain = {"format": b"1", "token": b"0123abcd", "name": b"laptop", "version": b"1.0", "job": b"digits"}
    return {key.encode(): value for key, value in (plain | changes).items()}


def test_what_a_service_may_not_say_is_refused() -> None:
    assert records.read(properties(), 29400, ["192.168.1.9"], [ETH]) == LAPTOP
    assert records.read(properties(token=b""), 29400, ["192.168.1.9"], [ETH]).token_id == ""
    for changes, words in (
        ({"format": b"2"}, "another kind"),
        ({"token": b"0123ABCD"}, "token"),
        ({"token": b"0123abcd0"}, "token"),
        ({"name": b"\x1b[31mred"}, "name"),
        ({"name": b"x" * 64}, "name"),
        ({"name": b"\xff\xfe"}, "name is not text"),
        ({"version": b"1" * 33}, "version"),
        ({"job": b"j" * 129}, "job"),
    ):
        with pytest.raises(ValueError, match=words):
            records.read(properties(**changes), 29400, ["192.168.1.9"], [ETH])
    for port in (None, 0, 65536):
        with pytest.raises(ValueError, match="port"):
            records.read(properties(), port, ["192.168.1.9"], [ETH])


ELSEWHERE = ["8.8.8.8", "2a00::1", "::ffff:8.8.8.8", "127.0.0.1", "::1", "0.0.0.0", "::", "224.0.0.251", "ff02::fb"]


def test_nobody_can_have_a_device_connect_elsewhere() -> None:
    for address in (*ELSEWHERE, "fe80::9", "fe80::9%wlan7", "nonsense", "255.255.255.255"):
        assert records.order([address], [ETH]) == ()
        with pytest.raises(ValueError, match="no address"):
            records.read(properties(), 29400, [address], [ETH])


def test_the_likeliest_address_comes_first_and_there_are_not_too_many() -> None:
    given = ["10.9.9.9", "2001:db8::9", "fe80::9%eth0", "192.168.1.9", "8.8.8.8", "192.168.1.9"]
    assert records.order(given, [ETH]) == ("192.168.1.9", "2001:db8::9", "fe80::9%eth0", "10.9.9.9")
    assert len(records.order([f"192.168.1.{number}" for number in range(1, 200)], [ETH])) == records.MOST_ADDRESSES
    assert reachable("203.0.113.9", [Interface("eth0", networks=(ipaddress.ip_network("203.0.113.0/24"),))])


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from([b"format", b"token", b"name", b"version", b"job"]), st.binary(max_size=300)),
    st.one_of(st.none(), st.integers()),
    st.lists(st.one_of(st.just("192.168.1.9"), st.text(max_size=40), st.ip_addresses().map(str)), max_size=40),
)
def test_nothing_from_the_network_can_be_read_as_more_than_it_may_say(
    fields: dict[bytes, bytes | None], port: int | None, addresses: list[str]
) -> None:
    try:
        found = records.read({b"format": b"1"} | fields, port, addresses, [ETH, DOCKER])
    except ValueError:
        return
    assert all(text.isprintable() for text in (found.name, found.token_id, found.version, found.job))
    assert 1 <= found.port <= 65535
    assert found.host == found.addresses[0]
    assert not set(found.addresses) & set(ELSEWHERE)


def test_services_with_one_name_get_distinct_names() -> None:
    def named(name: str, host: str) -> FoundService:
        return FoundService(name, host, 29400, "", "", "", (host,))

    found = [named("pi", "10.0.0.3"), named("pi-2", "10.0.0.4"), named("pi", "10.0.0.2"), named("pi", "10.0.0.1")]
    assert [(each.name, each.host) for each in records.distinct(found)] == [
        ("pi", "10.0.0.1"),
        ("pi-2", "10.0.0.2"),
        ("pi-3", "10.0.0.3"),
        ("pi-2-2", "10.0.0.4"),
    ]


def explain(*found: FoundService, token: str = "0123abcd") -> str:
    return "\n".join(explain_misfits(found, token, "1.0"))


def changed(**changes: str) -> FoundService:
    return FoundService(**{**LAPTOP.__dict__, **changes})


def test_a_service_that_does_not_fit_is_named_with_the_reason() -> None:
    for service, token, words in (
        (changed(token_id="ffff0000"), "0123abcd", "has another token (ffff0000) than this device (0123abcd)"),
        (changed(token_id=""), "0123abcd", "has no token, and this device has one (0123abcd)"),
        (LAPTOP, "", "has a token (0123abcd), and this device has none"),
        (changed(version="0.9"), "0123abcd", "runs HorizonML 0.9, and this device 1.0"),
        (LAPTOP, "0123abcd", "did not let it join"),
    ):
        said = explain(service, token=token)
        assert said.startswith("laptop at 192.168.1.9:29400 ")
        assert words in said
    said = explain(*[changed(name=f"pi-{number}", version="0.9") for number in range(9)])
    assert said.count("runs HorizonML 0.9") == 5
    assert "There are 4 more services" in said


def test_clocks_are_compared() -> None:
    assert explain_clocks(59.0) is None
    assert "The service's clock is 61 seconds ahead of this device's" in str(explain_clocks(61.0))
    assert "The service's clock is 3 days behind this device's" in str(explain_clocks(-3 * 86400.0))
    assert "This device's clock has not been set, it says 1970-01-01" in str(explain_clocks(None, 3600.0))


def put(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def answered(number: int) -> SimpleNamespace:
    """What zeroconf says of a service."""
    token = b"0123abcd" if number < 0 else b"ffff0000"
    text = properties(token=token, name=f"x{number}".encode())
    return SimpleNamespace(properties=text, port=29400, parsed_scoped_addresses=lambda: ["192.168.1.9"])


def test_of_too_many_services_the_wanted_ones_are_kept() -> None:
    search = _Search(lambda found: False, lambda found: found.token_id == "0123abcd", own=[ETH])
    for number in range(300):
        search.take(f"x{number}", answered(number))  # type: ignore[arg-type]
    assert len(search.found) == 256
    for number in (-1, -2):
        search.take(f"x{number}", answered(number))  # type: ignore[arg-type]
    assert len(search.found) == 256
    assert {"x-1", "x-2"} <= set(search.found)
    search.take("x300", answered(300))  # type: ignore[arg-type]
    assert {"x-1", "x-2"} <= set(search.found)
