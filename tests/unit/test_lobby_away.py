"""When a device that joins is needed for something else, is stopped, or cannot go on for a while."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from horizonml.cli.up import _join_forever
from horizonml.job.jobfile import from_values
from horizonml.machine.signals import StopRequest
from horizonml.machine.yielding import Courtesy
from horizonml.rendezvous.server import Peer
from horizonml.runtime.lobby.join import Joiner
from horizonml.runtime.lobby.lobby import Lobby
from horizonml.runtime.lobby.messages import JoinSettings, Place, Standing
from horizonml.runtime.lobby.sharing import offer
from horizonml.runtime.lobby.visit import Ending
from tests.unit.test_lobby_join import LINEAGE, serving


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(
    ("stopped", "ending", "words"),
    [(False, Ending.YIELDED, "left, because somebody types"), (True, Ending.LEFT, "left before the training began")],
)
def test_a_device_that_is_needed_leaves_while_it_fetches(
    ready: bool, stopped: bool, ending: Ending, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its data is being hashed where it lies, or comes piece by piece, and never ends."""
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path / "cache"))
    job = from_values({"name": "test", "data": {"name": "text", "path": str(tmp_path / "none.txt")}}, "the job")
    lobby, stop, pieces = Lobby(offer(job, LINEAGE)), StopRequest(), list[int]()

    def data(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
        pieces.append(len(pieces))
        stop.wanted = stopped and len(pieces) > 3
        if "file" in request:
            return {"piece": "MQ=="}
        files = [["none.txt", 1 << 20, "0" * 64]]
        page = {"files": files, "count": 1, "single": True} if ready else {"done": len(pieces)}
        return {"ready": ready, "bytes": 1 << 20, **page}

    def hands_out(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
        return {**lobby.handlers()["job"](peer, request), "shared": True}  # type: ignore[dict-item]

    def busy() -> str | None:
        return "somebody types" if len(pieces) > 3 and not stopped else None

    with serving({**lobby.handlers(), "job": hands_out, "data": data}, None) as place:
        settings = JoinSettings(None, tmp_path / "runs", accept_data=True, busy=busy)
        assert Joiner(settings, stop).visit(place) is ending
    assert words in capsys.readouterr().out
    assert [guest.sign.standing for guest in lobby._guests.values()] == [Standing.LEAVING]


def test_a_device_that_always_joins_goes_on_after_what_was_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    stop, tries = StopRequest(), list[int]()

    def place() -> Place | None:
        tries.append(len(tries))
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/horizonml-1")
        stop.wanted = True
        return None

    settings = JoinSettings(None)
    _join_forever(Joiner(settings, stop), place, Courtesy(stop=stop), stop, pause=0.1)
    assert tries == [0, 1, 2]
    said = capsys.readouterr().err
    assert said.count("No space left on device: '/tmp/horizonml-1'\ntrying again every few seconds") == 1
