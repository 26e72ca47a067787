"""A lab of devices in network namespaces of this machine: a switch, and some devices that are plugged into it.

Each device has a network, a host name, a home and a machine identifier of its own, so that programs take the devices
for several machines. The kernel, the processors and the files are shared. As root and, where the kernel allows user
namespaces, without it:

    with Lab(tmp_path, 3) as lab:
        server = lab.start(0, sys.executable, "-m", "horizonml", "rendezvous", "--host", lab.addresses[0])
        done = lab.run(1, "ping", "-c", "1", lab.addresses[0])

Nothing is left behind: what was started is ended, and the networks end with their last process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.chaos.network import Networks
from horizonml.runtime.forkserver import SERVER
from tests.distributed.processes import environment

CABLE = "cable"  # the network interface of each device, beside its loopback interface
_BOOT_ID = "/proc/sys/kernel/random/boot_id"  # by which HorizonML recognises a machine


class Lab:
    """Devices with networks of their own, which are numbered from 0. Used as a context manager, it ends them.

    Tests call `tests.programs.need_networks` first, which skips them where the kernel gives no networks.
    """

    def __init__(self, folder: Path, devices: int, names: Sequence[str] = ()) -> None:
        """Create the devices, with their homes in `folder`; they are called "device-0" and so on unless named."""
        self.names = [*names, *(f"device-{number}" for number in range(len(names), devices))]
        self.homes = [folder / name for name in self.names]
        self._holders: list[subprocess.Popen[str]] = []
        self._started: list[subprocess.Popen[str]] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            self.networks = Networks(devices)
            for number in range(devices):
                self._switch_on(number)
            self.addresses = [self._address(number) for number in range(devices)]
            undo.pop_all()

    def command(self, device: int, *command: str, folder: Path | None = None) -> list[str]:
        """Return the command that runs another one on a device, in the device's home or in a folder."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        spaces = ["--target", str(self._holders[device].pid), *user, "--net", "--uts", "--mount"]
        return ["nsenter", *spaces, "env", f"--chdir={folder or self.homes[device]}", *command]

    def run(
        self, device: int, *command: str, folder: Path | None = None, seconds: float = 60.0, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a device to its end, with further environment variables; look at `returncode` yourself."""
        return subprocess.run(
            self.command(device, *command, folder=folder),
            env=self._environment(device, extra),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def start(self, device: int, *command: str, folder: Path | None = None, **extra: str) -> subprocess.Popen[str]:
        """Start a command on a device. It leads a process group, which is killed when the lab ends.

        Both of its outputs are in `stdout`, and its `stdin` is a pipe.
        """
        process = subprocess.Popen(
            self.command(device, *command, folder=folder),
            env=self._environment(device, extra),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def configure(self, device: int, words: str) -> None:
        """Run a command of the system on a device, such as `ip link set cable multicast off`; it must succeed."""
        done = self.run(device, *words.split())
        assert done.returncode == 0, f"`{words}` failed on {self.names[device]}: {done.stderr}"

    def slow_down(self, device: int, bits_per_second: float) -> None:
        """Let a device send and receive only so many bits per second."""
        self.networks.slow_down(device, bits_per_second)

    def close(self) -> None:
        """End what was started, and the devices."""
        for process in self._started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
            finally:
                process.communicate()
        for holder in self._holders:
            holder.communicate()  # closes the pipe that it reads from
        self._started.clear()
        self._holders.clear()
        if hasattr(self, "networks"):
            self.networks.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _switch_on(self, device: int) -> None:
        """Give a device a name, an identifier and a home, which a process holds as long as the lab exists."""
        home = self.homes[device]
        home.mkdir(parents=True, exist_ok=True)
        boot_id = home / ".boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        script = f'hostname "$0" && mount --bind "$1" {_BOOT_ID} && echo ready && exec cat'
        words = ["unshare", "--uts", "--mount", "sh", "-c", script, self.names[device], str(boot_id)]
        holder = subprocess.Popen(
            self.networks.at_rank(device, words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        said = holder.stdout.readline()
        assert said == "ready\n", f"{self.names[device]} cannot be set up: {said}{holder.stdout.read()}"

    def _environment(self, device: int, extra: dict[str, str]) -> dict[str, str]:
        own = {"HOME": str(self.homes[device]), "HOSTNAME": self.names[device], SERVER: ""}  # its ranks are its own
        return {key: value for key, value in environment().items() if not key.startswith("XDG_")} | own | extra

    def _address(self, device: int) -> str:
        done = self.run(device, "ip", "-json", "-4", "address", "show", CABLE)
        return str(json.loads(done.stdout)[0]["addr_info"][0]["local"])
