"""Asks the rendezvous service, and waits for each answer for a limited time only; without PyTorch."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from horizonml.machine.network import split_address
from horizonml.machine.relay import connect
from horizonml.rendezvous.wire import MOST_ANSWER, TLS_RECORDS, Fields, encode, explain_tls, hello, is_final, parse
from horizonml.security.devices import REVOKED
from horizonml.text import printable

_MOST_TIME = 1e11  # seconds since 1970, which is far beyond any clock
_MUTE = "it accepts connections but does not answer; is it a rendezvous service?"


class ServiceError(RuntimeError):
    """Raised when the service does not answer, or not as it should."""


class ServiceRefuses(ServiceError):
    """Raised when the service refuses a request, with its words."""


class Unwanted(ServiceError):
    """Raised when it is certain that this service will not talk to this process, however often that tries."""


@dataclass(frozen=True)
class Endpoint:
    """Where a rendezvous service is, and how connections to it are protected."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None  # None if there is no token
    # Of the standby that is meant; empty where a service is meant, and no standby; None where that is not known.
    key: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        """Return it as host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def at(self, address: str) -> Endpoint:
        """Return the same at another address, host:port. Raises ValueError."""
        return Endpoint(*split_address(address), self.tls)

    def connect(self, seconds: float = 5.0, follow: bool = True) -> Client:
        """Return a connection that is made within so many seconds. Raises ServiceError.

        What a rank keeps in reserve may say that the ranks meet elsewhere: with `follow`, the connection leads there.
        """
        client = Client((self.host, self.port), self.tls, seconds)
        if self.key is not None and client.key not in (None, self.key):  # another run leads to the ranks of its own
            client.close()
            raise ServiceError("another process has that port now")
        if follow and client.elsewhere is not None:
            client.close()
            try:
                return self.at(client.elsewhere).connect(seconds, False)
            except ValueError as error:
                raise ServiceError(f"{self} says that the ranks meet at an address that is none: {error}") from None
        return client


class Client:
    """A connection to the service; any thread may use it. After an error it is of no further use."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None, connect_seconds: float = 5.0) -> None:
        """Connect, shake hands and say hello within so many seconds. Raises ServiceError."""
        self._asking = threading.Lock()
        self.address = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        self._received = bytearray()
        until = time.monotonic() + connect_seconds
        self._socket: socket.socket | None = None
        plain = None
        try:
            plain = connect(*address, connect_seconds)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                plain.settimeout(max(0.01, until - time.monotonic()))
                REVOKED.refresh()
                plain = tls.wrap_socket(plain)
            self._socket = plain
        except ssl.SSLError as error:
            raise self._broken(error) from error
        except (socket.gaierror, UnicodeError):  # the latter for what cannot be a name, such as a..b
            raise ServiceError(f"the name {address[0]} does not resolve (yet)") from None
        except TimeoutError:
            raise ServiceError("no answer" if plain is None else _MUTE) from None
        except OSError as error:
            raise ServiceError((error.strerror or str(error)).lower()) from error
        finally:
            if self._socket is None and plain is not None:
                plain.close()
        try:
            greeting = self.ask(hello(), max(0.1, until - time.monotonic()))
            self.version = printable(str(greeting.get("version")), 40)  # of the service
            self.elsewhere = _said(greeting, "elsewhere")  # where the ranks meet, if not here
            self.key = _said(greeting, "key")  # by which a standby is recognised; None for a service
            self.service = _said(greeting, "service")  # in whose place a standby is
            self.runs = greeting.get("runs") is True  # whether a group runs at that standby
            REVOKED.learn(greeting.get("revoked"))
            theirs = greeting.get("time")
            # By how many seconds the service's clock is ahead of this one's, except for the way here; None if unknown.
            self.clock_ahead = theirs - time.time() if isinstance(theirs, float) and 0 <= theirs < _MOST_TIME else None
        except ServiceRefuses as error:
            self._shut()
            raise Unwanted(f"the service at {self.address} refuses: {error}") from error
        except ServiceError as error:
            if isinstance(error.__cause__, TimeoutError):
                raise ServiceError(_MUTE) from None
            raise

    @property
    def certificate(self) -> bytes:
        """Return the certificate that the service has shown, as DER."""
        assert isinstance(self._socket, ssl.SSLSocket)
        return self._socket.getpeercert(binary_form=True) or b""

    def ask(self, request: Fields, seconds: float = 2.0) -> Fields:
        """Return the answer to a request, within so many seconds.

        Raises ServiceRefuses with the service's words, and ServiceError if no answer comes.
        """
        with self._asking:
            if self._socket is None:
                raise ServiceError("the connection to the rendezvous service is closed")
            try:
                answer = self._exchange(self._socket, encode(request), seconds)
            except ssl.SSLError as error:
                self._shut()
                raise self._broken(error) from error
            except TimeoutError as error:
                self._shut()
                raise ServiceError(f"no answer within {seconds:.1f} s") from error
            except OSError as error:
                self._shut()
                raise ServiceError((error.strerror or str(error)).lower()) from error
            except ValueError as error:
                self._shut()
                raise ServiceError(f"the rendezvous service sent what cannot be read: {error}") from error
            except ServiceError:
                self._shut()
                raise
        if "error" in answer:
            raise ServiceRefuses(printable(str(answer["error"]), 2000))
        return answer

    @property
    def closed(self) -> bool:
        """Return whether the connection is closed, as it is after an error."""
        return self._socket is None

    def close(self) -> None:
        """Close the connection, also under another thread that waits for an answer."""
        open_socket = self._socket
        if open_socket is not None:
            with suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        with self._asking:
            self._shut()

    def _broken(self, error: ssl.SSLError) -> ServiceError:
        """Return what becomes of a connection that could not be encrypted, or whose bytes were altered on the way."""
        if is_final(error):
            return Unwanted(f"the service at {self.address} cannot be used: {explain_tls(error)}")
        if isinstance(error, ssl.SSLEOFError):
            return ServiceError("the connection was cut off during the handshake")
        return ServiceError(explain_tls(error))

    def _shut(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, connection: socket.socket, request: bytes, seconds: float) -> Fields:
        until = time.monotonic() + seconds
        connection.settimeout(max(0.001, seconds))
        connection.sendall(request)
        while b"\n" not in self._received:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            received = connection.recv(1 << 18)
            if not received:
                raise ServiceError("the service has closed the connection")
            self._received += received
            if self._received[0] in TLS_RECORDS:
                raise Unwanted(
                    f"the service at {self.address} encrypts, and this process has no token; copy the token of the "
                    "device that runs the service (`horizonml token` says where it is)"
                )
            if len(self._received) > MOST_ANSWER:
                raise ValueError(f"an answer of more than {MOST_ANSWER} bytes")
        line, _, rest = self._received.partition(b"\n")
        if rest:
            raise ValueError("it says more than it was asked")
        self._received.clear()
        return parse(bytes(line), MOST_ANSWER)


