"""Tokens, and the connections that they protect."""

from __future__ import annotations

import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from horizonml.cli.app import app
from horizonml.errors import SecurityError
from horizonml.kube import render
from horizonml.security.tls import client_context, server_context
from horizonml.security.token import TOKEN, TOKEN_FILE, find_token, make_token, parse_token, save_token


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[bytes | ssl.SSLError, str | ssl.SSLError]:
    """What the client reads after a handshake over a pair of sockets, and the version that the server sees."""
    ours, theirs = socket.socketpair()
    seen: list[str | ssl.SSLError] = []

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as connection:
                connection.sendall(b"welcome")
                seen.append(connection.version() or "")
        except ssl.SSLError as error:
            seen.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs) as connection:
            got: bytes | ssl.SSLError = connection.recv(7)
    except ssl.SSLError as error:
        got = error
    thread.join(10)
    return got, seen[0]


def test_whoever_has_the_token_is_let_in_by_tls_1_3() -> None:
    token = make_token()
    assert shake(server_context(token), client_context(parse_token(token.text))) == (b"welcome", "TLSv1.3")
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server_context(token).wrap_socket, ours, server_side=True)
        with client_context(token).wrap_socket(theirs) as client, serving.result(10) as server:
            assert client.selected_alpn_protocol() == server.selected_alpn_protocol() == "horizonml/1"


def test_another_token_is_refused_by_both_sides() -> None:
    client, server = shake(server_context(make_token()), client_context(make_token()))
    assert isinstance(client, ssl.SSLError)
    assert isinstance(server, ssl.SSLError)
    assert "certificate verify failed" in str(client)


def test_a_token_is_shown_by_nothing_but_its_text() -> None:
    token = make_token()
    assert token.text[4:] not in f"{token!r} {token} {token.id}"
    assert len(token.id) == 8


def test_what_is_no_token_is_refused_without_being_shown() -> None:
    text = make_token().text
    for wrong, words in (
        ("secret", "does not begin with hml-"),
        (text[:-1], "has 39 characters"),
        (text[:10] + ("a" if text[10] != "a" else "b") + text[11:], "mistyped"),
        (text[:20] + "1" + text[21:], "mistyped"),  # base32 has no 1
        (text.upper().replace("HML", "hml"), "mistyped"),
    ):
        with pytest.raises(SecurityError, match=words) as caught:
            parse_token(wrong)
        assert wrong not in str(caught.value)


def test_the_environment_comes_before_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved, given = make_token(), make_token()
    file = save_token(saved)
    assert file.stat().st_mode & 0o777 == 0o600
    assert find_token() == saved
    monkeypatch.setenv(TOKEN, f" {given.text}\n")
    assert find_token() == given


def test_a_file_that_is_not_there_or_that_others_may_read_is_refused() -> None:
    with pytest.raises(SecurityError, match="no such file"):
        find_token()
    file = save_token(make_token())
    for mode in (0o644, 0o640, 0o604):
        file.chmod(mode)
        with pytest.raises(SecurityError, match="others may read"):
            find_token()


def test_the_command_makes_shows_and_rotates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(TOKEN_FILE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    run = CliRunner()
    assert "no token yet" in str(run.invoke(app, ["token", "--show"]).exception)
    said = run.invoke(app, ["token"]).output
    first = find_token()
    assert first is not None
    assert first.id in said
    assert first.text not in said
    assert run.invoke(app, ["token", "--show"]).output == f"{first.text}\n"
    secret = run.invoke(app, ["token", "--secret", "digits"]).output  # a job in a cluster has a token of its own
    document = yaml.safe_load(secret)
    own = parse_token(document["stringData"]["token"])
    assert document == render.secret("digits-token", own)
    assert own != first
    said = run.invoke(app, ["token", "--rotate"]).output
    second = find_token()
    assert second is not None
    assert second != first
    assert second.text not in said
