"""Implements `horizonml join`: finds a run, takes part in it, and leaves when it is over or on request."""

from __future__ import annotations

import secrets
import sys
import threading
from dataclasses import replace

from horizonml.errors import RendezvousError
from horizonml.machine.signals import StopRequest
from horizonml.rendezvous.client import Client, ServiceError
from horizonml.rendezvous.discovery.device import Device, diagnose_peer, this_device
from horizonml.rendezvous.discovery.diagnosis import explain_clocks
from horizonml.runtime.lobby.messages import JoinSettings, Place, Sign, Voice
from horizonml.runtime.lobby.view import device_words
from horizonml.runtime.lobby.visit import Ending, Visit
from horizonml.security.tls import client_context


class Joiner:
    """This device, as it joins runs."""

    def __init__(self, settings: JoinSettings, stop: StopRequest) -> None:
        self._settings, self._stop = settings, stop
        self._id = secrets.token_hex(16)
        self._device: Device | None = None
        self._compared = False  # the clocks
        self._describing = threading.Thread(target=self._describe, name="description", daemon=True)
        self._describing.start()  # while the run is looked for

    def visit(self, place: Place) -> Ending:
        """Take part in the run of a lobby, and return how that ended. Raises HorizonError."""
        self._describing.join()
        assert self._device is not None
        sign = Sign(self._id, self._device)
        try:
            voice = Voice(lambda: self._connect(place), sign)
        except ServiceError as error:
            host, token = place.hosts[0], self._settings.token
            reason = diagnose_peer(host, place.port, token) or f"{place.name} at {host}:{place.port}: {error}"
            raise RendezvousError(reason.removesuffix(".")) from None
        with voice:
            ending = Visit(self._settings, self._stop, place, voice, self._reached).run()
        return self.visit(place) if ending is Ending.AGAIN else ending

    def _describe(self) -> None:
        """Describe this device, which takes half a second."""
        own = this_device()
        self._device = replace(own, name=self._settings.name) if self._settings.name is not None else own
        print(f"this device offers {device_words(self._device)}", flush=True)

    def _connect(self, place: Place) -> Client:
        """Connect to the first address that answers. Raises ServiceError."""
        token, problem = self._settings.token, ServiceError("it has no address")
        for host in place.hosts:
            try:
                client = Client((host, place.port), client_context(token) if token is not None else None)
            except ServiceError as error:
                problem = error
            else:
                self._reached = f"[{host}]:{place.port}" if ":" in host else f"{host}:{place.port}"
                self._compare_clocks(client)
                return client
        raise problem

    def _compare_clocks(self, client: Client) -> None:
        """Say once if the clock of this device or that of the lobby is wrong."""
        wrong = explain_clocks(client.clock_ahead)
        if wrong is not None and not self._compared:
            print(wrong, file=sys.stderr, flush=True)
        self._compared = True
