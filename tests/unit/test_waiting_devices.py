"""The devices that wait for a rank, without a network: who is there, who gets which rank, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.joins import measure
from horizonml.errors import JobError
from horizonml.job.jobfile import from_values
from horizonml.job.schema import Job
from horizonml.rendezvous.device_messages import (
    MOST_CHUNK,
    DeviceBeat,
    DeviceInfo,
    DeviceState,
    Phase,
    RunOutcome,
    RunStatus,
)
from horizonml.rendezvous.devices import HOLD_SECONDS, LOST_SECONDS, MOST_DEVICES, Devices
from horizonml.rendezvous.messages import NumberRequest
from horizonml.rendezvous.server import Answer, Peer
from horizonml.rendezvous.wire import Fields, fields_of, read
from horizonml.runtime.lobby.offer import (
    accept,
    check_wanted,
    confinement,
    is_of,
    lineage_of,
    needed,
    note_lineage,
    offer,
)
from tests.rosters import rank

DEVICE = DeviceInfo(name="pi", cores=4.0, memory=1 << 30, architecture="aarch64", torch="2.13.0+cpu")
LINEAGE = "0" * 32


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ask(devices: Devices, peer: Peer, do: str, **fields: Any) -> Answer:
    """What answers a request, as the service reads it."""
    kind, handler = devices.handlers()[do]
    return handler(peer, read(kind, fields))


class Visitor:
    """A device as others see it: a connection, and what it says there."""

    def __init__(self, devices: Devices, number: int, **changes: Any) -> None:
        self.devices, self.peer = devices, Peer(f"10.0.0.{number}:5000", f"10.0.0.{number}")
        self.beat = DeviceBeat(f"{number:032x}", replace(DEVICE, name=f"pi-{number}"), DeviceState.READY)
        self.beat = replace(self.beat, **changes)

    def asks(self, **changes: Any) -> Callable[[], RunStatus | None]:
        """Give a heartbeat, and return what asks for the answer, which may be held back."""
        self.beat = replace(self.beat, **changes)
        answer = ask(self.devices, self.peer, "device", **fields_of(self.beat))

        def status() -> RunStatus | None:
            found: Fields | None = answer()
            return read(RunStatus, found) if found is not None else None

        return status

    def told(self, **changes: Any) -> RunStatus:
        """Give a heartbeat that is answered at once."""
        status = self.asks(knows=None, **changes)()
        assert status is not None
        return status


def job(**values: Any) -> Job:
    return from_values({"name": "test", **values}, "the test's job")


def gathering(clock: Clock | None = None, **changes: Any) -> Devices:
    found = offer(changes.pop("job", job()), LINEAGE).devices(torch="2.13.0", **changes)
    found.clock = clock or Clock()
    return found


def test_devices_get_the_ranks_in_the_order_in_which_they_came() -> None:
    run = gathering()
    first, second = Visitor(run, 1), Visitor(run, 2)
    assert first.told().position == 2  # after the device of `up`
    assert second.told() == replace(first.told(), position=3, count=3)
    assert run.ready() == 3
    assert run.start() == 3
    assert [visitor.told().rank for visitor in (second, first)] == [2, 1]
    status = first.told()
    assert (status.phase, status.world_size) == (Phase.STARTED, 3)
    alone = gathering(take_part=False)  # without the device of `up`
    first = Visitor(alone, 1)
    assert (first.told().position, first.told().count, alone.ready()) == (1, 1, 1)
    assert alone.start() == 1
    assert first.told().rank == 0


def test_who_prepares_is_not_counted_and_gets_its_rank_when_it_is_ready() -> None:
    run = gathering()
    slow, fast = Visitor(run, 1, state=DeviceState.PREPARING), Visitor(run, 2)
    slow.told()
    fast.told()
    assert run.ready() == 2
    assert run.start() == 2
    assert slow.told().rank is None
    assert fast.told().rank == 1
    late = slow.told(state=DeviceState.READY)
    assert (late.rank, late.world_size) == (2, 2)


def test_an_answer_is_held_back_for_a_while_unless_something_has_changed() -> None:
    clock = Clock()
    run = gathering(clock)
    visitor = Visitor(run, 1)
    assert visitor.asks()() is not None  # the first answer
    status = visitor.asks(knows=Phase.WAITING)
    assert status() is None
    clock.now = 0.9 * HOLD_SECONDS
    assert status() is None
    clock.now = 1.1 * HOLD_SECONDS
    assert status() is not None
    status = visitor.asks()
    assert status() is None
    run.start()
    begun = status()
    assert begun is not None
    assert begun.rank == 1
    assert visitor.asks(knows=Phase.STARTED)() is not None, "it has not begun yet"
    status = visitor.asks(state=DeviceState.TRAINING)
    assert status() is None
    run.end(RunOutcome.COMPLETE)
    over = status()
    assert over is not None
    assert over.outcome is RunOutcome.COMPLETE
    assert run.all_told()


def test_a_device_that_is_silent_is_gone_and_its_number_is_given_again_only_later() -> None:
    clock = Clock()
    run = gathering(clock)
    first, second = Visitor(run, 1), Visitor(run, 2)
    first.told()
    clock.now = LOST_SECONDS + 0.1
    second.told()
    assert [one.beat.device.name for one in run.present()] == ["pi-2"]
    assert run.start() == 2
    assert second.told().rank == 1
    third = Visitor(run, 3)
    assert third.told().rank == 2
    clock.now += LOST_SECONDS + 0.1
    second.told(state=DeviceState.TRAINING)
    assert len(run.present()) == 1
    assert Visitor(run, 4).told().rank == 3, "rank 2 may still be on its way"
    clock.now += 20.0
    second.told()
    assert Visitor(run, 5).told().rank == 2


def test_a_device_that_was_away_while_it_trained_keeps_its_rank() -> None:
    clock = Clock()
    run = gathering(clock)
    visitor = Visitor(run, 1)
    visitor.told()
    run.start()
    status = visitor.told()
    clock.now = 60.0
    Visitor(run, 2).told(state=DeviceState.PREPARING)  # which is when those who are gone are forgotten
    back = Visitor(run, 1)
    assert back.told(state=DeviceState.TRAINING, run=status.run, rank=1).rank == 1
    other = Visitor(run, 3)
    assert other.told(state=DeviceState.TRAINING, run=status.run, rank=1).rank is None, "that rank is another's"
    assert Visitor(run, 4).told(state=DeviceState.TRAINING, run="f" * 32, rank=7).rank is None, "another run's rank"


def test_who_is_ready_for_an_earlier_run_or_has_left_is_not_ready_for_this_one() -> None:
    run = gathering()
    visitor = Visitor(run, 1, run="f" * 32)
    visitor.told()
    left = Visitor(run, 2)
    left.told()
    left.told(state=DeviceState.LEAVING)
    assert run.ready() == 1
    assert run.start() == 1
    assert visitor.told().rank is None
    assert visitor.told(run=run.run).rank == 1
    assert left.told(state=DeviceState.READY).rank == 2, "who has left may come back"


def test_the_newest_connection_speaks_for_a_device_and_no_connection_for_two() -> None:
    run = gathering()
    before = Visitor(run, 1)
    before.told()
    after = Visitor(run, 1)
    after.told()
    assert len(run.present()) == 1
    with pytest.raises(ValueError, match="another connection speaks for this device"):
        before.told()
    with pytest.raises(ValueError, match="this connection speaks for another device"):
        after.told(id="e" * 32)


def test_another_version_of_pytorch_is_refused_in_words() -> None:
    run = gathering()
    status = Visitor(run, 1).told(device=replace(DEVICE, torch="2.10.0"))
    assert status.refused
    assert status.words == "it has PyTorch 2.10.0, and the others have 2.13.0; install that one"
    assert run.present() == []


def test_no_more_devices_get_in_than_a_run_or_a_job_takes() -> None:
    run = gathering(job=job(parallel={"strategy": "ddp", "max_workers": 3}))
    visitors = [Visitor(run, number) for number in range(MOST_DEVICES)]
    assert not any(visitor.told().refused for visitor in visitors)
    assert Visitor(run, 1000).told().refused
    assert run.start() == 3
    assert [visitor.told().rank for visitor in visitors[:4]] == [1, 2, None, None]
    assert "at most 3 devices (parallel.max_workers)" in visitors[3].told().words


def test_what_a_device_says_is_checked_and_changes_nothing_if_it_is_wrong() -> None:
    run = gathering()
    for field, value, words in (
        ("id", "x" * 32, "32 hexadecimal characters"),
        ("device", {}, "device.name must be"),
        ("device", "pi", "device must be an object"),
        ("device", asdict(DEVICE) | {"memory": 1 << 61}, "memory must be"),
        ("device", asdict(DEVICE) | {"cores": float("nan")}, "cores must be"),
        ("device", asdict(DEVICE) | {"name": "\x1b[2Jpi"}, "name must be"),
        ("device", asdict(DEVICE) | {"name": ""}, "name must"),
        ("state", "idle", "state must be one of"),
        ("words", "x" * 201, "at most 200 printable characters"),
        ("link", {"sent": float("inf"), "received": 1.0, "seconds": 1.0}, "sent must be"),
        ("rank", 1 << 40, "rank must be"),
    ):
        request = fields_of(Visitor(run, 1).beat) | {field: value}
        with pytest.raises(ValueError, match=words):
            ask(run, Peer("10.0.0.1:1", "10.0.0.1"), "device", **request)
    assert run.present() == []


def test_echoes_are_bounded() -> None:
    run, peer = gathering(), Peer("10.0.0.1:1", "10.0.0.1")
    assert ask(run, peer, "echo", payload="x" * MOST_CHUNK, back=10)() == {"payload": "0" * 10}
    for request in ({"payload": "x" * (3 * MOST_CHUNK)}, {"back": 3 * MOST_CHUNK}, {"back": True}, {"payload": 1}):
        with pytest.raises(ValueError, match="must be"):
            ask(run, peer, "echo", **request)


def test_a_rank_that_joins_by_itself_and_a_device_never_get_one_number() -> None:
    clock = Clock()
    run = gathering(clock)
    device, late = Visitor(run, 1), Visitor(run, 2, state=DeviceState.PREPARING)
    device.told()
    assert run.start() == 2
    own = NumberRequest("pi", 7, run.digest, 2, run.most)  # of `horizonml train --join`
    given = run.roster.give_number(own, 0.0)
    assert given is not None
    assert given.rank == 2
    assert device.told().rank == 1
    late.told()
    assert late.told(state=DeviceState.READY).rank == 3
    run.roster.join(9, rank(4, 8, digest=run.digest), 0.0)  # with a number of its own
    assert Visitor(run, 3).told().rank == 5


def test_an_offer_leaves_the_world_open_and_keeps_the_job_s_bounds() -> None:
    offered = offer(
        job(folder="here", rendezvous={"address": "a:1"}, parallel={"strategy": "ddp", "workers": 5}), LINEAGE
    )
    assert (offered.exactly, offered.most) == (None, 64)
    assert accept(offered.text, "it", Path("runs"), allow_code=False).digest() == offered.job.digest()
    parallel = offered.job.parallel
    assert (parallel.workers, parallel.min_workers, parallel.strategy) == (None, 1, "ddp")
    assert offered.job.folder == "here"
    assert "here" not in offered.text
    assert offered.job.rendezvous.address is None
    offered = offer(job(parallel={"strategy": "ddp", "min_workers": 3, "max_workers": 6}), LINEAGE)
    theirs = accept(offered.text, "it", Path("runs"), allow_code=False)
    assert (theirs.parallel.min_workers, theirs.parallel.max_workers, offered.least) == (3, 6, 3)
    check_wanted(offered, 3)
    with pytest.raises(JobError, match=r"at least 3 devices \(parallel.min_workers\)"):
        check_wanted(offered, 2)
    assert offer(job(parallel={"strategy": "ddp", "min_workers": 70}), LINEAGE).most == 70
    assert offer(job(parallel={"strategy": "hybrid", "workers": 4}), LINEAGE).job.parallel.min_workers == 3


def test_a_plan_for_some_devices_waits_for_exactly_these() -> None:
    stages = {"stages": [{"ranks": [0]}, {"ranks": [1]}]}
    offered = offer(job(parallel=stages), LINEAGE)
    assert (offered.exactly, offered.most) == (2, 2)
    check_wanted(offered, 2)
    with pytest.raises(JobError, match="a plan for exactly 2 devices"):
        check_wanted(offered, 3)
    with pytest.raises(JobError, match="at most 64"):
        check_wanted(offer(job(), LINEAGE), 65)


def test_a_job_from_elsewhere_writes_where_this_device_says_and_runs_no_code(tmp_path: Any) -> None:
    offered = offer(job(telemetry={"mlflow": "sqlite:////etc/x"}), LINEAGE)
    taken = accept(offered.text, "it", tmp_path, allow_code=False)
    assert taken.telemetry.mlflow is None  # on every rank, as any of them may lead the group one day
    assert taken.digest() == offered.job.digest(), "all train the same job"
    text = "name: x\nfolder: /etc\ndata: {name: cifar10, folder: /etc}\n"
    taken = accept(text, "it", tmp_path, allow_code=False)
    assert (taken.run_folder, taken.data.folder) == (tmp_path / "x", None)
    for code in ("model: {name: 'tests.models:mlp'}", "data: {name: 'os:getcwd'}", "task: {name: 'os:getcwd'}"):
        with pytest.raises(JobError, match="--allow-code"):
            accept(code, "it", tmp_path, allow_code=False)
    assert accept("model: {name: 'tests.models:mlp'}", "it", tmp_path, allow_code=True).model.name == "tests.models:mlp"
    with pytest.raises(JobError, match="no module nowhere"):
        accept("model: {name: 'nowhere:build'}", "it", tmp_path, allow_code=True)
    with pytest.raises(JobError, match="not a valid job"):
        accept("epochs: many", "it", tmp_path, allow_code=False)


def test_a_rank_may_fetch_from_the_private_address_of_its_run_but_from_no_loopback_address() -> None:
    assert confinement("10.1.2.3:29400", allow_code=True) == {"HORIZONML_FETCH_FROM": "10.1.2.3"}
    assert confinement("[fd00::1]:29400", allow_code=True) == {"HORIZONML_FETCH_FROM": "fd00::1"}
    assert confinement("127.0.0.1:29400", allow_code=True) == {"HORIZONML_FETCH_FROM": ""}
    assert confinement("127.0.0.1:29400", allow_code=False)["HF_HUB_OFFLINE"] == "1"


def test_the_files_that_a_job_trains_on_are_named(tmp_path: Any) -> None:
    assert needed(job()) is None
    assert needed(job(data={"name": "text"})) is None
    where = needed(job(data={"name": "folder", "folder": "/data/x"}))
    assert where is not None
    assert (where.field, str(where.path)) == ("data.folder", "/data/x")
    stream = {"name": "stream", "path": "https://x/y", "inputs": ["jpg"], "targets": ["cls"]}
    assert needed(job(data=stream)) is None


def test_a_run_in_a_folder_is_of_the_lineage_of_the_one_before_unless_it_starts_over(tmp_path: Any) -> None:
    folder = tmp_path / "run"
    first = lineage_of(folder, fresh=False)
    assert is_of(folder, first)
    note_lineage(folder, first)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert lineage_of(folder, fresh=False) == first
    assert lineage_of(folder, fresh=True) != first
    assert is_of(folder, first)
    assert not is_of(folder, LINEAGE)
    other = tmp_path / "other"
    (other / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert not is_of(other, first), "it was not trained by `up`"


def test_fifty_devices_join_at_once_and_each_gets_a_rank_of_its_own() -> None:
    """Over the real service and TLS, as `python -m benchmarks.joins` measures."""
    result = measure(50, still_seconds=0.1)
    assert (result.devices, result.ranks) == (50, 50)
    assert result.service_memory < 64 << 20
