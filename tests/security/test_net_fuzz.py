"""Sessions that nobody would write: whatever is said to the service, the group that runs there goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horizonml.rendezvous.messages import BeatAnswer, Ended, GroupStatus, JoinVerdict, Peers
from horizonml.rendezvous.wire import PROTOCOL, encode, parse, read
from tests.rosters import rank
from tests.security.net import Raw, Target, connect, undisturbed

FEW = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MEMBER = asdict(rank(0, world_size=2, generation=1, group_size=2, pid=3_999_999_999))
REQUESTS: list[dict[str, Any]] = [
    {"do": "join", "id": 5, "join": MEMBER},
    {"do": "resume", "id": 5, "resume": MEMBER, "beside": [0, 1]},
    {"do": "beat", "count": 1, "verdict": True, "seconds": 0.01},
    {"do": "withdraw"},
    {"do": "leave", "leave": {"reason": "x", "kind": "failed"}},
    {"do": "peers"},
    {"do": "set", "key": "generation-1/key1", "value": "aGE="},
    {"do": "get", "keys": ["generation-1/key1"], "seconds": 0.01, "check": True},
    {"do": "ask", "id": 5, "ask": {"host_id": "pi", "pid": 7, "digest": "fuzz", "world_size": 2, "most": 4}},
    {"do": "status"},
    {"do": "hello", "protocol": PROTOCOL, "version": "0"},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request as it should be, or with some fields of it exchanged, or anything else."""
    request: Any = json.loads(json.dumps(draw(st.sampled_from(REQUESTS))))
    for _ in range(draw(st.integers(0, 3))):
        place = request
        while isinstance(place, dict) and place:
            name = draw(st.sampled_from(sorted(place)))
            if not isinstance(place[name], dict) or draw(st.booleans()):
                place[name] = draw(VALUES)
                break
            place = place[name]
    return draw(st.just(encode(request)) | st.binary(max_size=200) | st.just(encode(request)[:-1]))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A service without a token, where everyone can say everything."""
    service = Target(tmp_path_factory.mktemp("service"), None)
    yield service
    service.end()


def say(target: Target, said: list[bytes], greet: bool) -> None:
    """Say all this on one connection, and wait for the end of it."""
    with Raw(connect(target.port), greet) as peer, suppress(ConnectionError, json.JSONDecodeError):
        for line in said:
            peer.say(line)
            if line.endswith(b"\n") and peer.hear() == {}:
                break


def test_no_session_disturbs_the_group_that_runs(target: Target) -> None:
    with undisturbed(target) as ranks:

        @FEW
        @given(st.lists(requests(), max_size=5), st.booleans())
        def fuzz(said: list[bytes], greet: bool) -> None:
            say(target, said, greet)
            assert ranks.members[0].ended is None

        fuzz()


def test_no_value_in_a_request_disturbs_the_group_that_runs(target: Target) -> None:
    places = [(request, name) for request in REQUESTS for name in request]
    with undisturbed(target) as ranks:

        @settings(FEW, max_examples=300)
        @given(st.sampled_from(places), VALUES)
        def fuzz(place: tuple[dict[str, Any], str], value: Any) -> None:
            say(target, [encode({**place[0], place[1]: value})], greet=True)
            assert ranks.members[0].ended is None

        fuzz()


FIELDS = st.dictionaries(st.sampled_from(["refused", "members", "rank", "generation", "lost", "reason"]), VALUES)


@FEW
@given(st.binary(max_size=400) | (VALUES | FIELDS).map(lambda value: json.dumps(value).encode()))
def test_what_a_service_says_is_read_or_refused(content: bytes) -> None:
    """A rank reads what a false service answers: nothing but ValueError comes of it."""
    with suppress(ValueError):
        fields = parse(content)
        for kind in (BeatAnswer, GroupStatus, JoinVerdict, Ended, Peers):
            with suppress(ValueError):
                read(kind, fields)
