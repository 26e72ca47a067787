"""Containers that share the cores of a machine, in the simulation of a step."""

from __future__ import annotations

import math
import random

import pytest

from horizonml.planner.profile import Host
from horizonml.planner.simulate import cores_of

CORES, RANKS = 0.3, 5


def test_containers_that_share_cores_do_not_alternate_without_end() -> None:
    """Whatever the works and allowances, taking turns happens in times of a size that counts, so events are few."""
    for seed in range(400):
        rng = random.Random(seed)
        hosts = [Host((rank,), CORES, 1e12, machine="one", machine_cores=2.0) for rank in range(RANKS)]
        allowances = [rng.choice([0.0, rng.uniform(0, 0.03)]) for _ in hosts]
        cores = cores_of(hosts, [host.cores for host in hosts], allowances)
        machine = cores[0].machine
        works = [rng.uniform(0.005, 0.3) for _ in hosts]
        for rank, work in enumerate(works):
            machine.begin(cores[rank], rank, work)
        events = 0
        while (after := machine.next_change) < math.inf:
            machine.advance(machine.now + after)
            machine.end()
            machine.balance()
            events += 1
            assert events < 100, f"seed {seed}: {events} events in {machine.now} s"
        assert max(works) <= machine.now <= 1.1 * max(works) / CORES, f"seed {seed}"


def test_an_emulated_device_never_computes_faster_than_its_cores() -> None:
    for bursts, seconds in ((True, 0.01), (False, 0.01 / 0.3)):
        (cores,) = cores_of([Host((0,), 0.3, 1e9, bursts=bursts)], [0.3], [0.03])
        cores.machine.begin(cores, 0, 0.01)
        assert cores.machine.next_change == pytest.approx(seconds)
        cores.machine.advance(seconds)
        assert cores.machine.end() == [0]
