"""Two devices in different houses train together: each behind a router, with nothing forwarded, and a relay between."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horizonml.security.token import make_token, save_token
from tests.distributed.test_up import Output
from tests.netns import CABLE, Lab
from tests.programs import need, need_networks

pytestmark = pytest.mark.slow

INSIDE = "192.168.1.5"  # of the device in each house: they are as alike as houses are
# A relay that takes 25 ms for each direction, as hosts on the internet do.
RELAY = """
import asyncio
import horizonml.rendezvous.relay as relay

async def pump(reader, writer):
    loop = asyncio.get_running_loop()
    while content := await reader.read(1 << 16):
        loop.call_later(0.025, writer.write, content)
    await asyncio.sleep(0.05)
    writer.close()

async def carry(one, other):
    await asyncio.gather(pump(one[0], other[1]), pump(other[0], one[1]))

relay.carry = carry
relay.serve_relay("0.0.0.0", 29410, lambda: False)
"""


class House:
    """A device behind one of the lab's devices, which is its router."""

    def __init__(self, lab: Lab, router: int, home: Path) -> None:
        self._lab, self.home, self.name = lab, home, f"house-{router}"
        home.mkdir()
        (home / ".boot_id").write_text(f"{uuid.uuid4()}\n")
        script = 'hostname "$0" && mount --bind "$1" /proc/sys/kernel/random/boot_id && echo ready && exec cat'
        words = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script, self.name, str(home / ".boot_id")]
        self._holder = lab.start(router, *words)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        for command in (
            f"ip link add inside type veth peer name {CABLE} netns {self._holder.pid}",
            "ip addr add 192.168.1.1/24 dev inside",
            "ip link set inside up",
            "sysctl -qw net.ipv4.ip_forward=1",
            f"iptables -t nat -A POSTROUTING -o {CABLE} -j MASQUERADE",
        ):
            lab.configure(router, command)
        for command in ("link set lo up", f"addr add {INSIDE}/24 dev {CABLE}", f"link set {CABLE} up"):
            self.run("ip", *command.split())
        self.run("ip", "route", "add", "default", "via", "192.168.1.1")

    def _command(self, *words: str) -> list[str]:
        spaces = ["--target", str(self._holder.pid), "--net", "--uts", "--mount"]
        return ["nsenter", *spaces, "env", f"--chdir={self.home}", *words]

    def _environment(self) -> dict[str, str]:
        return self._lab._environment(0, {"HOME": str(self.home), "HOSTNAME": self.name})

    def run(self, *words: str) -> str:
        done = subprocess.run(
            self._command(*words), env=self._environment(), capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, *words: str) -> Output:
        process = subprocess.Popen(
            self._command(sys.executable, "-m", "horizonml", *words), env=self._environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._lab._started.append(process)  # which the lab ends
        return Output(process)

    def records(self, rank: int, kind: str) -> list[dict[str, Any]]:
        file = self.home / "runs" / "digits" / f"rank-{rank}.jsonl"
        *lines, _ = (file.read_text() if file.exists() else "").split("\n")
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]


@pytest.fixture
def houses(tmp_path: Path) -> Iterator[tuple[Lab, House, House]]:
    need_networks()
    need("iptables", "iptables")
    with Lab(tmp_path, 3) as lab:
        yield lab, House(lab, 1, tmp_path / "one"), House(lab, 2, tmp_path / "other")


def test_a_device_in_another_house_joins_by_a_code_and_both_train_to_the_accuracy_of_one(
    houses: tuple[Lab, House, House],
) -> None:
    lab, one, other = houses
    at = lab.addresses[0]
    relay = Output(lab.start(0, sys.executable, "-c", RELAY))
    relay.says("the relay listens on")
    save_token(make_token(), one.home / ".config" / "horizonml" / "token")
    settings = ("epochs=20", "batch_size=32", "parallel.strategy=ddp", "parallel.sync.every=8")
    host = one.start(
        "up", "digits", "--workers", "2", "--relay", at, *(word for each in settings for word in ("--set", each))
    )
    host.says("joins by `horizonml join")
    code = re.findall(r"horizonml join (\d+-[a-z]+-[a-z]+)`", host.text)[-1]
    began = time.monotonic()
    joiner = other.start("join", code, "--relay", at)
    while not other.records(1, "step"):
        assert time.monotonic() - began < 90, f"{host.text}\n\n{joiner.text}"
        assert host.process.poll() is None, host.text
        time.sleep(0.1)
    print(f"{time.monotonic() - began:.1f} s from `join` to the first step")
    assert host.ends(900) == 0, host.text
    assert joiner.ends() == 0, joiner.text
    assert one.records(0, "run")[0]["world_size"] == 2
    assert one.records(0, "evaluation")[-1]["accuracy"] >= 0.97
    assert "Traceback" not in host.text + joiner.text + relay.text
