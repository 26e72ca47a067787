"""Lets a device without a token talk to a service for as long as it takes to pair with it (see `security.pairing`).

While a code is offered, the service accepts connections that show no token. They can ask two things, and nothing else:

    pair    {message}    begins an exchange; answered by the service's message
    prove   {proof}      shows that the device has the code; answered by the service's proof and the sealed token
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

from horizonml.errors import HorizonError, RendezvousError, SecurityError
from horizonml.machine.host import device_name
from horizonml.machine.relay import PAIRING_ROOM, Relay, address_in, through
from horizonml.rendezvous.client import Client, ServiceError, ServiceRefuses, Unwanted
from horizonml.rendezvous.discovery.finding import SECONDS, ServiceAddress, at
from horizonml.rendezvous.discovery.records import PORT
from horizonml.rendezvous.discovery.service import browse
from horizonml.rendezvous.server import Answer, Peer
from horizonml.rendezvous.service import at_once
from horizonml.rendezvous.wire import Fields, fields_of, matching, read, text
from horizonml.security.devices import PairedDevices
from horizonml.security.pairing import CodeExchange, CodeOffer, DeviceHalf, WrongCode, read_code
from horizonml.security.tls import any_context, certificate, server_context
from horizonml.security.token import Token

_SECONDS = 10.0  # for each answer
_MOST_CHARACTERS = 2048
_MOST_TRIED = 3  # devices that announce the number of a code; each of them may be a stranger's
Hex = Annotated[str, matching(rf"[0-9a-f]{{2,{_MOST_CHARACTERS}}}", "hexadecimal digits")]


@dataclass(frozen=True)
class PairMessage:
    """A message of SPAKE2."""

    message: Hex


@dataclass(frozen=True)
class Proof:
    """Shows that a device has the code."""

    proof: Hex
    name: Annotated[str, text(255)]  # of the device


@dataclass(frozen=True)
class Paired:
    """Shows that the service has the code, too, and brings the token."""

    proof: Hex
    sealed: Hex


class Pairing:
    """What a service does with devices that show no token."""

    def __init__(self, token: Token) -> None:
        """Offer codes for the shared token. Raises SecurityError if it is one of a single device."""
        self.offer = CodeOffer(certificate(token), PairedDevices(token).issue)
        self._tls = server_context(token)
        self._tls.verify_mode = ssl.CERT_OPTIONAL

    @property
    def tls(self) -> ssl.SSLContext | None:
        """Return what accepts connections with a token and without one, or None where no code is offered."""
        return self._tls if self.offer.code() is not None else None

    def handle(self, peer: Peer, fields: Fields) -> Answer:
        """Answer a device without a token. Raises ValueError."""
        if fields.get("do") == "pair":
            begun = self.offer.begin(bytes.fromhex(read(PairMessage, fields).message))
            peer.state["pairing"] = begun
            return at_once(PairMessage(begun.message.hex()))
        exchange = peer.state.pop("pairing", None)
        if fields.get("do") != "prove" or not isinstance(exchange, CodeExchange):
            raise ValueError("a device without a token can only pair: `horizonml join CODE`")
        asked = read(Proof, fields)
        try:
            proof, sealed = self.offer.finish(exchange, bytes.fromhex(asked.proof), asked.name)
        except SecurityError as error:
            raise ValueError(str(error)) from None
        return at_once(Paired(proof.hex(), sealed.hex()))


def find_and_pair(
    words: str, peer: str | None, relay: tuple[str, int] | None, stop: Callable[[], bool]
) -> tuple[Token, ServiceAddress] | None:
    """Return the token of the device that offers a code, and where that is; None if `stop` says so.

    It is looked for on the network, unless `peer` names it, or it comes to a `relay`. Raises RendezvousError,
    SecurityError and JobError.
    """
    number, code = read_code(words)
    if relay is not None:
        with through(Relay(*relay, PAIRING_ROOM, "none")):
            place = ServiceAddress(f"the device at {relay[0]}", (address_in(number),), PORT)
            return pair(place.hosts[0], PORT, code), place
    if peer is not None:
        found = [at(peer)]
    else:
        seen = browse(SECONDS, lambda one: one.pairing == number, stop)
        offering = [one for one in seen if one.pairing == number][:_MOST_TRIED]
        found = [ServiceAddress(one.name, one.addresses or (one.host,), one.port) for one in offering]
    problem: HorizonError = RendezvousError(
        f"no device that offers the code {code} was found within {SECONDS:.0f} s; `horizonml join {code} --peer HOST` "
        "goes to the address of the one that shows it"
    )
    for place in found:
        for host in place.hosts:
            if stop():
                return None
            try:
                return pair(host, place.port, code), ServiceAddress(place.name, (host,), place.port)
            except SecurityError as error:
                problem = error
                break  # its other addresses have the same code
            except RendezvousError as error:
                problem = error
    if stop():
        return None
    raise problem


def pair(host: str, port: int, code: str) -> Token:
    """Return the token of the service at an address, which offers this code.

    Raises RendezvousError if nothing there can be paired with, and SecurityError if the code is wrong.
    """
    place = f"{host}:{port}"
    try:
        with closing(Client((host, port), any_context())) as client:
            half = DeviceHalf(code, client.certificate)
            answer = client.ask(fields_of(PairMessage(half.message.hex()), "pair"), _SECONDS)
            proof = half.prove(bytes.fromhex(read(PairMessage, answer).message))
            paired = read(Paired, client.ask(fields_of(Proof(proof.hex(), device_name()), "prove"), _SECONDS))
            return half.open(bytes.fromhex(paired.proof), bytes.fromhex(paired.sealed))
    except ServiceRefuses as error:
        raise SecurityError(f"{place}: {error}") from None
    except WrongCode:
        raise SecurityError(f"{place} does not have this code") from None
    except (ServiceError, ValueError) as error:
        why = "it asks for the token" if isinstance(error, Unwanted) else str(error)
        raise RendezvousError(
            f"{place} offers no code ({why}): `horizonml up` does so with a token, as long as it waits for devices"
        ) from None
