"""Devices find each other by real mDNS in networks of their own, and say why where they do not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from horizonml import __version__
from tests.netns import CABLE, Lab
from tests.programs import need, need_networks

DEVICES = 6
HOST, OTHER, SEEKER, DEAF, LATE, STRANGER = range(DEVICES)

ANNOUNCE = """
import sys
from horizonml.rendezvous.discovery.service import Announcement
with Announcement(int(sys.argv[1]), sys.argv[2], sys.argv[3], *sys.argv[4:]) as announcement:
    print(announcement.problem, flush=True)
    sys.stdin.read()
"""
BROWSE = """
import dataclasses, json, sys
from horizonml.rendezvous.discovery.service import browse
wanted, seen = sorted(sys.argv[2:]), set()
def enough(found):
    if found.name in wanted:
        seen.add((found.name, found.host, found.port))
    return bool(wanted) and sorted(name for name, *_ in seen) == wanted
print(json.dumps([dataclasses.asdict(found) for found in browse(float(sys.argv[1]), enough)]))
"""
EXPLAIN = "from horizonml.rendezvous.discovery.checkup import explain_silence; print(*explain_silence(), sep='\\n')"
PEER = """
import sys
from horizonml.rendezvous.discovery.diagnosis import diagnose_peer
print(diagnose_peer(sys.argv[1], 29400, None, seconds=2.0))
"""
# What a stranger can say: junk, nonsense, addresses elsewhere, too many services, names that paint the terminal.
FLOOD = """
import random, socket, sys
from zeroconf import ServiceInfo, Zeroconf
own, dice = sys.argv[1], random.Random(1)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
    plain.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own))
    for _ in range(500):
        junk = dice.randbytes(dice.randrange(1400))
        header = dice.choice([b"", b"\\0" * 4 + b"\\0\\1" * 4, b"\\0\\0\\x84\\0" + b"\\xff" * 8])
        for target in ("224.0.0.251", sys.argv[3]):
            plain.sendto(header + junk, (target, 5353))
zeroconf = Zeroconf(interfaces=[own])
TYPE = "_horizonml._tcp.local."
plain = {"format": "1", "token": "0123abcd", "name": "evil", "version": "1", "job": ""}
def say(label, properties, address=own, port=29400):
    info = ServiceInfo(TYPE, f"{label}.{TYPE}", port=port, properties=properties, server=f"{label}.local.",
                       parsed_addresses=[address])
    zeroconf.register_service(info, cooperating_responders=True)
say("a", plain | {"name": "red\\x1b[31m"})
say("b", plain | {"token": "'; rm"})
say("c", plain, "8.8.8.8")
say("d", plain, "127.0.0.1")
say("e", plain, port=0)
say("f", b"\\xff" * 40)
say("g", {})
for number in range(int(sys.argv[2])):
    label, properties = f"x{number}", plain | {"name": f"x{number}"}
    zeroconf.registry.async_add(ServiceInfo(TYPE, f"{label}.{TYPE}", port=1, properties=properties,
                                            server=f"{label}.local.", parsed_addresses=[own]))
