"""compose.yaml in real containers: five workers with 0.4 CPU and 1 GB each."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horizonml.security.token import make_token
from tests.e2e.tools import IMAGE, USER, Query, empty_panels, prometheus_at, run, value, wait_for

PROJECT = "horizonml-e2e"
WORKERS = [f"worker-{rank}" for rank in range(5)]

Up = Callable[..., Query]


def container(service: str) -> str:
    return f"{PROJECT}-{service}-1"


def inspect(service: str) -> dict[str, Any]:
    return dict(json.loads(run("docker", "inspect", container(service)))[0])


def log(service: str) -> str:
    return run("docker", "logs", container(service), both=True)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture
def project(compose: list[str]) -> Iterator[list[str]]:
    """The command for this project, of which nothing is left behind."""
    command = [*compose, "-p", PROJECT]
    down = [*command, "down", "--volumes", "--timeout", "5", "--remove-orphans"]
    run(*down)
    yield command
    print(run("docker", "compose", "-p", PROJECT, "logs", "--tail", "40", check=False))  # shown when a test fails
    run(*down)


@pytest.fixture
def up(project: list[str]) -> Up:
    """Starts the project in the background; returns its Prometheus."""

    def start(**variables: str) -> Query:
        port = free_port()
        env = {"PROMETHEUS_PORT": port, "GRAFANA_PORT": free_port(), **variables}
        run(*project, "up", "--detach", "--no-build", env=env, timeout=180)
        return prometheus_at(f"http://127.0.0.1:{port}")

    return start


def accuracy(query: Query) -> float:
    found = value(query, "max(horizonml_held_out_accuracy_ratio)")
    assert found is not None
    return found


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_five_small_workers_train_to_the_end_and_are_seen(up: Up, strategy: str) -> None:
    query = up(STRATEGY=strategy, EPOCHS="40", STAY="1")
    wait_for(lambda: value(query, f"count(up{{job='digits-{strategy}'}} == 1)") == 5, "Prometheus seeing all", 90)
    wait_for(
        lambda: value(query, "min(horizonml_epoch) > 30") or value(query, "min(horizonml_complete) == 1"),
        "epoch 30",
        180,
    )
    wait_for(lambda: not empty_panels(query), f"data in every panel (without: {empty_panels(query)})", 30)
    stages = {series["metric"]["stage"] for series in query("horizonml_stage_info")}
    assert stages == ({"0"} if strategy == "ddp" else {"0", "1", "2", "3", "4"})
    wait_for(lambda: value(query, "sum(horizonml_complete)") == 5, "the end of the training", 180)
    assert value(query, "sum(horizonml_link_refused_total)") == 0  # no rank takes another one for a stranger
    assert accuracy(query) >= 0.95
    for worker in WORKERS:
        state = inspect(worker)
        assert state["State"]["Running"]
        assert not state["State"]["OOMKilled"]
        assert state["RestartCount"] == 0
        assert (state["HostConfig"]["NanoCpus"], state["HostConfig"]["Memory"]) == (400_000_000, 1 << 30)
        assert f"rank {worker[-1]} stays, to be watched" in log(worker)
    harden = (
        "id -u; grep -E '^(CapEff|NoNewPrivs)' /proc/1/status; "
        "touch /new 2>&1; touch /venv/new 2>&1; touch /data/new && echo data"
    )
    shown = run("docker", "exec", container("worker-3"), "sh", "-c", harden)
    assert shown.splitlines()[0] == str(USER)
    assert "CapEff:\t0000000000000000" in shown
    assert "NoNewPrivs:\t1" in shown
    assert shown.count("Read-only file system") == 2
    assert shown.splitlines()[-1] == "data"
    run("docker", "stop", "--time", "20", container("worker-4"))
    assert inspect("worker-4")["State"]["ExitCode"] == 0


def knock(network: str, host: str, port: int) -> str:
    """What a container in one of the project's networks finds at a port."""
    code = f"import socket; socket.create_connection(({host!r}, {port}), 3); print('open')"
    command = ("docker", "run", "--rm", "--network", f"{PROJECT}_{network}", "--entrypoint", "python", IMAGE)
    return run(*command, "-c", code, check=False, both=True).strip().splitlines()[-1]


def address(service: str, network: str) -> str:
    return str(inspect(service)["NetworkSettings"]["Networks"][f"{PROJECT}_{network}"]["IPAddress"])


