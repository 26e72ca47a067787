"""What ranks say to the rendezvous service, and what strangers may try to say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from horizonml.rendezvous.answers import (
    Complete,
    Ended,
    Formed,
    HeldBack,
    Lost,
    Member,
    Refused,
    Status,
    read_ended,
    read_status,
    read_verdict,
)
from horizonml.rendezvous.checks import MOST_RANKS, PROTOCOL, Fields, check_hello, encode, hello, parse
from horizonml.rendezvous.messages import Ask, Departure, Farewell, Fingerprint, Join, Resume
from horizonml.rendezvous.service import MOST_VALUE, Keys
from horizonml.text import printable
from tests.rosters import rank


def travelled(fields: Fields) -> Fields:
    """What the other side reads."""
    return parse(encode(fields))


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
        Ask(7, "m1/10.0.0.1", 42, "d1", 3, 5),
        Resume(7, rank(1, generation=2, group_size=3), (0, 1, 2)),
    ],
)
def test_a_request_survives_the_way_over_the_wire(event: Join | Ask | Resume) -> None:
    assert type(event).from_json(travelled(event.to_json())) == event


@pytest.mark.parametrize(
    ("kind", "event", "words"),
    [
        (Join, {"join": rank(0).to_json()}, "id must be a whole number"),
        (Join, {"id": 7}, "a fingerprint must be an object"),
        (Ask, {"id": 7, "ask": 3}, "a question must be an object, not 3"),
        (Ask, {"id": 7, "ask": {"host_id": "m", "pid": 0}}, "pid must be"),
        (Resume, {"id": 7, "resume": [], "beside": []}, "a fingerprint must be an object, not list"),
        (Resume, {"id": 7, "resume": rank(1).to_json(), "beside": [True]}, "beside must be a list of ranks"),
        (Resume, {"id": 7, "resume": rank(1).to_json()}, "beside must be a list of ranks"),
    ],
)
def test_a_malformed_request_is_refused(kind: type[Any], event: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind.from_json(travelled(event))


@pytest.mark.parametrize("said", [None, "gone", [], {"reason": "a\nb", "kind": "unheard of"}])
def test_a_rank_that_leaves_is_never_held_back_by_its_words(said: object) -> None:
    farewell = Farewell.from_json(said)
    assert farewell.departure is Departure.OTHER
    assert farewell.reason.isprintable()


def test_a_verdict_tells_a_member_its_place_and_nobody_elses_join() -> None:
    formed = Formed(3, [9, 7], [rank(0), rank(1)])
    assert read_verdict(travelled(formed.to_json(7))) == Member(3, 1, [rank(0), rank(1)])
    assert "9" not in json.dumps({**formed.to_json(7), "members": []})
    assert read_verdict(travelled(Refused([7], "rank 1 is there twice").to_json(7))) == Refused(
        [], "rank 1 is there twice"
    )
    assert read_verdict(travelled(Complete([7]).to_json(7))) == Complete([])


@pytest.mark.parametrize(
    "changes", [{"rank": 2}, {"rank": "1"}, {"members": []}, {"members": 1}, {"members": [{}]}, {"generation": 0}]
)
def test_a_malformed_verdict_is_refused(changes: dict[str, object]) -> None:
    verdict = {**Formed(3, [9, 7], [rank(0), rank(1)]).to_json(7), **changes}
    with pytest.raises(ValueError, match="must"):
        read_verdict(travelled(verdict))


def test_the_end_of_a_generation_survives_and_reads_as_a_sentence() -> None:
    lost = (Lost(1, "pi", "gives no sign of life", 5.25), Lost(2, "", "left: no memory", 0.0))
    ended = Ended("it is over", lost, evicted=True)
    assert read_ended(travelled(ended.to_json())) == ended
    assert read_ended(None) is None
    assert [str(one) for one in ended.lost] == ["rank 1 on pi gives no sign of life (5.2 s)", "rank 2 left: no memory"]


@pytest.mark.parametrize(
    "ended",
    [
        3,
        {"lost": None},
        {"lost": [3]},
        {"lost": [{"rank": -1}]},
        {"lost": [{"rank": 1, "hostname": "pi", "reason": "x", "silent": -1}]},
    ],
)
def test_a_malformed_end_is_refused(ended: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        read_ended(ended)


def test_the_status_says_to_each_what_concerns_it() -> None:
    held = [HeldBack(9, "it dies", 8.5), HeldBack(7, "so does that", 2.0)]
    status = Status([1, 2], 3, None, [3], ["rank 2 has job evil"], "waiting for rank 1", held)
    read = read_status(travelled(status.to_json(7, member=True)))
    assert (read.missing, read.running, read.member, read.newcomers) == ([1, 2], 3, True, [3])
    assert (read.refused, read.short) == (["rank 2 has job evil"], "waiting for rank 1")
    assert [(one.reason, one.own) for one in read.held] == [("it dies", False), ("so does that", True)]


def test_rubbish_in_the_status_is_left_out() -> None:
    rubbish = {"missing": [1, -1, "2", True], "running": "all", "newcomers": {}, "refused": 3, "held": [3, {}]}
    assert read_status(rubbish) == Status([1], 0, None, [], [], "", [])
    for values in (None, [], "x"):
        assert read_status(values).member is None


def test_a_client_of_another_protocol_is_told_so() -> None:
    check_hello(hello())
    with pytest.raises(ValueError, match="says hello first"):
        check_hello({"do": "join"})
    with pytest.raises(ValueError, match=f"speaks protocol {PROTOCOL} .* speaks protocol 9 .*HorizonML 9.9"):
        check_hello({**hello(), "protocol": PROTOCOL + 8, "version": "9.9"})


def test_a_key_belongs_to_who_set_it_first() -> None:
    keys = Keys()
    keys.set(1, "a", b"x")
    keys.set(1, "a", b"y")
    with pytest.raises(ValueError, match="belongs to another rank"):
        keys.set(2, "a", b"z")
    assert (keys.get("a"), keys.get("b")) == (b"y", None)


def test_what_a_rank_stores_is_bounded() -> None:
    keys = Keys()
    for key, value, words in (
        ("a\n", b"", "printable"),
        ("k" * 600, b"", "512"),
        ("a", bytes(MOST_VALUE + 1), "bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            keys.set(1, key, value)

    def fill(owner: int, value: bytes, most: int) -> int:
        """How many keys an owner can set before it is refused."""
        for number in range(most):
            try:
                keys.set(owner, f"{owner}-{number}", value)
            except ValueError:
                return number
        return most

    assert 16e6 < fill(1, bytes(MOST_VALUE), 1000) * MOST_VALUE < 17e6
    assert fill(2, b"1", 10) == 10  # which is nobody else's problem
    assert fill(3, b"", 100_000) < 80_000  # the keys themselves take memory
    assert sum(fill(owner, bytes(MOST_VALUE), 1000) for owner in range(4, 20)) * MOST_VALUE < 128 << 20
