"""What a device that joins does before it trains: where it looks, what it refuses, and when it leaves."""

from __future__ import annotations

import errno
import os
import secrets
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from horizonml.cli.up import _join_forever
from horizonml.errors import HorizonError, JobError, RendezvousError
from horizonml.job.jobfile import from_values
from horizonml.machine.network import listen, metrics_address
from horizonml.machine.signals import StopRequest
from horizonml.machine.yielding import Courtesy
from horizonml.rendezvous.device_messages import DeviceBeat, DeviceInfo, DeviceState, FilesRequest, RunOutcome
from horizonml.rendezvous.devices import Device, Devices
from horizonml.rendezvous.discovery.finding import ServiceAddress, at
from horizonml.rendezvous.messages import Nothing
from horizonml.rendezvous.server import Answer, Peer
from horizonml.rendezvous.service import Handlers, Service, at_once
from horizonml.runtime.lobby.join import Ending, Joiner
from horizonml.runtime.lobby.offer import JoinSettings, note_lineage, offer, take_folder
from horizonml.runtime.lobby.rank import Child
from horizonml.runtime.lobby.up import Up, UpSettings, own_address
from horizonml.runtime.lobby.view import DeviceLines, rows
from horizonml.security.tls import server_context
from horizonml.security.token import Token, make_token
from tests.commands import command
from tests.distributed.processes import wait_for

JOB = from_values({"name": "test"}, "the test's job")
RUN, LINEAGE = "a" * 32, "b" * 32


def test_a_peer_is_a_host_with_a_port_or_without() -> None:
    for peer, host, port in (
        ("pi", "pi", 29400),
        ("pi.local:29500", "pi.local", 29500),
        ("fd00::1", "fd00::1", 29400),
        ("[fd00::1]:29500", "fd00::1", 29500),
        ("[fd00::1]", "fd00::1", 29400),
    ):
        assert at(peer) == ServiceAddress(host, (host,), port)
    for peer in ("", ":1", "pi:x", "pi:0", "pi:70000"):
        with pytest.raises(JobError, match="--peer"):
            at(peer)


@contextmanager
def serving(run: Devices | Handlers, tls: ssl.SSLContext | None, host: str = "127.0.0.1") -> Iterator[ServiceAddress]:
    """Serve on this machine, for the devices of a run or with whatever answers."""
    over = threading.Event()
    roster, handlers = (run.roster, run.handlers()) if isinstance(run, Devices) else (None, run)
    service = Service(listen(host, 0), tls, roster=roster, handlers=handlers)
    thread = threading.Thread(target=service.run, args=(over.is_set,))
    thread.start()
    try:
        yield ServiceAddress("host", ("127.0.0.1",), service.port)
    finally:
        over.set()
        thread.join(10)


def join(place: ServiceAddress, token: Token | None, tmp_path: Path, **settings: Any) -> Ending:
    joiner = Joiner(JoinSettings(token, tmp_path / "runs", **settings), StopRequest())
    return joiner.join(place)


def saying(**replies: Any) -> Handlers:
    """What answers each kind of request with the same reply."""

    def answer(reply: Any) -> Callable[[Peer, Nothing], Answer]:
        return lambda peer, request: at_once(reply)

    return {name: (Nothing, answer(reply)) for name, reply in replies.items()}


def test_a_service_that_lies_gets_nowhere(tmp_path: Path) -> None:
    token = make_token()
    status = {"run": RUN, "phase": "waiting", "job": "test", "position": 1, "count": 1, "words": ""}
    offered = {"job": "name: x", "name": "x", "lineage": LINEAGE, "run": RUN}
    for replies, words in (
        ({"device": status | {"phase": "never"}}, "phase must be one of"),
        ({"device": status | {"refused": True, "words": "not you"}}, "not you"),
        ({"device": status, "job": offered | {"lineage": "../.."}}, "lineage must be"),
        ({"device": status, "job": offered | {"job": "name: ../../x"}}, "not a valid job"),
        ({"device": status}, "does not answer any more"),
    ):
        with serving(saying(**replies), server_context(token)) as place, pytest.raises(HorizonError, match=words):
            join(place, token, tmp_path)
    assert not (tmp_path / "runs").exists()


def test_data_that_is_not_here_and_not_shared_is_named_with_the_two_ways_out(tmp_path: Path) -> None:
    job = from_values({"name": "test", "data": {"name": "text", "path": str(tmp_path / "none.txt")}}, "the job")
    run = offer(job, LINEAGE).devices()
    with serving(run, None) as place, pytest.raises(JobError) as caught:
        join(place, None, tmp_path, data=(tmp_path,))
    assert "none.txt is not on this device; copy the data to the same path here" in str(caught.value)
    assert "horizonml up` with --share-data on host" in str(caught.value)
    assert [one.beat.state for one in run._devices.values()] == [DeviceState.LEAVING]


def test_a_run_that_is_over_already_is_left_in_peace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = offer(JOB, LINEAGE).devices()
    run.end(RunOutcome.STOPPED, "it was stopped")
    with serving(run, None) as place:
        assert join(place, None, tmp_path) is Ending.OVER
    assert "the run is over: it was stopped" in capsys.readouterr().out


def test_another_token_is_told_from_a_port_that_nothing_listens_on(tmp_path: Path) -> None:
    with (
        serving({}, server_context(make_token())) as place,
        pytest.raises(RendezvousError, match="has another token than this device"),
    ):
        join(place, make_token(), tmp_path)
    with pytest.raises(RendezvousError, match="nothing listens on port"):
        join(place, make_token(), tmp_path)


