"""The web server that metrics and pages share: answers that take long, and what clients can take of it."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from horizonml.telemetry.http import Later, Limits, Reply, Request, WebServer, parse
from tests.web import get


@contextmanager
def serving(handler: Callable[[Request], Reply | Later], limits: Limits) -> Iterator[int]:
    server = WebServer("test", ("127.0.0.1", 0), handler, limits)
    try:
        yield server.port
    finally:
        server.close()


def in_background(port: int, path: str, answers: list[tuple[int, str]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(get(port, path)))
    thread.start()
    return thread


def test_an_answer_that_takes_long_holds_up_nobody_and_few_may_wait_for_one() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Reply:
        begun.set()
        assert go_on.wait(10), "nobody let the answer be made"
        return Reply.text(200, "made\n")

    def handler(request: Request) -> Reply | Later:
        return Later(slow, 10.0) if request.path == "/slow" else Reply.text(200, "at once\n")

    with serving(handler, Limits(seconds=2.0, later=1)) as port:
        answers: list[tuple[int, str]] = []
        waiting = in_background(port, "/slow", answers)
        assert begun.wait(5), "the slow answer was not begun"
        assert get(port, "/") == (200, "at once\n")
        assert get(port, "/slow")[0] == 503
        go_on.set()
        waiting.join(5)
        assert answers == [(200, "made\n")]
        assert get(port, "/slow") == (200, "made\n")


def test_a_bug_in_a_handler_ends_neither_the_server_nor_its_slow_thread(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Reply:
        raise ValueError("a bug")

    def handler(request: Request) -> Reply | Later:
        return Later(broken, 5.0) if request.path == "/slow" else broken()

    with serving(handler, Limits()) as port:
        for path in ("/slow", "/", "/slow", "/"):
            assert get(port, path) == (500, f"{path} could not be made; see the log\n")
    assert caplog.text.count("ValueError: a bug") == 4


def test_clients_that_leave_before_their_answer_is_made_cost_nothing() -> None:
    made: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> Reply:
        made.append("")
        begun.set()
        assert go_on.wait(10)
        return Reply.text(200, "made\n")

    def handler(request: Request) -> Reply | Later:
        return Later(slow, 10.0) if request.path == "/slow" else Reply.text(200, "at once\n")

    with serving(handler, Limits()) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as first:
            first.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
            assert begun.wait(5)
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port), timeout=5) as other:
                    other.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        for _ in range(2):  # once these have been answered, the server has seen that the others left
            assert get(port, "/") == (200, "at once\n")
        answers: list[tuple[int, str]] = []
        waiting = in_background(port, "/slow", answers)
        go_on.set()
        waiting.join(5)
        assert answers == [(200, "made\n")]
    assert len(made) == 2, "answers were made for clients that had left"


def test_requests_that_are_refused() -> None:
    for request, status in (
        (b"GET / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 413),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET / SPDY/1\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"GET /?" + b"&".join(b"a=1" for _ in range(100)) + b" HTTP/1.1\r\n\r\n", 400),
    ):
        found = parse(request, "127.0.0.1")
        assert isinstance(found, Reply)
        assert found.status == status


def test_a_request_is_read_with_its_query_and_headers() -> None:
    found = parse(b"GET /a%20b?x=1%3B2&y= HTTP/1.1\r\nHost: here\r\nX: 1\r\n\r\n", "::1")
    assert isinstance(found, Request)
    assert (found.method, found.path, found.peer) == ("GET", "/a b", "::1")
    assert found.query == {"x": "1;2", "y": ""}
    assert found.headers == {"host": "here", "x": "1"}


def test_a_header_cannot_begin_another_one() -> None:
    with pytest.raises(AssertionError):
        Reply(200, b"", headers={"X": "1\r\nSet-Cookie: a"}).encode()


def test_a_server_that_is_closed_while_clients_connect_leaves_no_connection(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(60):
        server, over = WebServer("page", ("127.0.0.1", 0), lambda request: Reply.text(200, "yes")), threading.Event()

        def connect(port: int = server.port, over: threading.Event = over) -> None:
            while not over.is_set():
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    over.wait(0.001)

        clients = [threading.Thread(target=connect) for _ in range(2)]
        for client in clients:
            client.start()
        server.close()
        over.set()
        for client in clients:
            client.join()
    gc.collect()  # what is not closed is an error of the test
    assert not caplog.records
