"""A device gets the token by a short code; whoever has another code, or stands in between, gets nothing."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from horizonml.errors import RendezvousError, SecurityError
from horizonml.rendezvous import client, server
from horizonml.rendezvous.client import Client, ServiceError, ServiceRefuses
from horizonml.rendezvous.messages import Nothing
from horizonml.rendezvous.pairing import Pairing, PairMessage, Proof, find_and_pair, pair
from horizonml.rendezvous.service import Service
from horizonml.rendezvous.wire import fields_of
from horizonml.security.devices import PairedDevices, Revoked
from horizonml.security.pairing import CODE_SECONDS, MOST_WRONG, CodeOffer, DeviceHalf, WrongCode, read_code, words
from horizonml.security.tls import any_context, certificate, client_context, read_revoked, server_context, sign_revoked
from horizonml.security.token import make_token, parse_token, save_token
from tests.commands import command
from tests.distributed.processes import wait_for

TOKEN = make_token()
CERTIFICATE = certificate(TOKEN)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the device that offers codes, in which lie its token and its lists."""
    monkeypatch.delenv("HORIZONML_TOKEN", raising=False)
    monkeypatch.setenv("HORIZONML_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(server, "REVOKED", Revoked(lambda: tmp_path / "revoked.pem"))
    monkeypatch.setattr(client, "REVOKED", Revoked(lambda: tmp_path / "elsewhere" / "revoked.pem"))
    save_token(TOKEN)
    return tmp_path


def is_dropped(one: Client) -> bool:
    try:
        one.ask(fields_of(Nothing(), "status"))
    except ServiceError:
        return True
    return False


def other_code(code: str) -> str:
    """A code of the same number that is not this one."""
    number, *shown = code.split("-")
    return "-".join([number, *next(pair for pair in itertools.permutations(words(), 2) if [*pair] != shown)])


def exchange(offer: CodeOffer, code: str, certificate: bytes = CERTIFICATE) -> str:
    half = DeviceHalf(code, certificate)
    begun = offer.begin(half.message)
    proof, sealed = offer.finish(begun, half.prove(begun.message), "pi-1")
    return half.open(proof, sealed).text


def test_the_words_of_codes_differ_and_are_easy_to_type() -> None:
    known = words()
    assert len(known) == len(set(known)) >= 200
    assert all(word.isascii() and word.isalpha() and word.islower() and 4 <= len(word) <= 8 for word in known)


def test_a_code_is_read_as_people_type_it() -> None:
    assert read_code("7-lantern-orbit") == read_code(" 7 Lantern  ORBIT ") == (7, "7-lantern-orbit")
    with pytest.raises(SecurityError, match=r"no code has the word 'lantem'; did you mean 'lantern'\?"):
        read_code("7-lantem-orbit")
    for text in ("", "lantern-orbit", "7-lantern", "123-lantern-orbit", "7-lantern-orbit-orbit"):
        with pytest.raises(SecurityError, match="is not a code such as 7-lantern-orbit"):
            read_code(text)


def test_a_code_gives_the_token_once() -> None:
    offer = CodeOffer(CERTIFICATE, lambda name: TOKEN)
    code = offer.code()
    assert code is not None
    assert exchange(offer, code) == TOKEN.text
    assert offer.code() not in (None, code)
    with pytest.raises(ValueError, match="this is not the code that is shown"):
        exchange(offer, code)


def test_a_code_is_valid_for_five_minutes() -> None:
    now = [0.0]
    offer = CodeOffer(CERTIFICATE, lambda name: TOKEN, lambda: now[0])
    code = offer.code()
    assert code is not None
    half = DeviceHalf(code, CERTIFICATE)
    begun = offer.begin(half.message)
    now[0] = CODE_SECONDS - 1
    assert offer.code() == code
    now[0] = CODE_SECONDS
    with pytest.raises(ValueError, match="this code is not valid any more"):
        offer.finish(begun, half.prove(begun.message), "pi-1")
    assert offer.code() != code


def test_three_wrong_codes_end_the_offer() -> None:
    offer = CodeOffer(CERTIFICATE, lambda name: TOKEN)
    code = offer.code()
    assert code is not None
    for left in reversed(range(MOST_WRONG)):
        with pytest.raises(
            ValueError, match=f"{left} more can be tried" if left else "no code is offered here any more"
        ):
            exchange(offer, other_code(code))
    assert offer.code() is None
    with pytest.raises(ValueError, match="no code is offered here any more"):
        exchange(offer, code)


def test_exchanges_that_stop_in_the_middle_are_bounded() -> None:
    offer, message = CodeOffer(CERTIFICATE, lambda name: TOKEN), DeviceHalf("7-lantern-orbit", CERTIFICATE).message
    for _ in range(30):
        offer.begin(message)
    with pytest.raises(ValueError, match="no code is offered here any more"):
        offer.begin(message)


def test_who_stands_in_between_gets_nothing_from_either_side() -> None:
    """It shows a certificate of its own to the device, and passes on what both say."""
    offer = CodeOffer(CERTIFICATE, lambda name: TOKEN)
    code = offer.code()
    assert code is not None
    with pytest.raises(ValueError, match="this is not the code that is shown"):
        exchange(offer, code, certificate(make_token()))
    half = DeviceHalf(code, CERTIFICATE)  # a service that does not have the code is found out by the device
    impostor = CodeOffer(CERTIFICATE, lambda name: TOKEN)
    impostor.code()
    begun = impostor.begin(half.message)
    half.prove(begun.message)
    with pytest.raises(WrongCode):
        half.open(begun.proof, b"x" * 64)


@pytest.mark.parametrize("message", [b"", b"x", b"A" + bytes(32), b"B" + bytes(32), b"A" + b"\xff" * 32])
def test_messages_that_are_none_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="this message does not begin a pairing"):
        CodeOffer(CERTIFICATE, lambda name: TOKEN).begin(message)
    with pytest.raises(WrongCode):
        DeviceHalf("7-lantern-orbit", CERTIFICATE).prove(message)


