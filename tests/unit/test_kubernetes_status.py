"""Progress in Kubernetes, against a local server that checks what it is sent, and misbehaves."""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from horizonml.telemetry import kubernetes
from horizonml.telemetry.kubernetes import Publisher, Release
from horizonml.telemetry.record import EndRecord, EvaluationRecord, RecoveryRecord, StateSource
from horizonml.telemetry.run_info import MemberFacts
from tests.commands import command
from tests.unit.test_metrics import INFO, record

Misbehaviour = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Server:
    """What a server was asked, and how it answers: well, unless `wrong` says otherwise."""

    port: int = 0
    asked: list[tuple[str, str, str, dict[str, Any]]] = field(default_factory=list)  # method, path, content, body
    tokens: list[str] = field(default_factory=list)
    wrong: Misbehaviour | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def annotations(self) -> list[dict[str, str]]:
        return [body["metadata"]["annotations"] for method, _, _, body in self.asked if method == "PATCH"]

    def events(self) -> list[tuple[str, str]]:
        return [(body["reason"], body["message"]) for _, path, _, body in self.asked if path.endswith("/events")]


def certificate(folder: Path) -> Path:
    key, name = Ed25519PrivateKey.generate(), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    built = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day).add_extension(
        x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    folder.mkdir(exist_ok=True)
    (folder / "pair.pem").write_bytes(private + built.sign(key, None).public_bytes(serialization.Encoding.PEM))
    (folder / "ca.crt").write_bytes(built.sign(key, None).public_bytes(serialization.Encoding.PEM))
    return folder


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server whose certificate is in `folder`."""
    found = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found.asked.append((self.command, self.path, str(self.headers["Content-Type"]), body))
            found.tokens.append(str(self.headers["Authorization"]))
            if found.wrong is not None:
                found.wrong(self)
                return
            about = {"name": "j-worker", "namespace": "team", "uid": "u1"}
            answer(self, 200, {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": about})

        do_PATCH = do_GET = do_POST

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(folder) / "pair.pem")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads, server.block_on_close = True, False
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    found.port = server.server_port
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield found
    finally:
        found.over.set()
        server.shutdown()
        server.server_close()


def answer(handler: BaseHTTPRequestHandler, code: int, body: object, **headers: str) -> None:
    text = json.dumps(body).encode()
    handler.send_response(code)
    for name, value in {"Content-Length": str(len(text)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(text)


def reset(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(handler.connection.detach())


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Kubernetes mounts into a pod; and short times."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "namespace").write_text("team")
    (folder / "token").write_text("secret-1\n")
    monkeypatch.setattr(kubernetes, "ACCOUNT", folder)
    monkeypatch.setattr(kubernetes, "_EVERY_SECONDS", 0.1)
    return folder


@pytest.fixture
def api(account: Path) -> Iterator[Server]:
    with serving(account) as found:
        yield found


def of_object(api: Server) -> dict[str, str]:
    return {
        "HORIZONML_KUBE_OBJECT": "apps/v1/statefulsets/j-worker",
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(api.port),
    }


def run(generation: int, *ranks: int, step: int = 0) -> Any:
    members = [MemberFacts(place, rank) for place, rank in enumerate(ranks)]
    return replace(INFO, rank=0, generation=generation, members=members, resumed_at=step, total_steps=40)


def wait_for(true: Callable[[], object]) -> None:
    until = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_jobs_object_shows_how_far_it_is(api: Server, account: Path) -> None:
    publisher = Publisher(of_object(api))
    publisher.put(run(1, 0, 1, 2))
    wait_for(api.events)
    (account / "token").write_text("secret-2\n")  # Kubernetes replaces it every hour
    publisher.put(record(15))
    publisher.put(EvaluationRecord(15, 1, loss=0.5, metrics={"accuracy": 0.75}))
    wait_for(lambda: len(api.annotations()) > 1)
    publisher.trouble("rank 2 is lost", ends=False)
    publisher.put(EndRecord(outcome="failed"))
    publisher.put(run(2, 0, 1, 4, step=15))
    publisher.put(RecoveryRecord(1.0, 2, [2], 4.25, 1, StateSource.DISK))
    publisher.put(record(40))
    publisher.put(EndRecord(outcome="complete"))
    publisher.close()

    method, path, content, _ = api.asked[0]
    where = "/apis/apps/v1/namespaces/team/statefulsets/j-worker/status?fieldManager=horizonml-worker"
    assert (method, path, content) == ("PATCH", where, "application/merge-patch+json")
    _, path, content, event = api.asked[1]
    assert (path, content) == ("/api/v1/namespaces/team/events", "application/json")
    about = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "j-worker", "namespace": "team", "uid": "u1"}
    assert (event["involvedObject"], event["type"]) == (about, "Normal")
    assert {"Bearer secret-1", "Bearer secret-2"} == set(api.tokens)
    begun, middle, ended = api.annotations()[0], api.annotations()[1], api.annotations()[-1]
    assert begun["horizonml/progress"] == "0%"
    assert middle["horizonml/progress"].startswith("37%, 0:00:")
    shown = " left, loss 2.0000, accuracy 25.00%, held-out loss 0.5000, accuracy 75.00%"
    assert middle["horizonml/progress"].endswith(shown)
    status = json.loads(ended["horizonml/trainer-status"])
    metrics = {one["name"]: one["value"] for one in status["metrics"]}
    assert metrics == {
        "step": "40",
        "loss": "2",
        "accuracy": "0.25",
        "held_out_loss": "0.5",
        "held_out_accuracy": "0.75",
    }
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 0)
    datetime.datetime.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")
    assert ended["horizonml/progress"].startswith("100%, complete, loss 2.0000")
    assert api.events()[:-1] == [
        ("Started", "training begins: 40 steps, 3 ranks"),
        ("RankLost", "rank 2 is lost"),
        ("GroupChanged", "rank 4 joined; rank 2 left; training goes on from step 15 of 40 with 3 ranks"),
        ("Recovered", "rank 2 was lost, and training went on after 4.2 s, from disk; 1 step repeated"),
    ]
    assert api.events()[-1][0] == "Complete"


def test_a_trainjob_is_sent_its_status(api: Server, account: Path) -> None:
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/j/status"
    env = {
        "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{api.port}{path}",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(account / "ca.crt"),
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(account / "token"),
        "HORIZONML_KUBE_OBJECT": "apps/v1/statefulsets/j-worker",
    }
    publisher = Publisher(env)
    publisher.put(run(1, 0, step=39))
    publisher.put(record(40))
    publisher.put(EndRecord(outcome="complete"))
    publisher.close()
    assert {(method, path, kind) for method, path, kind, _ in api.asked} == {("POST", path, "application/json")}
    assert api.asked[-1][3]["trainerStatus"]["progressPercentage"] == 100
    assert {"name": "accuracy", "value": "0.25"} in api.asked[-1][3]["trainerStatus"]["metrics"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda handler: answer(handler, 500, {"message": "etcd is away"}), "500 etcd is away"),
        (lambda handler: answer(handler, 403, ["no"]), "403 Forbidden"),
        (lambda handler: answer(handler, 307, {}, Location="/elsewhere"), "307 Temporary Redirect"),
        (lambda handler: answer(handler, 200, []), "list indices"),
        (lambda handler: handler.wfile.write(b"HTTP/9 what\r\n\r\n"), "HTTP/9"),
        (reset, "(?i)closed connection|reset by peer"),
        (lambda handler: time.sleep(1.0), "timed out"),
    ],
)
def test_a_server_that_misbehaves_is_a_warning_and_is_asked_again(
    wrong: Misbehaviour, words: str, api: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_REQUEST_SECONDS", 0.3)
    api.wrong = wrong
    publisher = Publisher(of_object(api))
    publisher.put(run(1, 0))
    wait_for(lambda: len(api.asked) > 1 and caplog.messages)
    assert len(api.asked) == 2  # after a second
    assert len(caplog.messages) == 1, caplog.messages
    assert re.search(words, caplog.messages[0])
    api.wrong = None
    started = time.monotonic()
    publisher.put(record(7))
    assert time.monotonic() - started < 0.1
    publisher.put(EndRecord(outcome="complete"))
    publisher.close()
    assert api.annotations()[-1]["horizonml/progress"].startswith("100%, complete")
    assert not any(path == "/elsewhere" for _, path, _, _ in api.asked)


def drip(handler: BaseHTTPRequestHandler) -> None:
    """Answer a byte at a time, each of which comes in time."""
    for _ in range(100):
        handler.wfile.write(b"H")
        time.sleep(0.1)


@pytest.mark.parametrize("wrong", [drip, None])
def test_a_server_that_hangs_does_not_hold_up_the_end(
    wrong: Misbehaviour | None, api: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end waits for its last state some seconds; while the process stays, that is tried again."""
    monkeypatch.setattr(kubernetes, "_REQUEST_SECONDS", 0.5)
    monkeypatch.setattr(kubernetes, "_CLOSE_SECONDS", 1.0)
    api.wrong = wrong or (lambda _: (api.over.wait(30), None)[1])
    publisher = Publisher(of_object(api))
    started = time.monotonic()
    for one in (run(1, 0, step=2), *map(record, range(3, 41)), EndRecord(outcome="complete")):
        publisher.put(one)
    assert time.monotonic() - started < 0.2
    publisher.close()
    assert time.monotonic() - started < 2.5
    assert "the end of the run is not written within 1 s" in caplog.messages[-1]
    api.wrong = None
    wait_for(lambda: api.events() and api.events()[-1][0] == "Complete")
    assert api.annotations()[-1]["horizonml/progress"].startswith("100%, complete")


def test_only_the_lead_writes_the_end(api: Server) -> None:
    """A rank that led an earlier group, and one that never led, end without a word."""
    first, second = Publisher(of_object(api)), Publisher(of_object(api))
    first.put(run(1, 0, 1))
    first.put(record(3))
    wait_for(lambda: api.annotations() and "loss" in api.annotations()[-1]["horizonml/progress"])
    first.put(record(4))
    first.put(EndRecord(outcome="re-form"))
    count = len(api.asked)
    first.close()
    second.close()
    assert len(api.asked) - count <= 1  # the newest step may have been under way
    assert [reason for reason, _ in api.events()] == ["Started"]


@pytest.mark.parametrize(("outcome", "words"), [("stopped", "7%, stopped, loss"), ("", "7%, failed: no disk, loss")])
def test_other_ends_are_shown_too(outcome: str, words: str, api: Server) -> None:
    publisher = Publisher(of_object(api))
    publisher.put(run(3, 0, step=1))
    publisher.put(record(3))
    publisher.put(EndRecord(outcome=outcome))
    if not outcome:
        publisher.trouble("no disk", ends=True)
    publisher.close()
    assert api.annotations()[-1]["horizonml/progress"].startswith(words)
    assert [reason for reason, _ in api.events()] == ["Resumed", "Failed" if not outcome else "Stopped"]


def test_a_server_with_another_certificate_does_not_get_the_token(
    api: Server, account: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = (account / "ca.crt").read_bytes()
    (account / "ca.crt").write_bytes((certificate(tmp_path / "other") / "ca.crt").read_bytes())
    publisher = Publisher(of_object(api))
    publisher.put(run(1, 0))
    wait_for(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)
    assert api.tokens == []
    (account / "ca.crt").write_bytes(right)
    publisher.close()
    assert api.events()


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HORIZONML_KUBE_OBJECT": "statefulset/x"}, "'statefulset/x', and not like apps/v1/statefulsets/NAME"),
        ({"HORIZONML_KUBE_OBJECT": "apps/v1/statefulsets/../x"}, "and not like"),
        ({"HORIZONML_KUBE_OBJECT": "apps/v1/statefulsets/x"}, "is not the https:// address of a server"),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "http://trainer/status"}, "http://trainer/status is not the https://"),
        ({}, ""),
    ],
)
@pytest.mark.usefixtures("account")
def test_mistakes_in_the_environment_are_a_warning(
    env: dict[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        publisher = Publisher(env)
    publisher.put(run(1, 0))
    publisher.close()
    assert len(caplog.messages) == bool(words)
    assert words in caplog.text


@pytest.mark.parametrize(
    ("extra", "hangs", "reasons", "words"),
    [
        ([], False, ["Started", "Complete"], "100%, complete"),
        (["optimizer.lr=1e30"], False, ["Started", "Failed"], "failed: step 1: the loss is nan"),
        ([], True, ["Started", "Complete"], "100%, complete"),
    ],
)
def test_a_run_is_shown_and_never_held_up(
    extra: list[str],
    hangs: bool,
    reasons: list[str],
    words: str,
    api: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kubernetes, "_CLOSE_SECONDS", 2.0)
    if hangs:
        api.wrong = lambda _: (api.over.wait(60), None)[1]
    options = [word for one in ("epochs=1", *extra) for word in ("--set", one)]
    done = command(tmp_path, "train", "digits", *options, RANK="0", WORLD_SIZE="1", **of_object(api))
    assert done.returncode == (1 if extra else 0), done.stderr
    assert ("the end of the run is not written within 2 s" in done.stderr) == hangs
    if hangs:
        assert not api.events()
        api.wrong = None
        wait_for(lambda: len(api.events()) == len(reasons))
    assert [reason for reason, _ in api.events()] == reasons
    assert words in api.annotations()[-1]["horizonml/progress"]
    if extra:
        assert api.events()[-1][1] in done.stderr


def test_the_first_pod_of_a_class_gives_its_pods_back_once_when_it_is_time(
    api: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_MOST_SECONDS", 0.0)
    env = {**of_object(api), kubernetes.TTL: "0", "HOSTNAME": "j-pi-0"}
    others = ({"HOSTNAME": "j-pi-1"}, *({kubernetes.TTL: text} for text in ("3600", "", "soon", "nan", "-1")))
    for other in others:
        Release({**env, **other}).look()
    assert not api.asked
    release = Release(env)
    api.wrong = lambda handler: answer(handler, 403, {"message": "no"})
    release.look()
    api.wrong = None
    for _ in range(3):
        release.look()
    path = "/apis/apps/v1/namespaces/team/statefulsets/j-pi/scale"
    asked = ("PATCH", path, "application/merge-patch+json", {"spec": {"replicas": 0}})
    assert api.asked == [asked, asked]  # refused, and granted
