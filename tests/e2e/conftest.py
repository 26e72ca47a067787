from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.cluster import CLUSTER, NAMESPACE, Cluster, bring_image, prepare_disks, without_grafana
from tests.e2e.tools import IMAGE, run, wait_for


@pytest.fixture(scope="session")
def image() -> None:
    """The worker's image, built as `make images` does."""
    run("make", "images", f"DOCKER_BUILD={os.environ.get('DOCKER_BUILD', 'docker build')}", timeout=900)


@pytest.fixture(scope="session")
def compose(image: None) -> list[str]:
    """The command for `docker compose`."""
    run("make", "token")
    return shlex.split(os.environ.get("COMPOSE", "docker compose"))


@pytest.fixture(scope="session")
def cluster(image: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`make kind-up`, and `make kind-down` in the end."""
    made = Cluster()
    options = [f"KIND_CLUSTER={CLUSTER}", "DOCKER_BUILD=true"]  # the image is there already
    load = []
    if "DOCKER_HOST" in made.env:
        bring_image(made, IMAGE, tmp_path_factory.mktemp("image"))
    if "PROMETHEUS_IMAGE" in os.environ:  # no registry: what is not loaded cannot run
        load = [os.environ["PROMETHEUS_IMAGE"]]
        options.append(f"MONITORING={without_grafana(tmp_path_factory.mktemp('monitoring'), load[0])}")
    shown = run("make", "kind-up", *options, f"KIND_LOAD={' '.join(load)}", env=made.env, timeout=400)
    assert "Next: kubectl apply -k k8s/dp" in shown
    prepare_disks(made)
    yield made
    run("make", "kind-down", *options, env=made.env, timeout=120)


@pytest.fixture
def clean(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, in which the test's jobs are deleted in the end; their disks are kept."""
    with cleaned(cluster):
        yield cluster


@contextmanager
def cleaned(cluster: Cluster) -> Iterator[None]:
    """Delete the jobs that are there in the end."""
    cluster.token()
    try:
        yield
    finally:
        print(cluster.kubectl("-n", NAMESPACE, "get", "pods,pvc", check=False, both=True))
        print(cluster.log(0)[-3000:])
        every = ("-l", "app.kubernetes.io/part-of=horizonml")
        for pod in cluster.get("pods")["items"]:
            if any(status.get("restartCount") for status in pod["status"].get("containerStatuses", [])):
                last = cluster.kubectl(
                    "-n", NAMESPACE, "logs", "--previous", pod["metadata"]["name"], check=False, both=True
                )
                print(f"{pod['metadata']['name']} was restarted; before that it said:\n{last[-3000:]}")
        parts = "statefulset,deployment,job,service,configmap,networkpolicy,pdb,role,rolebinding,serviceaccount"
        cluster.kubectl("-n", NAMESPACE, "delete", parts, *every, timeout=240)
        wait_for(lambda: not cluster.get("pods")["items"], "the end of all pods", 120)