def _said(greeting: Fields, name: str) -> str | None:
    value = greeting.get(name)
    return printable(value, 300) if isinstance(value, str) else None


ANSWER_SECONDS = 2.0  # then the connection is made anew, which is quicker than TCP's own recovery


class Contact:
    """Asks the service for as long as it takes, also if the service was started anew. Any thread may use it."""

    def __init__(
        self,
        connect: Callable[[], Client],
        client: Client | None = None,
        place: Callable[[], object] = lambda: None,
    ) -> None:
        """Speak on the connection `client` as long as that lasts, and then on what `connect` returns.

        A connection is of no use any more once `place` says that the service is elsewhere.
        """
        self._connect, self._client = connect, client
        self._place, self._made_at = place, place()
        self._connecting = threading.Lock()

    def ask(self, request: Fields, seconds: float = ANSWER_SECONDS) -> Fields:
        """Return the service's answer. Raises ServiceError."""
        with self._connecting:
            if self._client is not None and self._place() is not self._made_at:
                self._client.close()
                self._client = None
            if self._client is None:
                self._client = self._connect()
                self._made_at = self._place()
            client = self._client
        try:
            return client.ask(request, seconds)
        except ServiceError:
            if client.closed:
                with self._connecting:
                    if self._client is client:
                        self._client = None
            raise

    def tell_last(self, request: Fields) -> None:
        """Send a request on the connection that there is, and close it. Raises ServiceError."""
        with self._connecting:
            client, self._client = self._client, None
        if client is not None:
            with closing(client):
                client.ask(request)

    def close(self) -> None:
        """Close the connection; another request would make a new one."""
        with self._connecting:
            if self._client is not None:
                self._client.close()
                self._client = None
