"""Serves the page of a run: the files of the page, what it asks for, and actions for those who have the token."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from horizonml.errors import HorizonError, JobError
from horizonml.page.guard import ACTIONS, Guard, guarded
from horizonml.page.watcher import Watcher, encode
from horizonml.report.what_if import what_if
from horizonml.security.token import Token
from horizonml.web.messages import Later, Reply, Request
from horizonml.web.server import Limits, WebServer

Action = Callable[[], str]
_JSON = "application/json"
_PLANNING_SECONDS = 60.0  # that the answer to a "what if" may take
_LIMITS = Limits(seconds=10.0, clients=48)
_KINDS = {".js": "text/javascript", ".css": "text/css", ".html": "text/html; charset=utf-8", ".svg": "image/svg+xml"}


class PageServer:
    """Serves a page for one run, in threads of its own, until it is closed."""

    def __init__(
        self,
        run_folder: Path,
        address: tuple[str, int],
        token: Token | None = None,
        actions: Mapping[str, Action] | None = None,
        devices: Callable[[], list[dict[str, Any]]] | None = None,
        possible: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Serve the run in `run_folder`, which need not be there yet, at `address`. Raises HorizonError.

        Port 0 takes any free port. `actions` are what whoever has the `token` may do; each returns a sentence that says
        what happens now, and must return at once. `devices` returns the devices that are there before training begins,
        each with what is known of it by name. `possible` says whether an action can be done now.
        """
        self._folder, self._devices, self._possible = run_folder, devices, possible
        self._actions = dict(actions or {})
        self._guard = Guard(address[0], token.text if token is not None and self._actions else None)
        self._files = static_files()
        self._watcher = Watcher(run_folder)
        try:
            self._server = WebServer("page", address, self._answer, _LIMITS)
        except OSError as error:
            self._watcher.close()
            raise HorizonError(
                f"the page cannot be served at {address[0]}:{address[1]}: {error.strerror or error}; choose another "
                "port or address"
            ) from None
        self.port = self._server.port

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
        self._watcher.close()

    def __enter__(self) -> PageServer:
        """Return the server, which is closed at the end of the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()

    def _answer(self, request: Request) -> Reply | Later:
        """Return the answer to a request."""
        refused = self._guard.refuse(request)
        if refused is not None:
            return guarded(refused)
        if request.method == "POST":
            return guarded(self._act(request.path.removeprefix(ACTIONS)))
        path = request.path.removeprefix("/")
        if not path.startswith("api/"):
            found = self._files.get(path or "index.html")
            if found is None:
                return guarded(Reply.text(404, "there is no such page\n"))
            return guarded(Reply(200, found[0], found[1], {"Cache-Control": "no-cache"}))
        if path == "api/run":
            return _json(self._run(request))
        if path == "api/history":
            return _json(self._watcher.history(_whole(request, "since"), _whole(request, "revision", -1)))
        if path == "api/events":
            return _json(self._watcher.events())
        if path == "api/timeline":
            return _json(self._watcher.timeline(_whole(request, "known", -1), request.query.get("predicted") == "1"))
        if path == "api/what-if":
            return Later(lambda: self._what_if(request), _PLANNING_SECONDS + 10)
        return guarded(Reply.text(404, "there is no such page\n"))

    def _run(self, request: Request) -> dict[str, Any]:
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
            return _json({"error": str(error)}, 409)
        return _json(answer)

    def _act(self, name: str) -> Reply:
        action = self._actions.get(name)
        if action is None:
            return _json({"error": f"there is no action {name[:40]!r}"}, 404)
        try:
            return _json({"words": action()})
        except HorizonError as error:
            return _json({"error": str(error)}, 409)


def _json(value: Any, status: int = 200) -> Reply:
    return guarded(Reply(status, encode(value), _JSON))


def _several(request: Request, name: str) -> list[str]:
    """Return the texts of a query that are separated by semicolons."""
    return [text for text in request.query.get(name, "").split(";") if text]


def _whole(request: Request, name: str, default: int = 0) -> int:
    """Return a whole number of the query, or the default if it is none."""
    text = request.query.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 16 else default


def static_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by name, each with its kind of content."""
    folder = resources.files("horizonml.page") / "static"
    found = {}
    for file in folder.iterdir():
        kind = _KINDS.get(Path(file.name).suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        found[file.name] = file.read_bytes(), kind
    return found
