"""Serves the page of a run: its files, what it asks for, and actions for those who have the token.

Browsers are told what they may do with the answers. A run whose ranks are processes of this machine can be stopped from
the page as by Ctrl-C: after the step, with a checkpoint.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import json
import logging
import math
import mimetypes
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from horizonml.errors import HorizonError, JobError
from horizonml.machine.network import is_loopback
from horizonml.report.live import LiveRun
from horizonml.report.live_facts import Series
from horizonml.report.page.describe import SimulatedStep, describe_run, describe_timeline, describe_worth, problem_of
from horizonml.report.what_if import what_if
from horizonml.security.token import Token
from horizonml.telemetry.http import Later, Limits, Reply, Request, WebServer
from horizonml.telemetry.lifeline import living_ranks
from horizonml.telemetry.record import EvaluationRecord

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0  # between two looks at the records
_CLOSE_SECONDS = 5.0
_READING = {"state": "reading", "words": "the records are being read"}


class Watcher:
    """Reads the records of a run as they come."""

    def __init__(self, folder: Path) -> None:
        """Begin to follow the run in `folder`, which need not be there yet."""
        self._folder = folder
        self._lock = threading.Lock()  # held while what is below changes, which never takes long
        self._loss = Series()  # loss, accuracy, seconds of a step
        self._split: dict[int, Series] = {}  # compute, transfer, wait: by rank
        self._described: dict[str, object] = dict(_READING, name=folder.absolute().name)
        self._timeline: dict[str, object] | None = None  # recorded
        self._predicted: dict[str, object] | None = None
        self._evaluations: list[EvaluationRecord] = []
        self._events: list[dict[str, object]] = []
        self._simulated = SimulatedStep()
        self._run = LiveRun(folder)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="page, records", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._over.set()
        self._thread.join(_CLOSE_SECONDS)

    def run(self) -> dict[str, object]:
        """Return how the run stands."""
        with self._lock:
            return dict(self._described)

    def timeline(self, known: int, is_predicted: bool) -> dict[str, object] | None:
        """Return what the ranks did when in the newest step of which that is recorded, or None.

        If none is recorded, or if `is_predicted` asks for it, it is a simulated one. A client that has one of step
        `known` already gets no more than its number, unless there is a newer one.
        """
        with self._lock:
            found = self._predicted if is_predicted or self._timeline is None else self._timeline
        if found is not None and not found["is_simulated"] and found["step"] == known:
            return {"step": known}
        return found

    def events(self) -> list[dict[str, object]]:
        """Return what has happened, the oldest first."""
        with self._lock:
            return self._events

    def history(self, since: int, revision: int) -> dict[str, object]:
        """Return the points that are newer than those of a client, or all if its revision is an old one."""
        with self._lock:
            loss, split, evaluations = self._loss, self._split, self._evaluations
        now = max(series.revision for series in (loss, *split.values()))
        if revision != now:
            since = 0
        return {
            "revision": now,
            "since": since,
            "columns": ["step", "loss", "accuracy", "seconds"],
            "steps": loss.since(since),
            "rank_columns": ["step", "compute", "transfer", "wait"],
            "ranks": {str(rank): series.since(since) for rank, series in split.items()},
            "evaluations": [
                {"step": one.step, "epoch": one.epoch, "loss": one.loss, "accuracy": one.accuracy, "best": one.best}
                for one in evaluations
                if one.step >= since
            ],
        }

    def _follow(self) -> None:
        known: set[str] = set()
        while not self._over.is_set():
            try:
                self._run.poll()
                self._describe()
            except Exception as error:  # noqa: BLE001  (damaged records end neither the page nor what it runs beside)
                words = f"{type(error).__name__}: {error}"
                if words not in known:
                    _log.warning("the records in %s cannot be read: %s", self._folder, words)
                known.add(words)
                with self._lock:
                    self._described = {**self._described, "problem": "the records could not be read; see the log"}
            self._over.wait(_LOOK_SECONDS)

    def _describe(self) -> None:
        run = self._run
        described = describe_run(run)
        described["problem"] = problem_of(self._folder, run.planning)
        self._simulated.look(run.planning)
        size = run.planning.job.batch_size if run.planning is not None else None
        described |= describe_worth(run.alone, self._simulated.worth, size)
        timeline, predicted = describe_timeline(run), self._simulated.timeline
        described["has_both_timelines"] = timeline is not None and predicted is not None
        events = [vars(event) for event in run.events]
        with self._lock:
            self._described, self._timeline, self._predicted = described, timeline, predicted
            self._events, self._evaluations = events, list(run.evaluations)
            self._loss, self._split = run.curve, run.splits


def encode(value: Any) -> bytes:
    """Return a value as JSON that browsers read: numbers that are not finite become null."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":")).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