def test_the_folder_of_another_training_is_moved_away_and_that_of_this_one_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "test"
    job = JOB.model_copy(update={"folder": str(folder)})
    take_folder(job, LINEAGE)
    (folder / "rank-0.jsonl").write_text("{}\n")
    take_folder(job, LINEAGE)
    assert (folder / "rank-0.jsonl").exists()
    capsys.readouterr()
    for number, lineage in enumerate([RUN, LINEAGE, RUN]):
        (folder / "rank-0.jsonl").write_text(f"{number}\n")
        take_folder(job, lineage)
        assert not (folder / "rank-0.jsonl").exists()
        assert f"is kept in {folder}.previous" in capsys.readouterr().out
    names = ["test.previous-2", "test.previous-3", "test.previous"]  # nothing that is moved away is deleted later
    assert [(tmp_path / name / "rank-0.jsonl").read_text() for name in names] == ["0\n", "1\n", "2\n"]


def test_a_run_without_rank_0_on_this_device_goes_on_when_it_is_offered_again(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"folder": str(tmp_path / "test")})

    def lineage() -> str:
        up = Up(UpSettings(job, None, wanted=1, take_part=False))
        up._start(DeviceLines())
        return up._lineage

    assert lineage() == lineage()


def test_a_folder_that_is_no_run_is_not_touched(tmp_path: Path) -> None:
    folder = tmp_path / "test"
    folder.mkdir()
    (folder / "rank-0.jsonl").write_text("mine")
    with pytest.raises(JobError, match="--run-folder"):
        take_folder(JOB.model_copy(update={"folder": str(folder)}), LINEAGE)
    assert (folder / "rank-0.jsonl").read_text() == "mine"
    note_lineage(folder, RUN)
    with pytest.raises(JobError, match="--run-folder"):
        take_folder(JOB.model_copy(update={"folder": str(folder)}), LINEAGE)


def test_a_rank_that_died_before_its_orders_is_ended_all_the_same(tmp_path: Path) -> None:
    child = Child(tmp_path / "job.yaml")
    child._process.kill()
    child._process.wait(10)
    child.begin({"RANK": "0"})
    child.end()
    assert child.error().startswith("it was killed by SIGKILL")


def device(name: str, state: DeviceState = DeviceState.READY, **more: Any) -> Device:
    beat = DeviceBeat(secrets.token_hex(16), DeviceInfo(name, 4.0, 1 << 30), state, **more)
    return Device(beat, "127.0.0.1", 0.0, 1)


def test_what_devices_say_cannot_paint_the_terminal() -> None:
    shown = rows(DeviceInfo("laptop", 8.0, 1 << 34), "trains", [device("\x1b[2J[red]pi", words="a\nb")])
    assert shown[1]["device"] == " [2J[red]pi"
    assert shown[1]["state"] == "ready: a b"


def test_metrics_are_served_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics_address(None) is None
    assert metrics_address("") is None
    assert metrics_address("9400") == ("127.0.0.1", 9400)
    assert metrics_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert metrics_address("[::1]:9400") == ("::1", 9400)
    monkeypatch.setenv("HORIZONML_METRICS", "9400x")
    child = Child(tmp_path / "job.yaml")
    wait_for(lambda: child.poll() is not None, "the end of a rank that cannot tell where to serve its metrics", 30)
    assert child.error().startswith("--metrics ($HORIZONML_METRICS): '9400x' is not [HOST:]PORT")
    child.end()


def test_rank_0_is_met_where_the_others_reach_it() -> None:
    assert own_address([device("pi"), device("pi")], "0.0.0.0") == "127.0.0.1"
    assert own_address([device("pi")], "10.1.2.3") == "10.1.2.3"


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for arguments, words in (
        (("up", "digits", "--workers", "2", "--share-data"), "--share-data: this job's data lies in no file"),
        (("up", "digits", "--workers", "65"), "at most 64"),
        (("up", "explicit-plan", "--workers", "3"), "a plan for exactly 4 devices"),
        (("up", "folder", "--workers", "3"), "data.folder: pictures does not exist"),
        (("join", "--insecure", "--peer", "x:y"), "--peer"),
        (("join", "--insecure", "--max-temperature", "500"), "--max-temperature"),
    ):
        done = command(tmp_path, *arguments, HOME=str(tmp_path))
        assert done.returncode == 2, done.stderr
        assert words in done.stderr


def test_the_first_up_makes_a_token_and_does_not_show_it(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": ""}
    done = command(tmp_path, "join", **home)
    assert done.returncode == 2, done.stderr
    assert "this device has no token" in done.stderr
    done = command(tmp_path, "up", "digits", **home)
    assert done.returncode == 2, done.stderr
    assert "--workers: say with how many devices training starts" in done.stderr
    file = tmp_path / ".config" / "horizonml" / "token"
    assert str(file) in done.stdout
    assert "horizonml token --show" in done.stdout
    assert file.read_text().strip() not in done.stdout + done.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    done = command(tmp_path, "join", "--when-idle", "--max-temperature", "70", "--print-unit", **home)
    assert "join --forever --when-idle --max-temperature 70\n" in done.stdout, "a unit runs the same options"
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ready", "stopped", "ending", "words"),
    [
        (False, False, Ending.YIELDED, "left, because somebody types"),
        (True, True, Ending.LEFT, "left before the training began"),
    ],
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