@contextmanager
def serving(pairing: Pairing | None) -> Iterator[int]:
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()
    service = Service(listener, server_context(TOKEN), strangers=pairing)
    thread = threading.Thread(target=service.run, args=(over.is_set,))
    thread.start()
    try:
        yield service.port
    finally:
        over.set()
        thread.join()


def test_a_device_without_a_token_pairs_and_can_do_nothing_else(home: Path) -> None:
    pairing = Pairing(TOKEN)
    code = pairing.offer.code()
    assert code is not None
    with serving(pairing) as port:
        with closing(Client(("127.0.0.1", port), any_context())) as stranger:
            proof = fields_of(Proof("00", ""), "prove")
            for request in ({"do": "status"}, {"do": "ask", "id": 1}, proof, {"do": "job"}):
                with pytest.raises(ServiceRefuses, match="a device without a token can only pair"):
                    stranger.ask(request)
            with pytest.raises(ServiceRefuses, match="does not begin a pairing"):
                stranger.ask(fields_of(PairMessage("00"), "pair"))
        with pytest.raises(SecurityError, match="this is not the code that is shown; 2 more can be tried"):
            pair("127.0.0.1", port, other_code(code))
        found = find_and_pair(code, f"127.0.0.1:{port}", None, lambda: False)
        assert found is not None
        assert (found[0].id, found[0].is_own, found[1].hosts, found[1].port) == (TOKEN.id, True, ("127.0.0.1",), port)
        with closing(Client(("127.0.0.1", port), client_context(found[0]))) as paired:  # as all who have a token
            paired.ask(fields_of(Nothing(), "status"))


def test_without_an_offer_nobody_gets_in_without_the_token() -> None:
    pairing = Pairing(TOKEN)
    code = pairing.offer.code()
    assert code is not None
    pairing.offer.open = False
    for strangers in (pairing, None):
        with (
            serving(strangers) as port,
            pytest.raises(RendezvousError, match="offers no code"),
        ):
            pair("127.0.0.1", port, code)


def test_a_certificate_of_another_token_is_refused_also_while_a_code_is_offered() -> None:
    pairing = Pairing(TOKEN)
    with serving(pairing) as port, pytest.raises(ServiceError):
        Client(("127.0.0.1", port), client_context(make_token()))


def test_a_stranger_that_says_nothing_more_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizonml.rendezvous.server._HELLO_SECONDS", 0.5)
    with serving(Pairing(TOKEN)) as port, closing(Client(("127.0.0.1", port), any_context())) as stranger:
        assert isinstance(stranger._socket, ssl.SSLSocket)
        stranger._socket.settimeout(10.0)
        begin = time.monotonic()
        assert stranger._socket.recv(1) == b""
        assert time.monotonic() - begin < 8.0


