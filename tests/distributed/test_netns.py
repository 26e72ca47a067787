"""The lab of devices that other tests use: its devices are as separate as machines, and nothing of it stays."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from tests.netns import Lab
from tests.programs import need_networks

WHO = "import socket; from horizonml.machine.host import machine_id; print(socket.gethostname(), machine_id())"


def test_devices_are_machines_of_their_own_and_reach_each_other(tmp_path: Path) -> None:
    need_networks()
    interfaces = set(psutil.net_if_addrs())
    with Lab(tmp_path, 3, ["laptop"]) as lab:
        assert lab.names == ["laptop", "device-1", "device-2"]
        known = [lab.run(device, sys.executable, "-c", WHO).stdout.split() for device in range(3)]
        assert [name for name, _ in known] == lab.names
        assert len({identifier for _, identifier in known}) == 3
        assert lab.run(1, "pwd").stdout.strip() == lab.run(1, "sh", "-c", "echo $HOME").stdout.strip()
        listen = "import socket; s = socket.create_server(('', 5000)); print('up', flush=True); s.accept()"
        server = lab.start(2, sys.executable, "-c", listen)
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        connect = f"import socket; socket.create_connection(('{lab.addresses[2]}', 5000), timeout=2)"
        lab.unplug(2)
        assert lab.run(0, sys.executable, "-c", connect).returncode != 0
        lab.plug_in(2)
        end = time.monotonic() + 15
        while True:  # the kernel goes on believing for a moment that the address has nobody
            done = lab.run(0, sys.executable, "-c", connect)
            if done.returncode == 0 or time.monotonic() > end:
                break
        assert done.returncode == 0, done.stderr
        left = lab.start(1, "sleep", "1000")
    assert left.poll() is not None
    assert set(psutil.net_if_addrs()) == interfaces
