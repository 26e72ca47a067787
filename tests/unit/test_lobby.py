"""The lobby's rules, without a network: who is there, who gets which rank, and what is refused."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from horizonml.errors import JobError
from horizonml.job.jobfile import from_values
from horizonml.job.schema import Job
from horizonml.rendezvous.discovery.device import Device
from horizonml.rendezvous.server import Peer
from horizonml.runtime.lobby.accept import accept, confinement, needed
from horizonml.runtime.lobby.lobby import HOLD_SECONDS, LOST_SECONDS, MOST_DEVICES, Lobby
from horizonml.runtime.lobby.messages import MOST_CHUNK, Link, News, Outcome, Phase, Sign, Standing
from horizonml.runtime.lobby.sharing import check_wanted, is_of, lineage_of, note_lineage, offer

DEVICE = Device(name="pi", cores=4.0, memory=1 << 30, architecture="aarch64", torch="2.13.0+cpu")
LINEAGE = "0" * 32


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Visitor:
    """A device as the lobby sees it: a connection, and what it says there."""

    def __init__(self, lobby: Lobby, number: int, **changes: Any) -> None:
        self.lobby, self.peer = lobby, Peer(f"10.0.0.{number}:5000")
        self.sign = Sign(f"{number:032x}", replace(DEVICE, name=f"pi-{number}"), standing=Standing.READY)
        self.sign = replace(self.sign, **changes)

    def say(self, **changes: Any) -> News | None:
        """Give a sign of life, and return the answer unless it is held back."""
        self.sign = replace(self.sign, **changes)
        reply = self.lobby.handlers()["device"](self.peer, self.sign.to_json())
        return News.from_json(reply) if reply is not None else None

    def told(self, **changes: Any) -> News:
        """Give a sign of life that is answered at once."""
        news = self.say(knows=None, **changes)
        assert news is not None
        return news


def job(**values: Any) -> Job:
    return from_values({"name": "test", **values}, "the test's job")


def lobby(clock: Clock | None = None, **changes: Any) -> Lobby:
    offered = offer(changes.pop("job", job()), LINEAGE)
    return Lobby(offered, clock=clock or Clock(), torch="2.13.0", **changes)


def test_devices_get_the_ranks_in_the_order_in_which_they_came() -> None:
    hall = lobby()
    first, second = Visitor(hall, 1), Visitor(hall, 2)
    assert first.told().position == 2  # after the device of `up`
    assert second.told() == replace(first.told(), position=3, count=3)
    assert hall.present() == 3
    assert hall.start() == 3
    assert [visitor.told().rank for visitor in (second, first)] == [2, 1]
    news = first.told()
    assert (news.phase, news.world_size) == (Phase.STARTED, 3)


def test_without_the_device_of_up_the_first_that_came_has_rank_0() -> None:
    hall = lobby(take_part=False)
    first = Visitor(hall, 1)
    assert (first.told().position, first.told().count, hall.present()) == (1, 1, 1)
    assert hall.start() == 1
    assert first.told().rank == 0


def test_who_prepares_is_not_counted_and_gets_its_rank_when_it_is_ready() -> None:
    hall = lobby()
    slow, fast = Visitor(hall, 1, standing=Standing.PREPARING), Visitor(hall, 2)
    slow.told()
    fast.told()
    assert hall.present() == 2
    assert hall.start() == 2
    assert slow.told().rank is None
    assert fast.told().rank == 1
    late = slow.told(standing=Standing.READY)
    assert (late.rank, late.world_size) == (2, 2)


def test_an_answer_without_news_is_held_back_for_a_while_and_news_come_at_once() -> None:
    clock = Clock()
    hall = lobby(clock)
    visitor = Visitor(hall, 1)
    assert visitor.say() is not None  # the first answer
    assert visitor.say(knows=Phase.WAITING) is None
    clock.now = 0.9 * HOLD_SECONDS
    assert visitor.say() is None
    clock.now = 1.1 * HOLD_SECONDS
    assert visitor.say() is not None
    assert visitor.say() is None
    hall.start()
    begun = visitor.say()
    assert begun is not None
    assert begun.rank == 1
    assert visitor.say(knows=Phase.STARTED) is not None, "it has not begun yet"
    assert visitor.say(standing=Standing.TRAINING) is None
    hall.end(Outcome.COMPLETE)
    over = visitor.say()
    assert over is not None
    assert over.outcome is Outcome.COMPLETE
    assert hall.all_told()


def test_a_device_that_is_silent_is_gone_and_its_number_is_given_again_only_later() -> None:
    clock = Clock()
    hall = lobby(clock)
    first, second = Visitor(hall, 1), Visitor(hall, 2)
    first.told()
    clock.now = LOST_SECONDS + 0.1
    second.told()
    assert [guest.sign.device.name for guest in hall.guests()] == ["pi-2"]
    assert hall.start() == 2
    assert second.told().rank == 1
    third = Visitor(hall, 3)
    assert third.told().rank == 2
    clock.now += LOST_SECONDS + 0.1
    second.told(standing=Standing.TRAINING)
    assert len(hall.guests()) == 1
    assert Visitor(hall, 4).told().rank == 3, "rank 2 may still be on its way"
    clock.now += 20.0
    second.told()
    assert Visitor(hall, 5).told().rank == 2


def test_a_device_that_was_away_while_it_trained_keeps_its_rank() -> None:
    clock = Clock()
    hall = lobby(clock)
    visitor = Visitor(hall, 1)
    visitor.told()
    hall.start()
    news = visitor.told()
    clock.now = 60.0
    Visitor(hall, 2).told(standing=Standing.PREPARING)  # which is when those who are gone are forgotten
    back = Visitor(hall, 1)
    assert back.told(standing=Standing.TRAINING, run=news.run, rank=1).rank == 1
    other = Visitor(hall, 3)
    assert other.told(standing=Standing.TRAINING, run=news.run, rank=1).rank is None, "that rank is another's"
    assert Visitor(hall, 4).told(standing=Standing.TRAINING, run="f" * 32, rank=7).rank is None, "another run's rank"


def test_who_is_ready_for_an_earlier_run_is_not_ready_for_this_one() -> None:
    hall = lobby()
    visitor = Visitor(hall, 1, run="f" * 32)
    visitor.told()
    assert hall.present() == 1
    assert hall.start() == 1
    assert visitor.told().rank is None
    assert visitor.told(run=hall.run).rank == 1


def test_a_device_that_has_left_may_come_back() -> None:
    hall = lobby()
    visitor = Visitor(hall, 1)
    visitor.told()
    visitor.told(standing=Standing.LEAVING)
    assert hall.guests() == []
    assert hall.start() == 1
    assert visitor.told(standing=Standing.READY).rank == 1


def test_the_newest_connection_speaks_for_a_device_and_no_connection_for_two() -> None:
    hall = lobby()
    before = Visitor(hall, 1)
    before.told()
    after = Visitor(hall, 1)
    after.told()
    assert len(hall.guests()) == 1
    with pytest.raises(ValueError, match="another connection speaks for this device"):
        before.told()
    with pytest.raises(ValueError, match="this connection speaks for another device"):
        after.told(id="e" * 32)


def test_another_version_of_pytorch_is_refused_in_words() -> None:
    hall = lobby()
    news = Visitor(hall, 1).told(device=replace(DEVICE, torch="2.10.0"))
    assert news.refused
    assert news.words == "it has PyTorch 2.10.0, and the others have 2.13.0; install that one"
    assert hall.guests() == []


def test_no_more_devices_get_in_than_a_lobby_or_a_job_takes() -> None:
    hall = lobby(job=job(parallel={"strategy": "ddp", "max_workers": 3}))
    visitors = [Visitor(hall, number) for number in range(MOST_DEVICES)]
    assert not any(visitor.told().refused for visitor in visitors)
    assert Visitor(hall, 1000).told().refused
    assert hall.start() == 3
    assert [visitor.told().rank for visitor in visitors[:4]] == [1, 2, None, None]
    assert "at most 3 devices (parallel.max_workers)" in visitors[3].told().words


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("id", "x" * 32, "32 hexadecimal characters"),
        ("id", None, "32 hexadecimal characters"),
        ("device", {}, "name must be"),
        ("device", "pi", "a device must be an object"),
        ("device", asdict(DEVICE) | {"memory": -1}, "memory must be"),
        ("device", asdict(DEVICE) | {"cores": float("nan")}, "cores must be"),
        ("device", asdict(DEVICE) | {"name": "\x1b[2Jpi"}, "name must be"),
        ("standing", "idle", "standing must be one of"),
        ("words", "x" * 201, "at most 200 characters"),
        ("words", "two\nlines", "words must be"),
        ("link", {"sent": float("inf"), "received": 1.0, "seconds": 1.0}, "sent must be"),
        ("knows", "all", "knows must be one of"),
        ("rank", 1 << 40, "rank must be"),
    ],
)
def test_what_a_device_says_is_checked_and_changes_nothing_if_it_is_wrong(
    field: str, value: object, words: str
) -> None:
    hall = lobby()
    request = Visitor(hall, 1).sign.to_json() | {field: value}
    with pytest.raises(ValueError, match=words):
        hall.handlers()["device"](Peer("10.0.0.1:1"), request)
    assert hall.guests() == []


def test_echoes_are_bounded() -> None:
    echo = lobby().handlers()["echo"]
    peer = Peer("10.0.0.1:1")
    assert echo(peer, {"payload": "x" * MOST_CHUNK, "back": 10}) == {"payload": "0" * 10}
    for request in ({"payload": "x" * (3 * MOST_CHUNK)}, {"back": 3 * MOST_CHUNK}, {"back": True}, {"payload": 1}):
        with pytest.raises(ValueError, match="must be"):
            echo(peer, request)


def test_signs_and_news_travel_whole() -> None:
    sign = Sign("a" * 32, DEVICE, Standing.TRAINING, "words", Link(1.0, 2.0, 3.0), Phase.STARTED, "b" * 32, 4)
    assert Sign.from_json(sign.to_json()) == sign
    news = News("a" * 32, Phase.OVER, "job", 1, 2, 3, 4, 5, Outcome.FAILED, "words", True)
    assert News.from_json(news.to_json()) == news


def test_an_offer_leaves_the_world_open() -> None:
    offered = offer(
        job(folder="here", rendezvous={"address": "a:1"}, parallel={"strategy": "ddp", "workers": 5}), LINEAGE
    )
    assert (offered.exactly, offered.most) == (None, 64)
    theirs = accept(offered.text, "it", Path("runs"), allow_code=False)
    assert theirs.digest() == offered.job.digest()
    parallel = offered.job.parallel
    assert (parallel.workers, parallel.min_workers, parallel.strategy) == (None, 1, "ddp")
    assert offered.job.folder == "here"
    assert "here" not in offered.text
    assert offered.job.rendezvous.address is None
    assert offer(job(), LINEAGE).job.parallel.strategy == "auto"
    assert offer(job(parallel={"strategy": "hybrid", "workers": 4}), LINEAGE).job.parallel.min_workers == 3


def test_the_job_says_with_how_few_devices_training_begins_and_goes_on() -> None:
    offered = offer(job(parallel={"strategy": "ddp", "min_workers": 3, "max_workers": 6}), LINEAGE)
    theirs = accept(offered.text, "it", Path("runs"), allow_code=False)
    assert (theirs.parallel.min_workers, theirs.parallel.max_workers, offered.least) == (3, 6, 3)
    check_wanted(offered, 3)
    with pytest.raises(JobError, match=r"at least 3 devices \(parallel.min_workers\)"):
        check_wanted(offered, 2)
    assert offer(job(parallel={"strategy": "ddp", "min_workers": 70}), LINEAGE).most == 70


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


def test_no_rank_writes_elsewhere_for_a_job_from_elsewhere_and_all_train_the_same_job(tmp_path: Any) -> None:
    offered = offer(job(telemetry={"mlflow": "sqlite:////etc/x"}), LINEAGE)
    taken = accept(offered.text, "it", tmp_path, allow_code=False)
    assert taken.telemetry.mlflow is None  # on every rank, as any of them may lead the group one day
    assert taken.digest() == offered.job.digest()


def test_a_rank_may_fetch_from_the_lobbys_private_address_but_from_no_loopback_address() -> None:
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
