"""Programs of the system that some tests need."""

from __future__ import annotations

import os
import shutil

import pytest

from horizonml.chaos import network

ALL = "HORIZONML_TEST_ALL"  # set where every program is promised, as in CI: one that is missing is a failure there


def need(program: str, why: str) -> None:
    """Go on with a test only if a program is installed.

    `make test` must work with nothing but Python and make, so on a bare machine the test is skipped, aloud.
    """
    if shutil.which(program) is None:
        message = f"{program} is not installed: {why}"
        if os.environ.get(ALL):
            pytest.fail(message)
        pytest.skip(message)


def need_networks() -> None:
    """Go on only where ranks can have networks of their own, which a kernel or a container may forbid."""
    need("ip", "iproute2")
    problem = network.problem()
    if problem is not None:
        pytest.skip(problem)
