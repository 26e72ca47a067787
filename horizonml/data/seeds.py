"""Derives seeds for independent uses of random numbers."""

from __future__ import annotations

import hashlib


def name_seed(seed: int, *names: object) -> int:
    """Return a seed of 63 bits from the job's seed and the purpose of the random numbers."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
