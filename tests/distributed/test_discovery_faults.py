"""Devices find each other on networks that come and go, and on those without IPv4."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest

from horizonml import __version__
from tests.distributed.test_discovery import ANNOUNCE, browse, withdraw
from tests.netns import CABLE, Lab
from tests.programs import need_networks

pytestmark = pytest.mark.slow

HOST, LATE, LINK, LINK_HOST = range(4)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    need_networks()
    with Lab(tmp_path_factory.mktemp("lab"), 4, ["laptop", "late"]) as made:
        yield made


def test_a_service_is_announced_on_a_network_that_comes_later(lab: Lab) -> None:
    """As on a laptop whose Wi-Fi is switched on, or whose address changes, while it serves."""
    lab.configure(LATE, f"ip link set {CABLE} down")
    late = lab.start(LATE, sys.executable, "-c", ANNOUNCE, "29400", "0123abcd", "digits")
    assert late.stdout is not None
    assert "no network interface is up" in late.stdout.readline()
    lab.configure(LATE, f"ip link set {CABLE} up")
    [found] = browse(lab, HOST, 300, "late")
    assert found["host"] == lab.addresses[LATE]
    lab.configure(LATE, f"ip addr del {lab.addresses[LATE]}/16 dev {CABLE}")
    lab.configure(LATE, f"ip addr add 10.251.9.9/16 dev {CABLE}")
    deadline = time.monotonic() + 30
    while [each["host"] for each in browse(lab, HOST, 1)] != ["10.251.9.9"]:
        assert time.monotonic() < deadline, "the new address is not announced within 30 s"
    withdraw(late)


def test_devices_without_ipv4_find_each_other_by_link_local_addresses(lab: Lab) -> None:
    for device in (LINK, LINK_HOST):
        lab.configure(device, f"ip addr flush dev {CABLE} scope global")
    assert lab.run(LINK, "ip", "-6", "addr", "show", CABLE).stdout, "this kernel has IPv6"
    # Where the network has just come up, the address cannot be used for a second or two, and both wait for that.
    service = lab.start(LINK_HOST, sys.executable, "-c", ANNOUNCE, "29400", "0123abcd", "digits", "linked")
    [found] = browse(lab, LINK, 300, "linked")
    assert found["host"].startswith("fe80::")
    assert found["host"].endswith(f"%{CABLE}")
    withdraw(service)
    words = ("29400", "0123abcd", "digits", "linked", __version__, "0.0.0.0")
    service = lab.start(LINK_HOST, sys.executable, "-c", ANNOUNCE, *words)
    assert service.stdout is not None
    assert "it listens at 0.0.0.0, which is no address of cable (fe80::" in service.stdout.readline()
    withdraw(service)