def test_strangers_and_the_monitoring_get_nowhere(up: Up) -> None:
    query = up(STRATEGY="ddp", EPOCHS="100", STAY="1")
    wait_for(lambda: value(query, "min(horizonml_step) > 0"), "the first step", 90)
    # Prometheus is in a network from which the service cannot be reached, even by its address, and Grafana in another.
    service = address("rendezvous", "ranks")
    assert knock("ranks", service, 29400) == "open"
    assert "open" not in knock("metrics", service, 29400)
    assert knock("metrics", address("worker-0", "metrics"), 9400) == "open"
    assert "open" not in knock("dashboards", address("worker-0", "metrics"), 9400)
    assert "open" not in knock("dashboards", service, 29400)
    # Whoever is in the ranks' network needs the token.
    env = {"RANK": "2", "WORLD_SIZE": "5", "HORIZONML_RENDEZVOUS": "rendezvous:29400", "HORIZONML_TOKEN": "wrong"}
    for token, words in (
        (make_token().text, "it has another token"),
        ("", "this process has no token"),
        ("guess", "so it is not a token of HorizonML"),
    ):
        options = [part for name in env for part in ("--env", name)]
        rank = ("docker", "run", "--rm", "--network", f"{PROJECT}_ranks", *options, IMAGE, "train", "digits")
        job = ("--set=parallel.strategy=ddp", "-n", "5", "--set=rendezvous.timeout=15")
        assert words in run(*rank, *job, env={**env, "HORIZONML_TOKEN": token}, check=False, both=True)
    assert "turned away a client" in log("rendezvous")
    assert value(query, "max(horizonml_generation)") == 1
    told = run("docker", "compose", "-p", PROJECT, "logs", both=True)
    assert not re.search("hml-[a-z2-7]{36}", told)


def test_without_its_secrets_compose_says_what_to_run(compose: list[str]) -> None:
    secrets = {"HORIZONML_TOKEN": "a token", "GRAFANA_PASSWORD": "a password"}
    for name in secrets:
        # Compose names the one that it looks up first, so only one is missing at a time.
        env = {**secrets, name: ""}
        shown = run("docker", "compose", "--env-file", "/dev/null", "up", env=env, check=False, both=True)
        assert f"{name} is missing a value: run `make token` first" in shown
        assert len(shown.strip().splitlines()) == 1
    refused = run("docker", "run", "--rm", IMAGE, "rendezvous", "--host", "0.0.0.0", check=False, both=True)
    assert "there is no token" in refused


def test_the_command_of_the_readme_ends_with_the_training(project: list[str]) -> None:
    env = {"PROMETHEUS_PORT": free_port(), "GRAFANA_PORT": free_port()}
    shown = run(
        *project, "up", "--no-build", "--abort-on-container-exit", "--exit-code-from", "worker-0", env=env, timeout=240
    )
    assert "done: records and checkpoints are in runs/digits-ddp" in shown
    for worker in WORKERS:
        state = inspect(worker)["State"]
        assert (state["ExitCode"], state["OOMKilled"]) == (0, False), worker
    # The same command finds the work done.
    again = run(
        *project, "up", "--no-build", "--abort-on-container-exit", "--exit-code-from", "worker-0", env=env, timeout=120
    )
    assert "trained to the end already" in again


def test_a_killed_worker_is_done_without_and_taken_in_again(up: Up) -> None:
    query = up(STRATEGY="pipeline", EPOCHS="400", STAY="1")
    wait_for(lambda: value(query, "min(horizonml_epoch) > 3"), "the fourth epoch", 90)
    run("docker", "kill", container("worker-2"))
    wait_for(lambda: value(query, "min(horizonml_world_size) == 4"), "four workers going on", 90)
    assert "rank 2 on worker-2 gives no sign of life" in log("worker-0") + log("worker-1") + log("worker-3")
    wait_for(lambda: "resumed from step " in log("worker-0"), "the four to have a plan and a checkpoint", 60)
    resumed = int(log("worker-0").rpartition("resumed from step ")[2].split()[0])
    assert resumed >= 3 * 23
    run("docker", "start", container("worker-2"))
    wait_for(lambda: value(query, "min(horizonml_world_size) == 5"), "five workers again", 90)
    assert value(query, "max(horizonml_steps_repeated_total)") == 0
    replica = 'sum(horizonml_recovery_seconds_count{source="replica"})'
    wait_for(lambda: value(query, replica) == 4, "Prometheus to know four recoveries from a replica", 60)
    assert accuracy(query) >= 0.95  # before they end, after which Prometheus soon forgets them
    run("docker", "stop", *(container(worker) for worker in WORKERS), timeout=120)
    for worker in WORKERS:
        assert inspect(worker)["State"]["ExitCode"] == 0, worker
    assert "stopped as asked: a checkpoint is saved" in log("worker-0")
