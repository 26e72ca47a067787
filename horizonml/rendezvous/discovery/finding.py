"""Finds the run that this device is to join: by its announcement, or at the address that the user gave.

Anyone may announce a service, so only those that have this device's token lead to a run.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from horizonml import __version__
from horizonml.errors import JobError, RendezvousError
from horizonml.machine.network import rate_to, service_address
from horizonml.rendezvous.client import Client, ServiceError
from horizonml.rendezvous.device_messages import JobOffer
from horizonml.rendezvous.discovery.checkup import explain_silence
from horizonml.rendezvous.discovery.diagnosis import diagnose_peer, explain_clocks, explain_misfits
from horizonml.rendezvous.discovery.records import PORT, FoundService
from horizonml.rendezvous.discovery.service import browse
from horizonml.rendezvous.messages import Nothing
from horizonml.rendezvous.wire import fields_of, read
from horizonml.security.tls import client_context
from horizonml.security.token import Token
from horizonml.text import printable

SECONDS = 10.0  # in which a run is found, if one is there
_MOST_NAMED = 5  # services that are not for this device
_GOING_ON_SECONDS = 1.5  # in which a run that goes on without the device that had begun it is found
_SETTLE_SECONDS = 0.5  # in which a second one may announce itself, too


@dataclass(frozen=True)
class ServiceAddress:
    """Where the service of a run is: what it is called, and the addresses to try."""

    name: str
    hosts: tuple[str, ...]
    port: int


def at(peer: str, option: str = "--peer", port: int = PORT) -> ServiceAddress:
    """Return the place that the user named as HOST or HOST:PORT, with this port if there is none. Raises JobError."""
    bare = peer.count(":") > 1 and not peer.startswith("[")  # an address of IPv6 without a port
    text = peer if ":" in peer.rpartition("]")[2] and not bare else f"[{peer.strip('[]')}]:{port}"
    try:
        host, found = service_address(text)
    except ValueError:
        raise JobError(f"{option}: {peer!r} is not HOST or HOST:PORT, for example 192.168.1.10:{port}") from None
    return ServiceAddress(host, (host,), found)


def find(
    token: Token | None, choose: Callable[[Sequence[FoundService]], FoundService | None], stop: Callable[[], bool]
) -> ServiceAddress | None:
    """Return the lobby to join, or None if `stop` says so.

    Announcements prove nothing, so only services count that show the token; where none of those that were announced
    does, others are looked for. Of several runs, `choose` names one, or None if nobody can be asked. Raises
    RendezvousError with the reasons if there is none.
    """
    search = _Search(token, stop)
    runs = search.run()
    if stop():
        return None
    search.tell(runs)
    if not runs:
        raise RendezvousError(search.explain())
    chosen = runs[0] if len(runs) == 1 else choose(runs)
    if stop():
        return None
    if chosen is None:
        names = "; ".join(f"--peer {service.host}:{service.port} for {words(service)}" for service in runs)
        raise RendezvousError(f"there are {len(runs)} runs with this device's token; choose one: {names}")
    return ServiceAddress(chosen.name, chosen.addresses or (chosen.host,), chosen.port)


class _Search:
    def __init__(self, token: Token | None, stop: Callable[[], bool]) -> None:
        self._token, self._token_id, self._stop = token, token.id if token is not None else "", stop
        self._prover = Prover(token)
        self._found: list[FoundService] = []  # all, whether they fit or not
        self._seconds = 0.0  # until the first that fits

    def run(self) -> list[FoundService]:
        """Return the runs, as soon as there is one."""
        begin, runs = time.monotonic(), list[FoundService]()
        while not runs and not self._stop() and (left := begin + SECONDS - time.monotonic()) > 0:
            first = self._look(left)
            self._seconds = (first or time.monotonic()) - begin
            runs = self._prover.prove(self._fitting(), self._stop)
        return runs

    def tell(self, runs: Sequence[FoundService]) -> None:
        """Say what was found."""
        for service in runs:
            print(f"found {words(service)} (after {self._seconds:.1f} s)", flush=True)
        known = {(host, service.port) for service in runs for host in service.addresses}
        others = [service for service in self._found if (service.host, service.port) not in known]
        for service in others[:_MOST_NAMED]:
            why = "it does not show this device's token" if fits(service, self._token_id) else "not for this device"
            print(f"found {words(service)}, but {why}", flush=True)
        if len(others) > _MOST_NAMED:
            print(f"found {len(others) - _MOST_NAMED} more that this device cannot join", flush=True)

    def explain(self) -> str:
        """Return why there is no run."""
        fitting, misfits = self._fitting(), explain_misfits(self._found, self._token_id, __version__)
        reasons = "\n".join(misfits or explain_silence())
        if len(fitting) == 1 and len(self._found) == 1:
            reasons = diagnose_peer(fitting[0].host, fitting[0].port, self._token) or reasons
        clocks = explain_clocks(None)
        reasons += f"\n{clocks}" if clocks is not None else ""
        return (
            f"no run was found within {SECONDS:.0f} s\n{reasons}\n"
            "`horizonml join --peer HOST` goes to a device's address without looking for it, and "
            "`horizonml doctor --peer HOST` looks for what is in the way."
        )

    def _look(self, seconds: float) -> float | None:
        """Look for services until some may be tried, and return when the first of them was found."""
        first: list[float] = []

        def note(service: FoundService) -> bool:
            if fits(service, self._token_id) and self._prover.is_worth_a_try(service):
                first.append(time.monotonic())
            return False

        def settled() -> bool:
            return self._stop() or bool(first and time.monotonic() - first[0] > _SETTLE_SECONDS)

        def wanted(service: FoundService) -> bool:
            return fits(service, self._token_id) and self._prover.is_new(service)

        self._found = browse(seconds, note, settled, wanted) or self._found
        return first[0] if first else None

    def _fitting(self) -> list[FoundService]:
        return [service for service in self._found if fits(service, self._token_id)]


def going_on(token: Token | None, lineage: str) -> FoundService | None:
    """Return where a training of this lineage goes on, if its devices announce it; that takes a second or two."""
    prover = Prover(token)
    found = browse(_GOING_ON_SECONDS)
    fitting = [one for one in found if fits(one, token.id if token is not None else "")]
    runs = prover.prove(fitting, lambda: False) if fitting else []
    return next((one for one in runs if prover.offers[one.host, one.port].lineage == lineage), None)


def fits(service: FoundService, token_id: str) -> bool:
    """Return whether this device can join what was found."""
    return service.token_id == token_id and service.version == __version__


def words(service: FoundService) -> str:
    """Return what was found, for people."""
    job = f", which trains {service.job}" if service.job else ""
    return printable(f"{service.name} at {service.host}:{service.port}{job}")


MOST_AT_ONCE = 64  # addresses that are tried at the same time
PROOF_SECONDS = 4.0  # for an address to show the token, and say which run is there
_MOST_TRIES = 2  # of one address, which may be slow the first time
_LOOK_SECONDS = 0.02

Address = tuple[str, int]


class Prover:
    """Connects to services that were found, and remembers which of them have been tried."""

    def __init__(self, token: Token | None) -> None:
        """Without a token, a service only has to say which run is there."""
        self._tls = client_context(token) if token is not None else None
        self._tries: Counter[Address] = Counter()
        self.offers: dict[Address, JobOffer] = {}

    def is_new(self, service: FoundService) -> bool:
        """Return whether an address of a service has never been tried."""
        return any(self._tries[address] == 0 for address in _addresses(service))

    def is_worth_a_try(self, service: FoundService) -> bool:
        """Return whether an address of a service may be tried once more."""
        return any(self._tries[address] < _MOST_TRIES for address in _addresses(service))

    def prove(self, services: Sequence[FoundService], stop: Callable[[], bool]) -> list[FoundService]:
        """Return those that lead to runs, one for each run, with an address that answered as the first.

        Of several that did, it is the one towards which this device's interface is the fastest, such as a cable.
        It takes some seconds at most, and hardly any where all answer.
        """
        self.offers = runs = dict[Address, JobOffer]()
        chosen = self._in_turn(services)
        threads = [threading.Thread(target=self._ask, args=(address, runs), daemon=True) for address in chosen]
        for thread in threads:
            thread.start()
        answered, until = False, time.monotonic() + 2 * PROOF_SECONDS
        while time.monotonic() < until and not stop() and any(thread.is_alive() for thread in threads):
            if runs and not answered:
                answered, until = True, min(until, time.monotonic() + _SETTLE_SECONDS)
            time.sleep(_LOOK_SECONDS)
        return list(_by_run(services, dict(runs)))

    def _in_turn(self, services: Iterable[FoundService]) -> list[Address]:
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

    def _ask(self, address: Address, runs: dict[Address, JobOffer]) -> None:
        """Note which run is at an address, if it is one of this device's."""
        try:
            with closing(Client(address, self._tls, PROOF_SECONDS)) as client:
                runs[address] = read(JobOffer, client.ask(fields_of(Nothing(), "job"), PROOF_SECONDS))
        except (ServiceError, ValueError):
            return  # it is a stranger's, or no run is there


def _addresses(service: FoundService) -> list[Address]:
    return [(host, service.port) for host in service.addresses or (service.host,)]


def _by_run(services: Iterable[FoundService], runs: dict[Address, JobOffer]) -> Iterable[FoundService]:
    """Yield a service for each run; whoever announces the run of another device adds nothing."""
    known: set[str] = set()
    for service in services:
        answered = [address for address in _addresses(service) if address in runs]
        for host, port in sorted(answered, key=lambda one: -rate_to(*one)):
            run = runs[host, port]
            if run.run in known:
                continue
            known.add(run.run)
            yield replace(service, host=host, addresses=tuple(dict.fromkeys((host, *service.addresses))))
            break
