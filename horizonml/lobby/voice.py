"""Speaks for this device at a lobby: gives its signs of life, and keeps what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from horizonml.lobby.messages import News, Phase, Sign, Standing, shortened
from horizonml.rendezvous.checks import Fields
from horizonml.rendezvous.client import Client, ServiceError

_REPLY_SECONDS = 10.0  # for a reply, which the lobby holds back for a second where there is no news
_BEAT_SECONDS = 0.5  # between two signs of life of a device that does something else at the lobby
_AGAIN_SECONDS = 1.0  # between two attempts to connect
_PATIENT = (Standing.READY, Standing.TRAINING, Standing.DONE)


class Voice(threading.Thread):
    """Gives signs of life in a thread, and connects again when the connection is lost. Used as a context manager."""

    def __init__(self, connect: Callable[[], Client], sign: Sign) -> None:
        """Speak over what `connect` returns, which raises ServiceError while nobody answers."""
        super().__init__(name="signs of life", daemon=True)
        self._connect, self._sign = connect, sign
        self._client: Client | None = connect()
        self._lock, self._changed, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self.news: News | None = None
        self.lost_at: float | None = None  # since when the lobby does not answer, a time of `monotonic`
        self.problem = ""  # why not
        self._last: Standing | None = None  # what the lobby knows

    def __enter__(self) -> Voice:
        self.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._ended.set()
        self._changed.set()
        self.join(_REPLY_SECONDS)
        if self._client is not None:
            self._client.close()

    def say(self, standing: Standing, words: str = "", **more: Any) -> None:
        """Say from now on that this device stands so."""
        with self._lock:
            self._sign = shortened(replace(self._sign, standing=standing, words=words, **more))
        self._changed.set()

    def leave(self, words: str) -> None:
        """Say that this device leaves, and wait for a moment until that is known."""
        self.say(Standing.LEAVING, words)
        deadline = time.monotonic() + 2.0
        while self._last is not Standing.LEAVING and self.lost_at is None and time.monotonic() < deadline:
            time.sleep(0.02)

    def ask(self, request: Fields) -> Fields:
        """Ask the lobby something else. Raises ServiceError."""
        client = self._client
        if client is None:
            raise ServiceError(self.problem or "the connection is lost")
        return client.ask(request, _REPLY_SECONDS)

    def run(self) -> None:
        """Give signs of life until the end."""
        while not self._ended.is_set():
            self._changed.clear()
            try:
                if self._client is None:
                    self._client = self._connect()
                with self._lock:
                    sign = self._sign
                known = self.news.phase if self.news is not None and sign.standing in _PATIENT else None
                self.news = News.from_json(self._client.ask(replace(sign, knows=known).to_json(), _REPLY_SECONDS))
                self._last, self.lost_at = sign.standing, None
            except (ServiceError, ValueError) as error:
                self._note(error)
                self._ended.wait(_AGAIN_SECONDS)
                continue
            if sign.standing not in _PATIENT or self.news.phase is Phase.OVER:
                self._changed.wait(_BEAT_SECONDS)

    def _note(self, error: Exception) -> None:
        """Take note that the lobby does not answer."""
        self.problem = str(error)
        if self.lost_at is None:
            self.lost_at = time.monotonic()
        if self._client is not None:
            self._client.close()
            self._client = None
