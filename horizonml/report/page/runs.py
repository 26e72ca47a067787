"""Serves a page of all runs in a folder, which compares their curves, and the page of each run below it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

from horizonml.errors import HorizonError
from horizonml.report.page.server import LIMITS, PageAccess, RunPage, guarded, json_reply, static_reply
from horizonml.report.runs import Runs
from horizonml.telemetry.http import Later, Reply, Request, WebServer

_MOST_PAGES = 8  # of runs that are followed at a time
_MOST_CURVES = 8  # at a time
_READING_SECONDS = 60.0  # for the records of all runs, the first time


class RunsServer:
    """Serves the pages, in threads of its own, until it is closed."""

    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        """Serve the runs in `folder`, which need not be there yet. Raises HorizonError."""
        self._folder, self._guard = folder, PageAccess(address[0], None)
        self._runs, self._lock = Runs(folder), threading.Lock()
        self._pages: OrderedDict[str, RunPage] = OrderedDict()  # the one that was asked for last comes last
        try:
            self._server = WebServer("page", address, self._answer, LIMITS)
        except OSError as error:
            raise HorizonError(
                f"the page cannot be served at {address[0]}:{address[1]}: {error.strerror or error}; choose another "
                "port or address"
            ) from None
        self.port = self._server.port

    def __enter__(self) -> RunsServer:
        """Return the server, which is closed at the end of the context."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self._server.close()
        for page in self._pages.values():
            page.close()

    def _answer(self, request: Request) -> Reply | Later:
        path, name = request.path.removeprefix("/"), None
        if path.startswith("run/") and "/" in path.removeprefix("run/"):
            name, path = path.removeprefix("run/").split("/", 1)
            request = replace(request, path=f"/{path}")  # as the page of a run alone has it
        refused = self._guard.refuse(request)
        if refused is not None:
            return guarded(refused)
        if name is not None:
            return self._of_run(request, name, path)
        if path == "api/runs":
            return Later(self._list, _READING_SECONDS)
        if path == "api/curves":
            return Later(lambda: self._curves(request), _READING_SECONDS)
        return static_reply(path or "runs.html")

    def _of_run(self, request: Request, name: str, path: str) -> Reply | Later:
        """Return what the page of one run answers."""
        page = self._pages.get(name)
        if page is None:
            folder = self._folder / name
            if folder.parent != self._folder or name in ("", ".", "..") or not folder.is_dir():
                return guarded(Reply.text(404, "there is no such run\n"))
            page = self._pages[name] = RunPage(folder, self._guard)
            if len(self._pages) > _MOST_PAGES:
                self._pages.popitem(last=False)[1].close()
        self._pages.move_to_end(name)
        return page.answer(request, path)

    def _list(self) -> Reply:
        """Return how all runs stand; this reads their records."""
        with self._lock:
            found = [vars(one) | {"name": Path(one.folder).name} for one in self._runs.poll()]
        return json_reply({"folder": str(self._folder), "runs": found})

    def _curves(self, request: Request) -> Reply:
        """Return the losses and accuracies of some runs, by name."""
        names = [name for name in request.query.get("runs", "").split(";") if name][:_MOST_CURVES]
        with self._lock:
            known = {name: run for name in names if (run := self._runs.known.get(name)) is not None}
            found = {
                name: {
                    "training": [point[:3] for point in run.curve.since()],
                    "held_out": [[one.step, one.loss, one.accuracy] for one in run.evaluations],
                }
                for name, run in known.items()
            }
        return json_reply(found)
