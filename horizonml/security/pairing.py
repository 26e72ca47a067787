"""Pairing: a device gets a token of its own, because its user types a short code such as 7-lantern-orbit.

The code is no key: whoever heard the exchange, or took part in it with a wrong code, could try all codes afterwards. So
both sides run SPAKE2 (RFC 9382, of the library `spake2`), from which each party learns whether the other one has the
same code, and nothing else; a wrong code takes an exchange of its own for each attempt, and these are counted. What is
proven is bound to the certificate that the service shows, so nobody can stand in between. The token travels sealed with
the key that comes out.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError

from horizonml.errors import SecurityError
from horizonml.security.token import Token, parse_token
from horizonml.text import nearest

CODE_SECONDS = 300.0  # for which a code is valid
MOST_WRONG = 3  # codes, after which none is offered any more
_MOST_BEGUN = 30  # exchanges with one code, of which most have stopped in the middle
_MOST_NUMBER = 99
_DEVICE, _SERVICE = b"horizonml device", b"horizonml service "
_NONCE = bytes(12)  # each key seals one message


class WrongCode(Exception):
    """Reports that the other side has another code."""


def words() -> list[str]:
    """Return the words of which codes are made; any two of them differ by three letters or more."""
    return resources.files("horizonml.security").joinpath("words.txt").read_text().split()


def read_code(text: str) -> tuple[int, str]:
    """Return the number of a code, and the code as it was shown. Raises SecurityError, which names a mistyped word."""
    found = re.fullmatch(r"(\d{1,2})[-\s]+([a-z]+)[-\s]+([a-z]+)", text.strip().lower())
    if found is None:
        raise SecurityError(f"{text!r} is not a code such as 7-lantern-orbit, which `horizonml up` shows")
    known = words()
    for word in found.groups()[1:]:
        if word not in known:
            raise SecurityError(f"{text}: no code has the word {word!r}{nearest(word, known)}")
    return int(found[1]), "-".join(found.groups())


def _keys(shared: bytes) -> tuple[bytes, bytes, bytes]:
    """Return what the device proves the code by, what the service does, and what the token is sealed with."""
    found = HKDF(hashes.SHA256(), 96, salt=None, info=b"horizonml pairing 1").derive(shared)
    return found[:32], found[32:64], found[64:]


class DeviceHalf:
    """The side of a device that has no token."""

    def __init__(self, code: str, certificate: bytes) -> None:
        """Begin with a code, at a service that has shown a certificate (as DER)."""
        self._spake = SPAKE2_A(code.encode(), idA=_DEVICE, idB=_SERVICE + hashlib.sha256(certificate).digest())
        self.message: bytes = self._spake.start()

    def prove(self, message: bytes) -> bytes:
        """Return the proof of the code for the service, which has sent a message. Raises WrongCode for a bad one."""
        try:
            proof, self._expected, self._seal = _keys(self._spake.finish(message))
        except (SPAKEError, ValueError) as error:
            raise WrongCode from error
        return proof

    def open(self, proof: bytes, sealed: bytes) -> Token:
        """Return the token from a service that proves the code, too. Raises WrongCode."""
        if not hmac.compare_digest(proof, self._expected):
            raise WrongCode
        try:
            return parse_token(ChaCha20Poly1305(self._seal).decrypt(_NONCE, sealed, None).decode("ascii"))
        except (InvalidTag, ValueError, SecurityError) as error:
            raise WrongCode from error


@dataclass
class CodeOffer:
    """The side of a device that has the token: one code after the other, each of which is valid once."""

    certificate: bytes  # of the service, as DER
    issue: Callable[[str], Token]  # makes a token for a device with a name
    clock: Callable[[], float] = time.monotonic
    number: int = field(default_factory=lambda: 1 + secrets.randbelow(_MOST_NUMBER))  # of all its codes
    wrong: int = 0
    paired: int = 0  # devices that have the token by now
    open: bool = True  # whether codes are offered
    _code: str = ""
    _until: float = 0.0
    _begun: int = 0

    def code(self) -> str | None:
        """Return the code that is valid now, or None if none is offered any more."""
        if not self.open or self.wrong >= MOST_WRONG:
            return None
        if not self._code or self.clock() >= self._until:
            known = words()
            self._code = f"{self.number}-{secrets.choice(known)}-{secrets.choice(known)}"
            self._until, self._begun = self.clock() + CODE_SECONDS, 0
        return self._code

    def begin(self, message: bytes) -> CodeExchange:
        """Begin an exchange with a device. Raises ValueError if no code is offered, or the message is none."""
        code = self.code()
        if code is None or self._begun >= _MOST_BEGUN:
            raise ValueError("no code is offered here any more; start `horizonml up` again for another one")
        self._begun += 1
        return CodeExchange(self, code, message)

    def finish(self, exchange: CodeExchange, proof: bytes, name: str) -> tuple[bytes, bytes]:
        """Return this side's proof and a sealed token for a device that proves its code. Raises ValueError."""
        if exchange.code != self._code or self.code() != exchange.code:
            raise ValueError("this code is not valid any more; take the one that is shown now")
        if not hmac.compare_digest(proof, exchange.expected):
            self.wrong += 1
            left = MOST_WRONG - self.wrong
            more = f"{left} more can be tried" if left else "no code is offered here any more"
            raise ValueError(f"this is not the code that is shown; {more}")
        token = self.issue(name)
        self._code, self.paired = "", self.paired + 1
        return exchange.proof, ChaCha20Poly1305(exchange.seal).encrypt(_NONCE, token.text.encode(), None)


class CodeExchange:
    """One exchange with a device."""

    def __init__(self, offer: CodeOffer, code: str, message: bytes) -> None:
        self.code = code
        identity = _SERVICE + hashlib.sha256(offer.certificate).digest()
        spake = SPAKE2_B(code.encode(), idA=_DEVICE, idB=identity)
        self.message: bytes = spake.start()
        try:
            self.expected, self.proof, self.seal = _keys(spake.finish(message))
        except (SPAKEError, ValueError) as error:
            raise ValueError("this message does not begin a pairing") from error
