"""Holds the options of `horizonml join`, and the lobby that it goes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from horizonml.security.token import INSECURE, TOKEN, Token


@dataclass(frozen=True)
class Place:
    """Where a lobby is: what it is called, and the addresses to try."""

    name: str
    hosts: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class JoinSettings:
    """What `horizonml join` was asked for."""

    token: Token | None
    runs: Path = Path("runs")  # where this device keeps what runs leave
    data: tuple[Path, ...] = ()  # folders whose files jobs may read
    accept_data: bool = False
    allow_code: bool = False
    name: str | None = None
    ask: Callable[[str], bool] = lambda question: False  # the person at the terminal, if there is one
    busy: Callable[[], str | None] = lambda: None  # why this device must not train now; None if it may


def secret(token: Token | None) -> dict[str, str]:
    """Return the environment variable by which a rank may take part."""
    return {TOKEN: token.text} if token is not None else {INSECURE: "1"}
