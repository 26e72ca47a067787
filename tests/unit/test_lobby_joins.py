"""A hundred devices at one lobby, over the real service and TLS; `python -m benchmarks.joins` measures the same."""

from __future__ import annotations

from benchmarks.joins import measure


def test_a_hundred_devices_join_at_once_and_each_gets_a_rank_of_its_own() -> None:
    result = measure(100, still_seconds=0.1)
    assert (result.devices, result.ranks) == (100, 100)
    assert result.service_memory < 64 << 20
