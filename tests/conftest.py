"""Before any test: how the processes that run tests use their threads."""

from __future__ import annotations

import os

import horizonml  # noqa: F401  (first: it says how OpenMP's threads wait, before torch loads them)

if "PYTEST_XDIST_WORKER" in os.environ:  # others run tests on the other cores
    import torch

    torch.set_num_threads(1)
