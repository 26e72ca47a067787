"""Tells which announced services lead to a run of this device's token, since anyone may announce one."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace

from horizonml.discovery.records import Found
from horizonml.lobby.messages import identifier
from horizonml.rendezvous.client import Client, ServiceError
from horizonml.security.tls import client_context
from horizonml.security.token import Token

PORT = 29400
MOST_AT_ONCE = 64  # addresses that are tried at the same time
SECONDS = 4.0  # for an address to show the token, and say which run is there
_MOST_TRIES = 2  # of one address, which may be slow the first time
_SETTLE_SECONDS = 0.5  # in which a second run may answer, too
_LOOK_SECONDS = 0.02

Address = tuple[str, int]


class Prover:
    """Connects to services that were found, and remembers which of them have been tried."""

    def __init__(self, token: Token | None) -> None:
        """Without a token, a service only has to say which run is there."""
        self._tls = client_context(token) if token is not None else None
        self._tries: Counter[Address] = Counter()

    def is_new(self, service: Found) -> bool:
        """Return whether an address of a service has never been tried."""
        return any(self._tries[address] == 0 for address in _addresses(service))

    def is_worth_a_try(self, service: Found) -> bool:
        """Return whether an address of a service may be tried once more."""
        return any(self._tries[address] < _MOST_TRIES for address in _addresses(service))

    def prove(self, services: Sequence[Found], stop: Callable[[], bool]) -> list[Found]:
        """Return those that lead to runs, one for each run, with the address that answered as the first.

        It takes some seconds at most, and hardly any where all answer.
        """
        runs: dict[Address, str] = {}
        chosen = self._in_turn(services)
        threads = [threading.Thread(target=self._ask, args=(address, runs), daemon=True) for address in chosen]
        for thread in threads:
            thread.start()
        answered, until = False, time.monotonic() + 2 * SECONDS
        while time.monotonic() < until and not stop() and any(thread.is_alive() for thread in threads):
            if runs and not answered:
                answered, until = True, min(until, time.monotonic() + _SETTLE_SECONDS)
            time.sleep(_LOOK_SECONDS)
        return list(_by_run(services, dict(runs)))

    def _in_turn(self, services: Iterable[Found]) -> list[Address]:
        """Return the addresses to try now: a device that announces many services has to wait for the others.

        The usual port comes first, so that nobody can put many ports before another device's.
        """
        addresses = list(dict.fromkeys(address for service in services for address in _addresses(service)))
        random.shuffle(addresses)  # so that nobody can be the first each time
        number: Counter[str] = Counter()
        ranked: list[tuple[int, bool, int, Address]] = []
        for host, port in addresses:
            number[host] += 1
            if self._tries[host, port] < _MOST_TRIES:
                ranked.append((self._tries[host, port], port != PORT, number[host], (host, port)))
        chosen = [address for *_, address in sorted(ranked, key=lambda each: each[:3])[:MOST_AT_ONCE]]
        self._tries.update(chosen)
        return chosen

    def _ask(self, address: Address, runs: dict[Address, str]) -> None:
        """Note which run is at an address, if it is one of this device's."""
        try:
            with closing(Client(address, self._tls, SECONDS)) as client:
                runs[address] = identifier(client.ask({"do": "job"}, SECONDS), "run")
        except (ServiceError, ValueError):
            return  # it is a stranger's, or no run is there


def _addresses(service: Found) -> list[Address]:
    return [(host, service.port) for host in service.addresses or (service.host,)]


def _by_run(services: Iterable[Found], runs: dict[Address, str]) -> Iterable[Found]:
    """Yield a service for each run; whoever announces the run of another device adds nothing."""
    known: set[str] = set()
    for service in services:
        for host, port in _addresses(service):
            run = runs.get((host, port))
            if run is None or run in known:
                continue
            known.add(run)
            yield replace(service, host=host, addresses=tuple(dict.fromkeys((host, *service.addresses))))
            break