def test_the_token_of_one_device_is_revoked_and_the_others_notice_nothing(home: Path) -> None:
    known = PairedDevices(TOKEN)
    first, second = known.issue("pi-1"), parse_token(known.issue("pi-2").text)
    assert [(one.name, one.revoked) for one in known.all()] == [("pi-1", False), ("pi-2", False)]
    with serving(None) as port:
        connected = [Client(("127.0.0.1", port), client_context(token)) for token in (first, second)]
        known.revoke("pi-1")
        wait_for(lambda: is_dropped(connected[0]), "the end of its connection")
        assert not is_dropped(connected[1])
        with pytest.raises(ServiceError):
            Client(("127.0.0.1", port), client_context(first))
        with closing(Client(("127.0.0.1", port), client_context(second))):
            pass
        for one in connected:
            one.close()
    assert [(one.name, one.revoked) for one in known.all()] == [("pi-1", True), ("pi-2", False)]
    assert known.issue("pi-1").id == TOKEN.id  # paired once more
    known.revoke("pi-2")
    assert len([one for one in known.all() if one.revoked]) == 2
    with pytest.raises(SecurityError, match=r"no device that has a token of its own is called 'pi-3'.*did you mean"):
        known.revoke("pi-3")
    (home / "devices.json").unlink()  # what was revoked stays so, and the next list is newer
    known.issue("pi-4")
    known.revoke("pi-4")
    number, revoked = read_revoked(TOKEN, (home / "revoked.pem").read_bytes())
    assert (number, len(revoked)) == (3, 3)


def test_others_learn_what_is_revoked_from_the_service_and_shut_it_out_themselves(home: Path) -> None:
    known = PairedDevices(TOKEN)
    first, second = known.issue("pi-1"), known.issue("pi-2")
    known.revoke("pi-1")
    elsewhere = home / "elsewhere" / "revoked.pem"
    elsewhere.parent.mkdir()
    with serving(None) as port, closing(Client(("127.0.0.1", port), client_context(second))):
        pass
    assert elsewhere.read_bytes() == (home / "revoked.pem").read_bytes()
    listener = socket.create_server(("127.0.0.1", 0))  # of the device that has learned it
    with closing(listener), ThreadPoolExecutor(1) as pool:
        context = server_context(second)
        client.REVOKED.refresh()
        arrived = pool.submit(lambda: context.wrap_socket(listener.accept()[0], server_side=True))
        with pytest.raises(ServiceError):
            Client(listener.getsockname()[:2], client_context(first))
        assert isinstance(arrived.exception(10), ssl.SSLError)


def test_nobody_but_the_device_with_the_shared_token_can_revoke(home: Path) -> None:
    known = PairedDevices(TOKEN)
    own, other = known.issue("pi-1"), make_token()
    with pytest.raises(SecurityError, match="this device was paired itself"):
        PairedDevices(own)
    serial = int(known.all()[0].id, 16)
    client.REVOKED.learn(sign_revoked(other, [serial], 99).decode())  # of another shared token
    client.REVOKED.learn("no list")
    client.REVOKED.learn(None)
    assert serial not in client.REVOKED
    client.REVOKED.learn(sign_revoked(TOKEN, [serial], 2).decode())
    client.REVOKED.learn(sign_revoked(TOKEN, [], 1).decode())  # an earlier one
    assert serial in client.REVOKED


def test_the_commands_list_and_revoke_what_was_paired(home: Path) -> None:
    assert "no device was paired with this one" in command(home, "devices").stdout
    PairedDevices(TOKEN).issue("pi-1\x1b[2J")
    listed = command(home, "devices").stdout
    assert "\x1b" not in listed
    assert listed.split()[-1] == "valid"
    (one,) = PairedDevices(TOKEN).all()
    assert f"({one.id}) is revoked" in command(home, "devices", "--revoke", one.id).stdout
    assert command(home, "devices").stdout.split()[-1] == "revoked"
    save_token(PairedDevices(TOKEN).issue("pi-2"), home / "token")
    refused = command(home, "devices")
    assert (refused.returncode, "this device was paired itself" in refused.stderr) == (2, True)
    assert "this device's own token" in command(home, "token").stdout
