"""What a rank says and does when the process that links it to other machines cannot be started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from horizonml.errors import HorizonError, PeerLost, RendezvousError
from horizonml.rendezvous.messages import Fingerprint
from horizonml.runtime.worker import Linking
from horizonml.security.spec import SecuritySpec
from horizonml.security.token import make_token
from tests.unit.test_tunnel_process import HERE, free_port


def members(port: int) -> list[Fingerprint]:
    """Two ranks on two machines."""
    return [
        Fingerprint(rank, 2, "test", "", "", "", f"host {rank}", f"machine {rank}", HERE, 1, link_port=port)
        for rank in range(2)
    ]


@contextmanager
def a_python_that_ends_at_once() -> Iterator[None]:
    os.environ["PYTHONHOME"] = "/nonexistent"
    try:
        yield
    finally:
        del os.environ["PYTHONHOME"]


def test_a_tunnel_that_cannot_be_started_is_an_error_in_words_and_tried_again() -> None:
    linking, group = Linking(SecuritySpec(), make_token()), members(free_port())
    try:
        assert isinstance(fails(linking, group), PeerLost), "the ranks meet again"
        assert linking.between(group, 0) is not None
        linking.close()
        fails(linking, group)  # a success in between forgets the first failure
        error = fails(linking, group)
        assert isinstance(error, RendezvousError), "the others go on without this rank"
        assert "start this one again" in str(error)
    finally:
        linking.close()


def fails(linking: Linking, group: list[Fingerprint]) -> HorizonError:
    with a_python_that_ends_at_once(), pytest.raises(HorizonError, match="has ended, or does not answer") as found:
        linking.between(group, 0)
    assert not found.value.ends_job
    return found.value
