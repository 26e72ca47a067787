"""The page of a run: what it shows of records, who may ask for it, and what browsers are told."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from horizonml.errors import HorizonError, JobError
from horizonml.plan.plan import Plan, Stage
from horizonml.report.live_facts import Series
from horizonml.report.page.describe import ACTIVATIONS, GRADIENTS, flows
from horizonml.report.page.runs import RunsServer
from horizonml.report.page.server import PageAccess, PageServer, encode, static_files
from horizonml.security.token import make_token
from horizonml.telemetry.http import parse
from tests.commands import command
from tests.distributed.processes import wait_for
from tests.runs import append, write_run

SECRET = make_token()
TOKEN = SECRET.text


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, dict[str, str]]:
    """Return the status, the content, read as JSON if it is, and the headers of an answer."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method, headers=names)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            status, content, found = response.status, response.read(), dict(response.headers)
    except urllib.error.HTTPError as error:
        status, content, found = error.code, error.read(), dict(error.headers)
    return status, json.loads(content) if "json" in found["Content-Type"] else content.decode(), found


Serve = Callable[..., int]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serve the page of the folder `tmp_path`; returns its port once the records have been read."""
    servers: list[PageServer] = []

    def begin(**options: Any) -> int:
        server = PageServer(tmp_path, ("127.0.0.1", 0), **options)
        servers.append(server)
        wait_for(lambda: ask(server.port, "/api/run")[1]["state"] != "reading", "the records are read", 10)
        return server.port

    yield begin
    for server in servers:
        server.close()


def test_the_api_tells_how_a_recorded_run_stands(tmp_path: Path, serve: Serve) -> None:
    write_run(tmp_path, strategy="pipeline", ranks=3, wall=0.2, steps=6)
    for rank in range(3):
        append(tmp_path / f"rank-{rank}.jsonl", {"kind": "end", "time": 200.0, "outcome": "complete"})
    port = serve()
    status, run, _ = ask(port, "/api/run")
    assert (status, run["state"], run["step"], run["accuracy"]) == (200, "finished", 6, 0.9)
    assert [rank["stages"] for rank in run["ranks"]] == [[0], [1], [2]]
    assert run["ranks"][1]["split"] == pytest.approx({"compute": 0.7, "transfer": 0.1, "wait": 0.2})
    _, history, _ = ask(port, "/api/history")
    assert [point[:2] for point in history["steps"]] == [[n, pytest.approx(2 / n, rel=1e-5)] for n in range(1, 7)]
    assert history["ranks"]["2"][0] == pytest.approx([1, 0.12, 0.02, 0.06])
    assert [one["step"] for one in history["evaluations"]] == [3, 6]
    _, timeline, _ = ask(port, "/api/timeline")
    assert (timeline["step"], timeline["is_simulated"], timeline["seconds"]) == (6, False, pytest.approx(0.2))
    assert timeline["ranks"][0]["spans"][0][:3] == ["compute", "forward", 0]
    assert ask(port, "/api/timeline?known=6")[1] == {"step": 6}
    assert ask(port, "/api/timeline?known=5")[1] == timeline
    assert [event["kind"] for event in ask(port, "/api/events")[1]] == ["formed", "ended"]


def test_the_history_since_a_step_is_all_of_it_once_steps_were_done_again(tmp_path: Path, serve: Serve) -> None:
    write_run(tmp_path, ranks=1, steps=6)
    port = serve()
    revision = ask(port, "/api/history")[1]["revision"]
    news = ask(port, f"/api/history?since=5&revision={revision}")[1]
    assert [point[0] for point in news["steps"]] == [5, 6]
    assert [one["step"] for one in news["evaluations"]] == [6]
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    again = next(line for line in lines if line.get("step") == 5)
    evaluation = next(line for line in lines if line["kind"] == "evaluation" and line["step"] == 6)
    append(tmp_path / "rank-0.jsonl", again | {"loss": 77.0}, evaluation | {"loss": 55.0})
    since = f"/api/history?since=6&revision={revision}"
    wait_for(lambda: ask(port, since)[1]["revision"] != revision, "the repeated step is read", 10)
    news = ask(port, since)[1]
    assert [point[:2] for point in news["steps"]][-2:] == [[4, 0.5], [5, 77.0]]
    assert [(one["step"], one["loss"]) for one in news["evaluations"]] == [(3, 0.3), (6, 55.0)]


def test_a_folder_without_records_and_damaged_records_are_told(tmp_path: Path, serve: Serve) -> None:
    port = serve()
    assert ask(port, "/api/run")[1]["state"] == "waiting"
    assert ask(port, "/api/timeline")[1] is None
    write_run(tmp_path, ranks=2)
    append(tmp_path / "rank-1.jsonl", "\x00rubbish\n", '{"kind": "step", "step": "x"}\n', "[1]\n")
    (tmp_path / "planning.json").write_text("{")
    wait_for(lambda: ask(port, "/api/run")[1]["damaged"] == 3, "the damaged lines are counted", 10)
    run = ask(port, "/api/run")[1]
    assert len(run["ranks"]) == 2
    assert "planning.json is damaged" in run["problem"]
    status, answer, _ = ask(port, "/api/what-if?remove=1", X_HorizonML="1")
    assert status == 409
    assert "planning.json is damaged" in answer["error"]
    wrong = ask(port, "/api/what-if?rates=all", X_HorizonML="1")[1]
    assert wrong["error"] == "rates: 'all' is not LINK:RATE, such as 0-1:100Mbit"


def test_every_answer_tells_browsers_to_load_nothing_from_elsewhere(tmp_path: Path, serve: Serve) -> None:
    port = serve()
    for path in ("/", "/app.js", "/style.css", "/api/run", "/nothing", "/../pyproject.toml", "/%2e%2e/watcher.py"):
        status, _, headers = ask(port, path)
        assert status == (200 if path in ("/", "/app.js", "/style.css", "/api/run") else 404)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] in ("no-cache", "no-store")
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(port, "/", method)[0] == 405


def test_the_page_has_nothing_inline_and_no_address() -> None:
    for name, (content, kind) in static_files().items():
        text = content.decode()
        assert kind.split(";")[0] in ("text/html", "text/javascript", "text/css", "image/svg+xml"), name
        for forbidden in ("innerHTML", "insertAdjacent", "document.write", "eval(", "style=", "localStorage", "cookie"):
            assert forbidden not in text, f"{name}: {forbidden}"
        foreign = text.replace("http://www.w3.org/2000/svg", "")
        assert "://" not in foreign, f"{name} names an address"


def test_a_name_that_was_pointed_here_is_refused() -> None:
    for host, header, status in (
        ("127.0.0.1", "127.0.0.1:8400", None),
        ("127.0.0.1", "localhost:9000", None),
        ("127.0.0.1", "[::1]:8400", None),
        ("127.0.0.1", "attacker.example:8400", 421),
        ("127.0.0.1", "127.0.0.1.attacker.example", 421),
        ("127.0.0.1", "192.168.1.4:8400", 421),
        ("127.0.0.1", "", 421),
        ("0.0.0.0", "192.168.1.4:8400", None),
        ("0.0.0.0", "attacker.example", 421),
    ):
        request = parse(f"GET /api/run HTTP/1.1\r\nHost: {header}\r\n\r\n".encode(), "127.0.0.1")
        refused = PageAccess(host, None).refuse(request)  # type: ignore[arg-type]
        assert (refused.status if refused is not None else None) == status, (host, header)


def test_other_sites_may_not_ask(tmp_path: Path, serve: Serve) -> None:
    port = serve()
    assert ask(port, "/api/what-if", Sec_Fetch_Site="cross-site", X_HorizonML="1")[0] == 403
    assert ask(port, "/api/run", Sec_Fetch_Site="same-origin")[0] == 200
    assert ask(port, "/api/run", Sec_Fetch_Site="same-site")[0] == 403
    assert ask(port, "/api/what-if")[0] == 403  # as a browser asks for an address that is not trustworthy


def test_actions_need_the_token(tmp_path: Path, serve: Serve) -> None:
    done: list[str] = []

    def stop() -> str:
        done.append("stop")
        return "It stops."

    def fail() -> str:
        raise HorizonError("nothing trains")

    port = serve(token=SECRET, actions={"stop": stop, "fail": fail})
    assert ask(port, "/api/run")[1]["actions"] == ["fail", "stop"]
    wrong = make_token().text
    for given in (
        {},
        {"Authorization": f"Bearer {wrong}"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer "},
    ):
        status, answer, headers = ask(port, "/api/actions/stop", "POST", **given)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert TOKEN not in answer
    assert ask(port, f"/api/actions/stop?token={TOKEN}", "POST")[0] == 401
    assert ask(port, "/api/actions/stop", Authorization=f"Bearer {TOKEN}")[0] == 404, "GET must change nothing"
    assert done == []
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(port, "/api/actions/stop", "POST", **right)[:2] == (200, {"words": "It stops."})
    assert ask(port, "/api/actions/fail", "POST", **right)[:2] == (409, {"error": "nothing trains"})
    assert ask(port, "/api/actions/other", "POST", **right)[0] == 404
    assert done == ["stop"]


def test_without_a_token_or_from_another_machine_there_are_no_actions(tmp_path: Path, serve: Serve) -> None:
    port = serve(actions={"stop": lambda: "It stops."})
    assert ask(port, "/api/run")[1]["actions"] == []
    assert ask(port, "/api/actions/stop", "POST", Authorization="Bearer ")[0] == 403
    remote = parse(
        f"POST /api/actions/stop HTTP/1.1\r\nHost: 10.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode(),
        "10.0.0.2",
    )
    refused = PageAccess("0.0.0.0", TOKEN).refuse(remote)  # type: ignore[arg-type]
    assert refused is not None
    assert refused.status == 403


def test_a_page_for_others_on_the_network_must_be_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path, ranks=1)
    refused = command(tmp_path, "watch", ".", "--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == 2
    assert "everyone on that network could read the page" in refused.stderr
    assert "ssh -L" in refused.stderr
    assert "add --insecure" in refused.stderr


def test_the_page_of_all_runs_lists_them_compares_their_curves_and_leads_to_the_page_of_each(tmp_path: Path) -> None:
    for name, accuracy in (("one", 0.9), ("other", 0.8)):
        write_run(tmp_path / name, ranks=2, steps=6, accuracy=accuracy)
    (tmp_path / "no-run").mkdir()
    with RunsServer(tmp_path, ("127.0.0.1", 0)) as server:
        port = server.port
        listed = ask(port, "/api/runs")[1]["runs"]
        assert {run["name"]: (run["state"], run["step"], run["accuracy"], run["ranks"]) for run in listed} == {
            "one": ("lost", 6, 0.9, 2), "other": ("lost", 6, 0.8, 2),
        }  # fmt: skip
        curves = ask(port, "/api/curves?runs=one;other;no-run;..")[1]
        assert set(curves) == {"one", "other"}
        assert curves["other"]["held_out"] == [[3, 0.3, 0.8], [6, 0.3, 0.8]]
        assert [point[:2] for point in curves["one"]["training"]][:2] == [[1, 2.0], [2, 1.0]]
        assert "All runs" in ask(port, "/")[1]
        assert "Devices and links" in ask(port, "/run/one/")[1]
        assert ask(port, "/run/one/style.css")[0] == 200
        wait_for(lambda: ask(port, "/run/one/api/run")[1]["state"] == "lost", "the records are read", 10)
        for path in ("/run/none/", "/run/../", "/run/..%2f/", "/run//", "/other.html"):
            assert ask(port, path)[0] == 404, path
        assert ask(port, "/run/one/api/actions/stop", "POST")[0] == 403
        assert ask(port, "/run/one/api/run", Sec_Fetch_Site="cross-site")[0] == 403  # as without the run's name
        assert ask(port, "/run/one/api/what-if?add=like:0")[0] == 403


def test_watch_finds_the_newest_run_and_refuses_what_is_none(tmp_path: Path) -> None:
    from horizonml.cli.runs import find_run

    with pytest.raises(JobError, match="is not a folder"):
        find_run(tmp_path / "nothing")
    with pytest.raises(JobError, match="is not a run and contains none"):
        find_run(tmp_path)
    for age, name in enumerate(("new", "old")):
        write_run(tmp_path / name, ranks=1)
        os.utime(tmp_path / name / "rank-0.jsonl", (1000.0 - age, 1000.0 - age))
    assert find_run(tmp_path) == tmp_path / "new"
    assert find_run(tmp_path / "old") == tmp_path / "old"


def test_a_series_stays_short_and_keeps_means() -> None:
    series = Series(most=100)
    for step in range(1, 10_001):
        series.add(step, (float(step), None if step % 2 else 1.0))
    points = series.since(0)
    assert 50 <= len(points) <= 100
    assert points[0][0] == 128
    assert points[0][1:] == [pytest.approx(64.5), 1.0]
    assert points[-1][0] == 10_000
    revision = series.revision
    series.add(10_001, (float("nan"), None))
    assert series.revision == revision
    assert series.since(10_001)[0][0] == 10_001
    series.add(5_000, (0.0, 0.0))
    assert series.revision > revision
    assert series.since(0)[-1][0] == 5_000


def test_what_flows_is_spread_over_members_as_the_samples_are() -> None:
    plan = Plan((Stage(0, 2, (0,), (1.0,)), Stage(2, 4, (1, 2), (3.0, 1.0))), "1f1b", 2)
    sent = {0: {"next": 100.0}, 1: {"previous": 30.0, "members": 8.0}}
    received = {2: {"members": 8.0, "next": 5.0}, 0: {"next": 40.0}}
    found = {(flow.sender, flow.receiver, flow.what): flow.rate for flow in flows(plan, sent, received)}
    assert found == {
        (0, 1, ACTIVATIONS): 75.0,
        (0, 2, ACTIVATIONS): 25.0,
        (1, 0, ACTIVATIONS): 30.0,
        (2, 0, ACTIVATIONS): 10.0,  # what rank 0 has received, for rank 2 keeps its records elsewhere
        (1, 2, GRADIENTS): 8.0,
    }


def test_numbers_that_are_not_finite_are_null_for_browsers() -> None:
    assert json.loads(encode({"a": [float("nan"), 1.0, (float("inf"), "x")], 3: None})) == {
        "a": [None, 1.0, [None, "x"]],
        "3": None,
    }
