"""A member's connection to the rendezvous service, which is made anew when it breaks."""

from __future__ import annotations

import threading

from horizonml.rendezvous.checks import Fields
from horizonml.rendezvous.client import Client, Endpoint, ServiceError
from horizonml.rendezvous.messages import Resume

_CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 2.0  # then the connection is made anew, which is quicker than TCP's own recovery


class Contact:
    """Asks the service on behalf of a member, also if the service was started anew. Any thread may use it."""

    def __init__(self, endpoint: Endpoint, resume: Resume, client: Client | None = None) -> None:
        """Speak for the member that `resume` describes, on the connection `client` as long as that lasts."""
        self.endpoint = endpoint
        self._resume, self._client = resume, client
        self._connecting = threading.Lock()

    def ask(self, request: Fields, seconds: float = ANSWER_SECONDS) -> Fields:
        """Return the service's answer. Raises ServiceError."""
        client = self._connected()
        try:
            return client.ask(request, seconds)
        except ServiceError:
            if client.closed:
                with self._connecting:
                    if self._client is client:
                        self._client = None
            raise

    def close(self) -> None:
        """Close the connection; another request would make a new one."""
        with self._connecting:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _connected(self) -> Client:
        """Return the connection, made anew if there is none."""
        with self._connecting:
            if self._client is None:
                client = self.endpoint.connect(_CONNECT_SECONDS)
                try:
                    client.ask(self._resume.to_json(), ANSWER_SECONDS)
                except ServiceError:
                    client.close()
                    raise
                self._client = client
            return self._client
