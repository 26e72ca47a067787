from __future__ import annotations

from tests.distributed.conftest import pool

__all__ = ["pool"]  # a fixture: processes that are ranks
