"""What some tests need: programs of the system, or the time that there is at night."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
from typing import NoReturn

import pytest

from benchmarks.chaos import network
from horizonml.comm.tunnel.addresses import is_portable

ALL = "HORIZONML_TEST_ALL"  # set where every program is promised, as in CI: one that is missing is a failure there
NIGHTLY = bool(os.environ.get("HORIZONML_NIGHTLY"))  # more random cases, which would take too long for each change
not_portable = pytest.mark.skipif(is_portable(), reason="the portable mode does without the kernel's lists of sockets")
WITHOUT = "HORIZONML_TEST_WITHOUT"  # programs that are not promised nevertheless, separated by spaces


def _absent(message: str) -> NoReturn:
    if os.environ.get(ALL):
        pytest.fail(message)
    pytest.skip(message)


def need(program: str, why: str) -> None:
    """Go on with a test only if a program is installed.

    `make test` must work with nothing but Python and make, so on a bare machine the test is skipped, aloud.
    """
    if shutil.which(program) is None:
        message = f"{program} is not installed: {why}"
        if program in os.environ.get(WITHOUT, "").split():
            pytest.skip(message)
        _absent(message)


def need_buildx() -> None:
    """Go on with a test only where Docker has buildx; no daemon is needed."""
    need("docker", "it reads the files of builds")
    if subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode:
        _absent("Docker's plugin buildx is not installed")


def need_networks() -> None:
    """Go on only where ranks can have networks of their own, which a kernel or a container may forbid."""
    need("ip", "iproute2")
    if (problem := network.problem()) is not None:
        _absent(problem)


def need_ipv6() -> None:
    """Go on with a test only where the machine has addresses of version 6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        _absent(f"this machine has no IPv6: {error}")


def need_root(why: str) -> None:
    """Go on with a test only as root, as CI runs."""
    if os.geteuid() != 0:
        _absent(f"only root can do this: {why}")


def need_package(name: str) -> None:
    """Go on with a test only if an optional package is installed; `make setup` installs all of them."""
    if importlib.util.find_spec(name) is None:
        _absent(f"the Python package {name} is not installed")
