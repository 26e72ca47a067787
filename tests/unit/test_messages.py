"""What ranks say to the rendezvous service, what it answers, and what strangers may try to say."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from horizonml.rendezvous.messages import (
    Ask,
    BeatAnswer,
    Departure,
    Ended,
    Farewell,
    Fingerprint,
    GroupStatus,
    HeldBack,
    Join,
    JoinVerdict,
    Leave,
    Lost,
    NumberRequest,
    Peers,
    Resume,
)
from horizonml.rendezvous.service import MOST_VALUE, Keys
from horizonml.rendezvous.wire import MOST_RANKS, PROTOCOL, check_hello, encode, fields_of, hello, parse, read
from tests.rosters import rank

LOST = (Lost(1, "pi", "gives no sign of life", 5.25), Lost(2, "", "left: no memory", 0.0))
HELD = HeldBack("it dies", 8.5, own=True, probe=(("10.0.0.1", 29401),))


def test_a_message_survives_the_way_over_the_wire() -> None:
    for message in (
        rank(2, generation=3, group_size=3, replace_timeout=7.5, min_world_size=2, hostname="pi-küche"),
        Join(7, rank(0)),
        Ask(7, NumberRequest("m1/10.0.0.1", 42, "d1", 3, 5)),
        Resume(7, rank(1, generation=2, group_size=3), (0, 1, 2)),
        Leave(Farewell("bye", Departure.AGAIN)),
        JoinVerdict(3, 1, (rank(0), rank(1))),
        BeatAnswer(GroupStatus((1, 2), 3, True, (3,), ("rank 2 has job evil",), "waiting for rank 1", (HELD,))),
        BeatAnswer(GroupStatus(), JoinVerdict(refused="it is there twice"), Ended("it is over", LOST, evicted=True)),
        Peers(None, {1: Farewell("bye", Departure.DONE)}, {0: 5, 1: 7}),
    ):
        assert read(type(message), parse(encode(fields_of(message, "something")))) == message


def test_what_no_rank_says_of_itself_is_refused() -> None:
    for changes, words in (
        ({"rank": -1}, f"rank must be a whole number from 0 to {MOST_RANKS - 1}, not -1"),
        ({"rank": 3}, "rank must be a whole number from 0 to 2, not 3"),
        ({"rank": True}, "not True"),
        ({"rank": 1.0}, "not 1.0"),
        ({"rank": 10**200}, "not 1000000000000000"),
        ({"world_size": 30_000_000}, f"world_size must be a whole number from 1 to {MOST_RANKS}, not 30000000"),
        ({"generation": 1 << 60}, "generation must be"),
        ({"replace_timeout": float("inf")}, "replace_timeout must be seconds from 0 to 1e+09, not inf"),
        ({"replace_timeout": float("nan")}, "not nan"),
        ({"hostname": "pi\nERROR: forged"}, r"must be at most 255 printable characters, not 'pi\nERROR: forged'"),
        ({"job": "x" * 256}, "job must be at most 255"),
        ({"machine": ["m"]}, "machine must be at most 255 printable characters, not list"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (its text is looked at)
            read(Fingerprint, asdict(rank(1)) | changes)
        assert words in str(caught.value)
        assert len(str(caught.value)) < 200
        assert str(caught.value).isprintable()


def test_what_is_no_message_is_refused() -> None:
    for content, words in (
        (b"[" * 60_000, "nested too deeply"),
        (b'{"id": 1, "leave": Infinity}', "Infinity is not a number"),
        (b'{"id": 1' + b"0" * 5000 + b"}", "integer string conversion"),
        (b"x" * (8 << 20), "8388608 bytes are too long"),
        (b"[]", "not an object"),
        (b"{", "Expecting property name"),
        (b"\xff\xfe\x00", "decode"),
    ):
        with pytest.raises(ValueError, match=words):
            parse(content)


def test_a_malformed_message_is_refused_with_the_path_to_what_is_wrong() -> None:
    for kind, said, words in (
        (Fingerprint, "x", "must be an object"),
        (Fingerprint, {}, "rank must be"),
        (Join, {"id": 7, "join": asdict(rank(0)) | {"pid": 0}}, r"join\.pid must be a whole number"),
        (Resume, {"id": 7, "resume": asdict(rank(1)), "beside": [True]}, "beside must be a whole number"),
        (Resume, {"id": 7, "resume": asdict(rank(1))}, "beside must be a list of at most 4096 ranks"),
        *(
            (JoinVerdict, asdict(JoinVerdict(3, 1, [rank(0), rank(1)])) | changes, "must be")
            for changes in ({"rank": 2}, {"members": []}, {"members": [{}]})
        ),
        (JoinVerdict, asdict(JoinVerdict(0, 1, [rank(0), rank(1)])), "must be"),
        (Ended, {"reason": "", "lost": [asdict(LOST[0]) | {"silent": -1}]}, r"lost.* must be"),
        (GroupStatus, {"held": [asdict(HELD) | {"probe": [["pi", 1]]}]}, "probe"),
        (Peers, {"ended": None, "gone": {}, "beats": {"x": 1}}, "beats must be an object with ranks"),
    ):
        with pytest.raises(ValueError, match=words):
            read(kind, said)


def test_a_rank_that_leaves_is_never_held_back_by_its_words() -> None:
    for said in (None, "gone", {"reason": "a\nb", "kind": "unheard of"}):
        farewell = read(Leave, {"leave": said}).leave
        assert farewell.kind is Departure.OTHER
        assert farewell.reason.isprintable()


def test_a_client_of_another_protocol_is_told_so() -> None:
    check_hello(hello())
    with pytest.raises(ValueError, match="says hello first"):
        check_hello({"do": "join"})
    with pytest.raises(
        ValueError, match=f"speaks protocol {PROTOCOL} .* speaks protocol {PROTOCOL + 8} .*HorizonML 9.9"
    ):
        check_hello({**hello(), "protocol": PROTOCOL + 8, "version": "9.9"})


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