print("said", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    need_networks()
    with Lab(tmp_path_factory.mktemp("lab"), DEVICES, ["laptop", "other", "seeker", "deaf", "late", "strange"]) as made:
        yield made


def announce(lab: Lab, device: int, *words: str) -> Any:
    process = lab.start(device, sys.executable, "-c", ANNOUNCE, *words)
    assert process.stdout is not None
    assert process.stdout.readline() == "None\n"
    return process


def withdraw(process: Any) -> None:
    process.communicate(timeout=80)  # closes the pipe that it waits for
    assert process.returncode == 0


def browse(lab: Lab, device: int, seconds: float, *wanted: str) -> list[dict[str, Any]]:
    """What a device finds: it ends early as soon as it has found what is wanted."""
    done = lab.run(device, sys.executable, "-c", BROWSE, str(seconds), *wanted, seconds=30)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def explain(lab: Lab, device: int) -> str:
    done = lab.run(device, sys.executable, "-c", EXPLAIN)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_devices_find_what_others_announce_until_it_is_withdrawn(lab: Lab) -> None:
    """A browse of five minutes ends as soon as all is found, or the time of this test is up."""
    odd = "Käse <Brett>.local " + "x" * 60
    running = [
        announce(lab, HOST, "29400", "0123abcd", "digits", "pi"),
        announce(lab, OTHER, "29400", "ffff0000", "text", "pi"),
        announce(lab, OTHER, "29410", "", "", odd),
    ]
    found = {each["name"]: each for each in browse(lab, SEEKER, 300, "pi", "pi", odd[:63])}
    assert set(found) == {"pi", "pi-2", odd[:63]}, "services with one name are two, and any name is safe"
    assert {
        (each["host"], each["port"], each["token_id"], each["version"], each["job"]) for each in found.values()
    } == {
        (lab.addresses[HOST], 29400, "0123abcd", __version__, "digits"),
        (lab.addresses[OTHER], 29400, "ffff0000", __version__, "text"),
        (lab.addresses[OTHER], 29410, "", __version__, ""),
    }
    assert all(each["host"] == each["addresses"][0] for each in found.values())
    assert "pi" in [each["name"] for each in browse(lab, HOST, 300, "pi")], "itself, too"
    for process in running:
        withdraw(process)
    assert browse(lab, SEEKER, 1) == []


def test_a_stranger_can_neither_confuse_a_browse_nor_hide_the_others(lab: Lab) -> None:
    laptop = announce(lab, HOST, "29400", "0123abcd", "digits")
    addresses = lab.addresses[STRANGER], lab.addresses[HOST]
    stranger = lab.start(STRANGER, sys.executable, "-c", FLOOD, addresses[0], "600", addresses[1])
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "said\n"
    found = browse(lab, SEEKER, 300, "laptop")
    assert "laptop" in [each["name"] for each in found]
    assert len(found) <= 256
    assert {each["host"] for each in found} <= {lab.addresses[HOST], lab.addresses[STRANGER]}
    assert not {"evil"} & {each["name"] for each in found}
    withdraw(laptop)
    stranger.kill()


def test_a_device_without_a_network_and_one_with_docker_s_alone_say_so(lab: Lab) -> None:
    lab.configure(LATE, f"ip link set {CABLE} down")
    assert browse(lab, LATE, 0.5) == []
    assert explain(lab, LATE).startswith("no network interface is up and has an address")
    lab.configure(LATE, "ip link add docker0 type bridge")
    lab.configure(LATE, "ip addr add 172.17.0.1/16 dev docker0")
    lab.configure(LATE, "ip link add veth0 type veth peer name veth1")
    lab.configure(LATE, "ip link set veth1 master docker0")
    for name in ("veth0", "veth1"):
        lab.configure(LATE, f"ip link set {name} addrgenmode none")  # or each gets a link-local address of its own
    for name in ("veth0", "veth1", "docker0"):
        lab.configure(LATE, f"ip link set {name} up")
    deadline = time.monotonic() + 20
    while "only docker0" not in (said := explain(lab, LATE)):
        assert time.monotonic() < deadline, f"docker0 is not up within 20 s: {said}"
        time.sleep(0.2)
    process = lab.start(LATE, sys.executable, "-c", ANNOUNCE, "29400", "0123abcd", "digits")
    assert process.stdout is not None
    assert "only docker0 is up" in process.stdout.readline()
    withdraw(process)


def test_what_is_wrong_with_a_peer_is_said(lab: Lab) -> None:
    need("iptables", "iptables")

    def diagnose(host: str) -> str:
        done = lab.run(SEEKER, sys.executable, "-c", PEER, host)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "nothing listens on port 29400" in diagnose(lab.addresses[HOST])
    lab.configure(HOST, "iptables -A INPUT -p tcp --dport 29400 -j DROP")
    assert "does not answer on port 29400" in diagnose(lab.addresses[HOST])
    assert "let in TCP ports 29400 to 29402" in diagnose(lab.addresses[HOST])
    lab.configure(HOST, "iptables -F")
    assert "This device has no route to 198.51.100.7" in diagnose("198.51.100.7")
    assert "The name tisch.local does not resolve" in diagnose("tisch.local")
