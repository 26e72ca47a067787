"""What ranks say to the rendezvous service, and what strangers may try to say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from horizonml.rendezvous.checks import MOST_RANKS, parse, printable
from horizonml.rendezvous.fingerprint import Fingerprint
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