# Nothing is loaded from elsewhere, nothing inline runs, and no other site may show the page in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
ACTIONS = "/api/actions/"
_COSTLY, _HEADER = "/api/what-if", "x-horizonml"  # takes seconds of the processor, and what its requests must have


def guarded(reply: Reply) -> Reply:
    """Return an answer with the headers that every answer has."""
    return Reply(reply.status, reply.body, reply.kind, {**_HEADERS, **reply.headers})


class PageAccess:
    """Refuses requests that a browser was tricked into, and those of people who may not ask."""

    def __init__(self, host: str, token: str | None) -> None:
        """`host` is the address that the service listens on; `token` allows actions."""
        self._host, self._token = host, token
        own = socket.gethostname().lower()
        self._names = {host.lower(), "localhost"}
        if not is_loopback(host):
            self._names |= {own, f"{own}.local", socket.getfqdn().lower()}

    def refuse(self, request: Request) -> Reply | None:
        """Return why a request is not answered, or None if it is."""
        if not self._is_for_us(request.headers.get("host", "")):
            # A name that an attacker's server has pointed here would make this page part of the attacker's site.
            return Reply.text(421, "this service does not answer under that name; use its address\n")
        site = request.headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and request.path.startswith("/api/"):
            return Reply.text(403, "other sites may not ask this service\n")
        if request.path == _COSTLY and _HEADER not in request.headers:
            # Browsers say where a question comes from to trustworthy addresses only, so not on most local networks, but
            # let no other site add a header.
            return Reply.text(403, "ask this with the header X-HorizonML: 1, which other sites cannot send\n")
        if request.method == "POST" and request.path.startswith(ACTIONS):
            return self._refuse_action(request)
        if request.method != "GET":
            return Reply.text(405, "only GET, and POST for actions\n", {"Allow": "GET"})
        return None

    def may_act(self, request: Request) -> bool:
        """Return whether a client may send the token: without encryption it must not travel over a network."""
        return self._token is not None and is_loopback(request.peer)

    def _refuse_action(self, request: Request) -> Reply | None:
        if not self.may_act(request):
            words = "actions need the token, which is sent to 127.0.0.1 only; use `ssh -L` from another machine\n"
            return Reply.text(403, words)
        assert self._token is not None
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._token.encode())
        if kind.lower() == "bearer" and same:
            return None
        return Reply.text(401, "that is not the token of this service\n", {"WWW-Authenticate": "Bearer"})

    def _is_for_us(self, header: str) -> bool:
        """Return whether a Host header names this service. An address always does: no server can point it elsewhere."""
        name = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
        name = name.strip("[]").lower().rstrip(".")
        address = _address(name)
        if address is None:
            return name in self._names
        return address.is_loopback or not is_loopback(self._host)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


Action = Callable[[], str]
_JSON = "application/json"
_PLANNING_SECONDS = 60.0  # that the answer to a "what if" may take
LIMITS = Limits(seconds=10.0, clients=48)
_KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html; charset=utf-8", ".svg": "image/svg+xml"}


