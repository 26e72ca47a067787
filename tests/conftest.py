"""Before any test: how the processes that run tests use their threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import horizonml  # noqa: F401  (first: it says how OpenMP's threads wait, before torch loads them)

if "PYTEST_XDIST_WORKER" in os.environ:  # others run tests on the other cores
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _interface_of_its_own() -> Iterator[None]:
    """Undo a choice of network interface, which a test that meets others makes for its process and all it starts."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    yield
    if before is None:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = before
