"""When a device that joins is needed for something else, is stopped, or cannot go on for a while."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from horizonml.cli.up import _join_forever
from horizonml.job.jobfile import from_values
from horizonml.machine.signals import StopRequest
from horizonml.machine.yielding import Courtesy
from horizonml.rendezvous.device_messages import (
    DeviceState,
    FilesRequest,
)
from horizonml.rendezvous.discovery.finding import ServiceAddress
from horizonml.rendezvous.messages import (
    Nothing,
)
from horizonml.rendezvous.server import Answer, Peer
from horizonml.rendezvous.service import at_once
from horizonml.runtime.lobby.join import Ending, Joiner
from horizonml.runtime.lobby.offer import offer
from horizonml.runtime.lobby.prepare import JoinSettings
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
    run, stop, pieces = offer(job, LINEAGE).devices(), StopRequest(), list[int]()

    def data(peer: Peer, request: FilesRequest) -> Answer:
        pieces.append(len(pieces))
        stop.wanted = stopped and len(pieces) > 3
        if request.file is not None:
            return at_once({"piece": "MQ=="})
        files = [["none.txt", 1 << 20, "0" * 64]]
        page = {"files": files, "count": 1, "single": True} if ready else {"done": len(pieces)}
        return at_once({"ready": ready, "bytes": 1 << 20, **page})

    def hands_out(peer: Peer, request: Nothing) -> Answer:
        return at_once({**(run.handlers()["job"][1](peer, request)() or {}), "shared": True})

    def busy() -> str | None:
        return "somebody types" if len(pieces) > 3 and not stopped else None

    handlers = {**run.handlers(), "job": (Nothing, hands_out), "data": (FilesRequest, data)}
    with serving(handlers, None) as place:
        settings = JoinSettings(None, tmp_path / "runs", accept_data=True, busy=busy)
        assert Joiner(settings, stop).join(place) is ending
    assert words in capsys.readouterr().out
    assert [one.beat.state for one in run._devices.values()] == [DeviceState.LEAVING]


def test_a_device_that_always_joins_goes_on_after_what_was_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    stop, tries = StopRequest(), list[int]()

    def place() -> ServiceAddress | None:
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