class RunPage:
    """Answers what the page of one run asks for."""

    def __init__(
        self,
        folder: Path,
        guard: PageAccess,
        actions: Mapping[str, Action] | None = None,
        devices: Callable[[], list[dict[str, str]]] | None = None,
        possible: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Follow the run in `folder`; the rest is as in `PageServer`."""
        self._folder, self._devices, self._possible = folder, devices, possible
        self._actions, self._guard, self._watcher = dict(actions or {}), guard, Watcher(folder)

    def close(self) -> None:
        """Stop following the run."""
        self._watcher.close()

    def answer(self, request: Request, path: str) -> Reply | Later:
        """Return the answer to a request that is allowed, for a path below the run's page."""
        if request.method == "POST":
            return guarded(self._act(request.path.removeprefix(ACTIONS)))
        if path == "api/run":
            return json_reply(self._run(request))
        if path == "api/history":
            return json_reply(self._watcher.history(_whole(request, "since"), _whole(request, "revision", -1)))
        if path == "api/events":
            return json_reply(self._watcher.events())
        if path == "api/timeline":
            return json_reply(
                self._watcher.timeline(_whole(request, "known", -1), request.query.get("predicted") == "1")
            )
        if path == "api/what-if":
            return Later(lambda: self._what_if(request), _PLANNING_SECONDS + 10)
        return static_reply(path or "index.html")

    def _run(self, request: Request) -> dict[str, object]:
        found = self._watcher.run()
        offered = sorted(self._actions) if self._guard.may_act(request) else []
        found["actions"] = [name for name in offered if self._possible(name)]
        if self._devices is not None:
            found["devices"] = self._devices()
        return found

    def _what_if(self, request: Request) -> Reply:
        """Return what the planner makes of other devices and links; this takes seconds."""
        add, remove, rates = (_several(request, name) for name in ("add", "remove", "rates"))
        try:
            for text in rates:
                if ":" not in text:
                    raise JobError(f"rates: {text[:40]!r} is not LINK:RATE, such as 0-1:100Mbit")
            answer = what_if(
                self._folder,
                add,
                remove,
                {link: rate for link, _, rate in (text.partition(":") for text in rates)},
                request.query.get("strategy") or None,
                _PLANNING_SECONDS,
            )
        except HorizonError as error:
            return json_reply({"error": str(error)}, 409)
        return json_reply(answer)

    def _act(self, name: str) -> Reply:
        action = self._actions.get(name)
        if action is None:
            return json_reply({"error": f"there is no action {name[:40]!r}"}, 404)
        try:
            return json_reply({"words": action()})
        except HorizonError as error:
            return json_reply({"error": str(error)}, 409)


class PageServer:
    """Serves a page for one run, in threads of its own, until it is closed."""

    def __init__(
        self,
        run_folder: Path,
        address: tuple[str, int],
        token: Token | None = None,
        actions: Mapping[str, Action] | None = None,
        devices: Callable[[], list[dict[str, str]]] | None = None,
        possible: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Serve the run in `run_folder`, which need not be there yet, at `address`. Raises HorizonError.

        Port 0 takes any free port. `actions` are what whoever has the `token` may do; each returns a sentence that says
        what happens now, and must return at once. `devices` returns the devices that are there before training begins,
        each with what is known of it by name. `possible` says whether an action can be done now.
        """
        self._guard = PageAccess(address[0], token.text if token is not None and actions else None)
        self._page = RunPage(run_folder, self._guard, actions, devices, possible)
        try:
            self._server = WebServer("page", address, self._answer, LIMITS)
        except OSError as error:
            self._page.close()
            raise HorizonError(
                f"the page cannot be served at {address[0]}:{address[1]}: {error.strerror or error}; choose another "
                "port or address"
            ) from None
        self.port = self._server.port

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
        self._page.close()

    def __enter__(self) -> PageServer:
        """Return the server, which is closed at the end of the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()

    def _answer(self, request: Request) -> Reply | Later:
        refused = self._guard.refuse(request)
        return guarded(refused) if refused is not None else self._page.answer(request, request.path.removeprefix("/"))


def static_reply(name: str) -> Reply:
    """Return a file of the pages."""
    found = static_files().get(name)
    if found is None:
        return guarded(Reply.text(404, "there is no such page\n"))
    return guarded(Reply(200, found[0], found[1], {"Cache-Control": "no-cache"}))


def json_reply(value: Any, status: int = 200) -> Reply:
    """Return a value as JSON."""
    return guarded(Reply(status, encode(value), _JSON))


def _several(request: Request, name: str) -> list[str]:
    """Return the texts of a query that are separated by semicolons."""
    return [text for text in request.query.get(name, "").split(";") if text]


def _whole(request: Request, name: str, default: int = 0) -> int:
    """Return a whole number of the query, or the default if it is none."""
    text = request.query.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else default


@functools.cache
def static_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by name, each with its kind of content."""
    folder = resources.files("horizonml.report.page") / "static"
    found = {}
    for file in folder.iterdir():
        kind = _KINDS.get(Path(file.name).suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        found[file.name] = file.read_bytes(), kind
    return found


def stop_here(folder: Path) -> str:
    """Ask all ranks of a run to stop, and return what happens now. Raises HorizonError if that is impossible here."""
    processes = living_ranks(folder)
    if processes is None:
        raise HorizonError(f"no rank of {folder} trains on this device, as far as can be seen from here")
    try:
        for process in set(processes.values()):
            os.kill(process, signal.SIGTERM)
    except ProcessLookupError:
        return "The run is ending already."
    except PermissionError:
        raise HorizonError("the ranks belong to another user of this machine, who can stop them") from None
    if 0 not in processes:
        return "This device leaves the run after its step; the other devices go on."
    return "The run stops after its step, and saves a checkpoint from which the same command continues."
