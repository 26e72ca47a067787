"""What ranks say to the rendezvous service, and what strangers may try to say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from horizonml.rendezvous.checks import MOST_RANKS, parse, printable
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.rendezvous.messages import (
    Ask,
    Complete,
    Departure,
    Ended,
    Event,
    Farewell,
    Formed,
    HeldBack,
    Join,
    Leave,
    Lost,
    Refused,
    Resume,
    Status,
    UnreadableJoin,
    Verdict,
    Withdraw,
    read_ended,
    read_event,
    read_status,
    read_verdict,
)
from tests.unit.test_roster import rank


def test_a_fingerprint_survives_the_way_through_json() -> None:
    fingerprint = rank(2, generation=3, group_size=3, replace_timeout=7.5, min_world_size=2, hostname="pi-küche")
    assert Fingerprint.from_json(parse(json.dumps(fingerprint.to_json()).encode())) == fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": -1}, "rank must be a whole number from 0 to 2, not -1"),
        ({"rank": 3}, "rank must be a whole number from 0 to 2, not 3"),
        ({"rank": True}, "not True"),
        ({"rank": 1.0}, "not 1.0"),
        ({"rank": "1"}, "not '1'"),
        ({"rank": None}, "not None"),
        ({"rank": 10**200}, "not 1000000000000000"),
        ({"world_size": 30_000_000}, f"world_size must be a whole number from 1 to {MOST_RANKS}, not 30000000"),
        ({"world_size": 0}, "not 0"),
        ({"generation": 1 << 60}, "generation must be"),
        ({"group_size": 1 << 20}, "group_size must be"),
        ({"replace_timeout": float("inf")}, "replace_timeout must be seconds from 0 to 1e+09, not inf"),
        ({"replace_timeout": float("nan")}, "not nan"),
        ({"replace_timeout": -1}, "not -1"),
        (
            {"hostname": "pi\nERROR: forged"},
            r"must be at most 255 printable characters, not 'pi\nERROR: forged'",
        ),
        ({"hostname": "\x1b[2J"}, "not '\\x1b[2J'"),
        ({"job": "x" * 256}, "job must be at most 255"),
        ({"machine": ["m"]}, "machine must be at most 255 printable characters, not list"),
        ({"pid": 0}, "pid must be"),
        ({"min_world_size": 0}, "min_world_size must be"),
        ({"max_world_size": -1}, "max_world_size must be"),
        ({"begin_with": MOST_RANKS + 1}, "begin_with must be"),
    ],
)
def test_what_no_rank_says_of_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is looked at)
        Fingerprint.from_json(rank(1).to_json() | changes)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("value", [None, 3, "x", [], {}])
def test_what_is_no_fingerprint_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        Fingerprint.from_json(value)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (b"[" * 60_000, "nested too deeply"),
        (b'{"id": ' + b'{"a":' * 10_000, "nested too deeply"),
        (b'{"id": 1, "leave": Infinity}', "Infinity is not a number"),
        (b'{"id": NaN}', "NaN is not a number"),
        (b'{"id": 1' + b"0" * 5000 + b"}", "integer string conversion"),
        (b"x" * (8 << 20), "8388608 bytes are too long"),
        (b"[]", "not an object"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe\x00", "decode"),
        (b"", "Expecting value"),
    ],
)
def test_what_is_no_event_is_refused(event: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(event)


def test_texts_from_the_network_are_shown_on_one_line() -> None:
    assert printable("done\nERROR: forged\x1b[31m\u202e") == "done ERROR: forged [31m "
    assert printable("x" * 600) == "x" * 500 + " ..."


@pytest.mark.parametrize(
    "event",
    [
        Join(7, rank(0)),
        Withdraw(7),
        Ask(7, "m1/10.0.0.1", 42, "d1", 3, 5),
        Leave(7, Farewell("lost a peer", Departure.LOST_PEER)),
        Resume(7, rank(1, generation=2, group_size=3), (0, 1, 2)),
    ],
)
def test_an_event_survives_the_way_through_the_store(event: Event) -> None:
    assert read_event(json.dumps(event.to_json()).encode()) == event


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"join": rank(0).to_json()}, "id must be a whole number"),
        ({"id": -1, "withdraw": True}, "id must be a whole number"),
        ({"id": 7, "ask": 3}, "a question must be an object, not 3"),
        ({"id": 7, "ask": {"host_id": "m", "pid": 0}}, "pid must be"),
        ({"id": 7, "resume": []}, "a fingerprint must be an object, not list"),
        ({"id": 7, "resume": rank(1).to_json(), "beside": [True]}, "beside must be a list of ranks"),
        ({"id": 7, "resume": rank(1).to_json()}, "beside must be a list of ranks"),
    ],
)
def test_a_malformed_event_is_refused(event: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_event(json.dumps(event).encode())


def test_who_sends_an_unreadable_join_can_be_told() -> None:
    with pytest.raises(UnreadableJoin, match="rank must be") as caught:
        read_event(json.dumps({"id": 7, "join": rank(0).to_json() | {"rank": -1}}).encode())
    assert caught.value.number == 7


@pytest.mark.parametrize("said", [None, "gone", [], {"reason": "a\nb", "kind": "unheard of"}])
def test_a_rank_that_leaves_is_never_held_back_by_its_words(said: object) -> None:
    farewell = Farewell.from_json(said)
    assert farewell.departure is Departure.OTHER
    assert farewell.reason.isprintable()


@pytest.mark.parametrize(
    "verdict", [Formed(3, [9, 7], [rank(0), rank(1)]), Refused([7], "rank 1 is there twice"), Complete([7])]
)
def test_a_verdict_survives_the_way_through_the_store(verdict: Verdict) -> None:
    assert read_verdict(json.dumps(verdict.to_json()).encode(), 7) == verdict


@pytest.mark.parametrize(
    "changes",
    [{"joins": [9]}, {"joins": [9, 8]}, {"joins": [9, "7"]}, {"members": []}, {"members": 1}, {"generation": 0}],
)
def test_a_verdict_that_a_stranger_wrote_is_refused(changes: dict[str, object]) -> None:
    verdict = {**Formed(3, [9, 7], [rank(0), rank(1)]).to_json(), **changes}
    with pytest.raises(ValueError, match="must"):
        read_verdict(json.dumps(verdict).encode(), 7)


def test_the_end_of_a_generation_survives_and_reads_as_a_sentence() -> None:
    ended = Ended("it is over", (Lost(1, "pi", "gives no sign of life", 5.25), Lost(2, "", "left: no memory", 0.0)))
    assert read_ended(json.dumps(ended.to_json()).encode()) == ended
    assert [str(one) for one in ended.lost] == ["rank 1 on pi gives no sign of life (5.2 s)", "rank 2 left: no memory"]


@pytest.mark.parametrize(
    "lost", [None, 3, [3], [{"rank": -1}], [{"rank": 1, "hostname": "pi", "reason": "x", "silent": -1}]]
)
def test_an_end_that_a_stranger_wrote_is_refused(lost: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        read_ended(json.dumps({"reason": "x", "lost": lost}).encode())


def test_the_status_survives_and_rubbish_in_it_is_left_out() -> None:
    status = Status([1, 2], [7], [3], ["rank 2 has job evil"], "waiting for rank 1", [HeldBack(9, "it dies", 8.5)])
    assert read_status(json.dumps(status.to_json()).encode()) == status
    rubbish = {"missing": [1, -1, "2", True], "running": "all", "newcomers": {}, "refused": 3, "held": [3, {}]}
    assert read_status(json.dumps(rubbish).encode()) == Status([1], None, [], [], "", [])
    for message in (None, b"[" * 60_000, b"x" * (1 << 20)):
        assert read_status(message).running is None
