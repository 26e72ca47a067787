"""Programs of the system that some tests need."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

from horizonml.chaos import network

ALL = "HORIZONML_TEST_ALL"  # set where every program is promised, as in CI: one that is missing is a failure there
WITHOUT = "HORIZONML_TEST_WITHOUT"  # programs that are not promised nevertheless, separated by spaces


def need(program: str, why: str) -> None:
    """Go on with a test only if a program is installed.

    `make test` must work with nothing but Python and make, so on a bare machine the test is skipped, aloud.
    """
    if shutil.which(program) is None:
        message = f"{program} is not installed: {why}"
        if os.environ.get(ALL) and program not in os.environ.get(WITHOUT, "").split():
            pytest.fail(message)
        pytest.skip(message)


def need_networks() -> None:
    """Go on only where ranks can have networks of their own, which a kernel or a container may forbid."""
    need("ip", "iproute2")
    problem = network.problem()
    if problem is not None:
        if os.environ.get(ALL):
            pytest.fail(problem)
        pytest.skip(problem)


def need_root(why: str) -> None:
    """Go on with a test only as root, as CI runs."""
    if os.geteuid() != 0:
        message = f"only root can do this: {why}"
        if os.environ.get(ALL):
            pytest.fail(message)
        pytest.skip(message)


def need_package(name: str) -> None:
    """Go on with a test only if an optional package is installed; `make setup` installs all of them."""
    if importlib.util.find_spec(name) is None:
        message = f"the Python package {name} is not installed"
        if os.environ.get(ALL):
            pytest.fail(message)
        pytest.skip(message)
