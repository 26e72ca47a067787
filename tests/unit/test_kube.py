"""Jobs in Kubernetes without a cluster: rendering, reasons, rows, and errors where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from horizonml.errors import JobError
from horizonml.job.schema import Job
from horizonml.kube.render import (
    SETTINGS,
    ManifestSettings,
    WorkerClass,
    code_outside,
    differences,
    files_of,
    for_workers,
    is_another_kind,
    job_name,
    lose_disks,
    render,
)
from horizonml.kube.status import (
    PodCondition,
    PodState,
    RankStatus,
    condition,
    parse,
    problems,
    rank_status,
    requests,
    room,
)
from horizonml.telemetry.metrics import Metrics
from tests.commands import command
from tests.unit import test_metrics
from tests.unit.test_metrics import INFO, STEP, record

ROOT = Path(__file__).resolve().parents[2]
JOB = Job.model_validate({"name": "j", "parallel": {"strategy": "pipeline", "workers": 3}})


def find(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def test_a_job_is_rendered_from_the_base_manifests() -> None:
    one = WorkerClass(count=3, cpu="2", memory="512Mi")
    settings = ManifestSettings("team", "mine", (one,), "registry/worker:7", "5Gi", "fast", ttl=60)
    documents = render(JOB, settings)
    base = yaml.safe_load((ROOT / "k8s" / "base" / "kustomization.yaml").read_text())
    assert documents[0]["metadata"]["name"] == "team"
    for document in documents[1:]:
        assert document["metadata"]["namespace"] == "team"
        assert document["metadata"]["name"].startswith("mine-")
        assert {**base["labels"][0]["pairs"], "app.kubernetes.io/instance": "mine"}.items() <= document["metadata"][
            "labels"
        ].items()
    workers = find(documents, "StatefulSet", "mine-worker")
    (worker,) = workers["spec"]["template"]["spec"]["containers"]
    assert workers["spec"]["replicas"] == 3
    env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in worker["env"]}
    assert env["HORIZONML_RENDEZVOUS"] == "mine-rendezvous:29400"
    assert env["HORIZONML_TTL"] == "60"
    assert env["HORIZONML_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert worker["image"] == "registry/worker:7"
    assert worker["resources"] == {key: {"cpu": "2", "memory": "512Mi"} for key in ("requests", "limits")}
    (claim,) = workers["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    service = find(documents, "Deployment", "mine-rendezvous")
    assert ManifestSettings.from_json(service["metadata"]["annotations"][SETTINGS]) == settings
    with pytest.raises(ValueError, match="name"):
        ManifestSettings.from_json('{"namespace": "x"}')
    (config,) = [d for d in documents if d["kind"] == "ConfigMap"]
    content = yaml.safe_load(config["data"]["job.yaml"])
    assert "workers" not in content["parallel"]  # or a change of their number would be one of the job
    assert for_workers(Job.model_validate(content), 3).digest() == JOB.digest()
    assert config["metadata"]["name"] in str(workers)
    # Everything else is the base's, and rendering again gives the same.
    plain = find(render(JOB, ManifestSettings("horizonml", "j")), "StatefulSet", "j-worker")["spec"]["template"]["spec"]
    assert plain["containers"][0]["image"] == "horizonml/worker:dev"
    assert plain["securityContext"]["runAsNonRoot"] is True
    assert render(JOB, settings) == documents
    # Another job has another ConfigMap, and with it other pods.
    other = render(Job.model_validate({"seed": 7}), settings)
    assert find(other, "StatefulSet", "mine-worker")["spec"]["template"] != workers["spec"]["template"]


def test_names_of_jobs() -> None:
    for text, name in (("My job_2", "my-job-2"), ("digits", "digits"), ("a" * 35, "a" * 35)):
        assert job_name(text) == name
    for text in ("", "42", "---", "a" * 36):
        with pytest.raises(JobError, match="--name"):
            job_name(text)


def test_modules_beside_the_job_file_travel_with_it(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("import os\nimport blocks\nfrom torch import nn\nclass Net: ...\n")
    (tmp_path / "blocks.py").write_text("from my_model import Net\n")
    job = Job.model_validate({"model": {"name": "my_model:Net"}, "data": {"name": "their.package:data"}})
    files = files_of(job, tmp_path)
    assert files["my_model.py"].endswith("class Net: ...\n")
    assert set(files) == {"job.yaml", "my_model.py", "blocks.py"}
    assert code_outside(job, files) == ["their.package:data"]
    (tmp_path / "my_model.py").write_bytes(b"\xff")
    with pytest.raises(JobError, match=r"my_model\.py is no Python that can be read"):
        files_of(job, tmp_path)
    (tmp_path / "my_model.py").write_text("#" * 1_000_000)
    with pytest.raises(JobError, match="build an image"):
        files_of(job, tmp_path)


def test_what_differs_is_named() -> None:
    files = files_of(JOB, Path())
    old = ManifestSettings("team", "mine", (WorkerClass(count=3),))
    assert differences(files, old, files, old) == []
    other = JOB.model_copy(update={"epochs": 20})
    new = ManifestSettings("team", "mine", (WorkerClass("pc", 2, cpu="8"), WorkerClass("pi", 3)), disk="5Gi")
    found = differences(files, old, {**files_of(other, Path()), "my_model.py": "x"}, new)
    assert f"epochs: {JOB.epochs} -> 20" in found
    assert "classes.worker.count: 3 -> -" in found
    assert "classes.pc.cpu: - -> 8" in found
    assert "disk: None -> 5Gi" in found
    assert [entry for entry in found if entry.startswith("my_model.py: - -> ")]
    assert is_another_kind(old, new)
    assert lose_disks(old, new)
    assert not lose_disks(
        old, ManifestSettings("team", "mine", (WorkerClass(count=7), WorkerClass("pi", 3)), image="x")
    )
    assert not is_another_kind(old, ManifestSettings("team", "mine", image="x"))
    both = ManifestSettings("team", "mine", (WorkerClass(count=3), WorkerClass("pi", 3)))
    assert not is_another_kind(old, both)
    assert is_another_kind(both, old)  # the workers of a class that is dropped would go on


def test_a_plan_with_named_ranks_cannot_be_scaled() -> None:
    assert for_workers(JOB, 7).parallel.world_size() == 7
    with pytest.raises(JobError, match="max_workers: at most 256 ranks may take part"):
        for_workers(JOB, 257)
    fixed = Job.model_validate({"parallel": {"stages": [{"ranks": [0]}, {"ranks": [1, 2]}]}})
    with pytest.raises(JobError, match="the plan names 3 ranks, not 7"):
        for_workers(fixed, 7)
    narrow = Job.model_validate({"parallel": {"strategy": "ddp", "max_workers": 6}})
    with pytest.raises(JobError, match=r"max_workers: 6 is less than workers, 7; set it to 7 or more$"):
        for_workers(narrow, 7)


def pod(name: str = "worker-3", memory: str = "1Gi", node: str | None = None, **status: Any) -> dict[str, Any]:
    resources = {"requests": {"memory": memory, "cpu": "200m"}, "limits": {"memory": memory}}
    return {
        "metadata": {"name": name},
        "spec": {
            "nodeName": node,
            "containers": [{"name": "worker", "image": "x:1", "resources": resources}],
            "volumes": [{"persistentVolumeClaim": {"claimName": f"data-{name}"}}],
        },
        "status": {"phase": "Pending", **status},
    }


def node(name: str, memory: str, cpu: str = "4") -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {}, "status": {"allocatable": {"memory": memory, "cpu": cpu}}}


def container(**state: Any) -> dict[str, Any]:
    again = state.pop("again", 0)
    return {"containerStatuses": [{"image": "x:1", "restartCount": again, **state}]}


def unscheduled(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}


def test_lack_of_memory_names_the_request_and_the_nearest_node() -> None:
    nodes = [node("pi-1", "2Gi"), node("pi-2", "1900Mi")]
    here = [pod("a", "1800Mi", "pi-1"), pod("b", "1260Mi", "pi-2"), pod("c", "1Gi", "pi-2", phase="Succeeded")]
    assert requests(here[0], "memory") == 1800 << 20
    assert room(nodes[1], here, "memory") == (640 << 20, 1900 << 20)
    found = condition(pod(**unscheduled("0/2 nodes are available: 2 Insufficient memory.")), nodes, here)
    assert found.phase == "Pending"
    assert "worker-3: asks for memory 1Gi; the nearest node pi-2 has 640Mi left of 1.9Gi" in str(found.problem)
    found = condition(pod(**unscheduled("0/2 nodes are available: 2 Insufficient cpu.")), nodes, here)
    assert "asks for cpu 0.2; the nearest node pi-" in str(found.problem)
    # A node with a taint, or without a label, takes no such pod however much it has left.
    tainted, labelled = node("master", "8Gi"), node("pi-3", "1990Mi")
    tainted["spec"] = {"taints": [{"key": "node-role.kubernetes.io/master", "effect": "NoSchedule"}]}
    labelled["metadata"]["labels"] = {"zone": "b"}
    chosen = pod(**unscheduled("0/3 nodes are available: 3 Insufficient memory."))
    for selector, nearest in (({}, "pi-1 has 2Gi"), ({"zone": "b"}, "pi-3 has 1.9Gi")):
        chosen["spec"]["nodeSelector"] = selector
        found = condition(chosen, [node("pi-1", "2Gi"), tainted, labelled], [])
        assert f"the nearest node {nearest} left" in str(found.problem)
    # Without the right to see nodes, what Kubernetes says is shown.
    message = "0/2 nodes are available: 2 Insufficient memory."
    assert condition(pod(**unscheduled(message)), [], here).problem == f"worker-3: {message}"


def test_other_reasons_say_what_to_do() -> None:
    unbound = condition(pod(**unscheduled("pod has unbound immediate PersistentVolumeClaims")), [], [])
    assert "no disk for claim data-worker-3" in str(unbound.problem)
    image = condition(pod(node="pi-1", **container(state={"waiting": {"reason": "ImagePullBackOff"}})), [], [])
    assert image.phase == "No image"
    assert "the image x:1 cannot be pulled on node pi-1" in str(image.problem)
    killed = {"waiting": {"reason": "CrashLoopBackOff"}}, {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    memory = condition(pod(**container(state=killed[0], lastState=killed[1])), [], [])
    assert "it ran out of memory (OOMKilled, exit code 137; limit 1Gi)" in str(memory.problem)
    assert "raise the limit with --memory, use more workers" in str(memory.fix)
    wrong = {"waiting": {"reason": "CrashLoopBackOff"}}, {"terminated": {"exitCode": 2, "message": "optimizer.lr: -1"}}
    crash = condition(pod(**container(state=wrong[0], lastState=wrong[1])), [], [])
    problem = "worker-3: it ended (exit code 2): optimizer.lr: -1"
    assert crash == PodCondition(PodState.ENDED, problem, "CrashLoopBackOff")
    evicted = condition(pod(reason="Evicted", message="The node was low on resource: memory."), [], [])
    assert evicted.problem == "worker-3: Evicted: The node was low on resource: memory."
    ready = {**container(state={"running": {}}), "conditions": [{"type": "Ready", "status": "True"}]}
    assert condition(pod(**ready), [], []) == PodCondition(PodState.READY)
    killed = {"terminated": {"exitCode": 137, "reason": "Error"}}
    healed = {**ready, **container(state={"running": {}}, lastState=killed, again=1)}
    assert condition(pod(**healed), [], []) == PodCondition(PodState.READY)


def test_a_worker_that_runs_again_tells_why_it_ended() -> None:
    oom = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-05-04T10:00:00Z"}
    cases: list[tuple[int, dict[str, Any] | None, str]] = [
        (1, oom, "worker-3: restarted once; the last time it ran out of memory at 2026-05-04T10:00:00Z (OOMKilled, "
         "exit code 137; limit 1Gi)"),
        (2, {"exitCode": 137, "reason": "Error"}, "worker-3: restarted 2 times; the last time it was killed (exit "
         "code 137) by SIGKILL; Kubernetes reports no lack of memory"),
        (1, {"exitCode": 132, "reason": "Error"}, "it was killed (exit code 132) by SIGILL; its processor lacks an"),
        (1, {"exitCode": 0, "signal": 11}, "it was killed (exit code 0) by SIGSEGV"),
        (1, {"exitCode": 163}, "it was killed (exit code 163) by signal 35"),
        (1, {"exitCode": 3, "reason": "Error", "message": "rank 1 is lost"}, "the last "
         "time it ended (exit code 3): rank 1 is lost"),
        (3, None, "worker-3: restarted 3 times; the last time Kubernetes does not know why it ended"),
    ]  # fmt: skip
    for again, ended, story in cases:
        state = container(state={"running": {}}, lastState={"terminated": ended} if ended else {}, again=again)
        found = condition(pod(**state), [], [])
        assert found.phase == "Running"
        assert story in str(found.problem)


def shown(metrics: Metrics) -> dict[str, float]:
    from prometheus_client import generate_latest

    return parse(generate_latest(metrics.registry).decode())


def test_rows_tell_what_ranks_do() -> None:
    metrics = Metrics(3)
    metrics.waiting([0, 11])
    assert rank_status(3, "pi", PodCondition(PodState.RUNNING), {}, shown(metrics), 1.0).phase == "Waits for rank 0, 11"
    metrics.formed(2, 4)
    metrics.started(INFO, test_metrics.JOB, test_metrics.PLAN, done=10)
    metrics.step(record(11), STEP)
    before = shown(metrics)
    metrics.step(record(12), STEP)
    found = rank_status(3, "pi", PodCondition(PodState.READY), before, shown(metrics), 0.5)
    assert (found.phase, found.stage, found.layers, found.generation) == ("Training", "1", "3-8", 2)
    assert (found.step, found.steps, found.epoch, found.epochs) == (12, 40, 1, 4)
    assert found.samples_per_second == 32
    assert (found.compute, found.transfer, found.wait) == pytest.approx((0.5, 0.2, 0.3))
    assert rank_status(3, "pi", PodCondition(PodState.READY), {}, before, 1.0).compute == pytest.approx(
        0.5
    )  # since the start
    metrics.completed()
    assert rank_status(3, "pi", PodCondition(PodState.READY), {}, shown(metrics), 1.0).phase == "Complete"
    silent = rank_status(3, None, PodCondition(PodState.PENDING), {}, {}, 1.0)
    assert (silent.phase, silent.step, silent.loss) == ("Pending", None, None)
    assert problems([found], {3: PodCondition(PodState.PENDING, "no disk")}) == ["no disk"]


def test_workers_that_ran_out_of_memory_are_told_what_to_do_about_it_once() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    killed = container(state={"running": {}}, lastState=ended, again=1)
    free = pod("worker-4", **killed)
    del free["spec"]["containers"][0]["resources"]["limits"]
    pods = {2: pod("worker-2", **killed), 3: pod("worker-3", **killed), 4: free}
    conditions = {rank: condition(one, [], []) for rank, one in pods.items()}
    rows = [RankStatus(3, "pi-1", "Training", plan_memory=1.25 * 2**30)]
    first, second, third = problems(rows, conditions)
    story = "restarted once; the last time it ran out of memory (OOMKilled, exit code 137; "
    assert first == f"worker-2: {story}limit 1Gi)"
    assert second.startswith(
        f"worker-3: {story}limit 1Gi); the plan expects it to need 1.2 GiB; raise the limit with --memory, use more"
    )
    assert third.startswith(f"worker-4: {story}no limit but the node's memory); use nodes with more memory, use more")


def dead_server(tmp_path: Path) -> str:
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(json.dumps(config))
    return str(tmp_path / "config")


def test_no_cluster_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    none, dead = (
        (str(tmp_path / "none"), "no Kubernetes cluster is"),
        (dead_server(tmp_path), "127.0.0.1:1 does not answer"),
    )
    for (config, words), *arguments in (
        (none, "status"), (none, "logs"), (none, "scale", "mine", "3"), (dead, "submit", "jobs/digits.yaml"),
        (dead, "delete", "mine"), (dead, "list"),
    ):  # fmt: skip
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", config)
        result = command(ROOT, "cluster", *arguments)
        assert result.returncode == 1
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr


def test_mistakes_are_told_before_any_connection(tmp_path: Path) -> None:
    for arguments, words in (
        (["submit", "jobs/digits.yaml", "--set", "epoch=3"], "epoch"),
        (["submit", "jobs/digits.yaml", "--memory", "lots"], "--memory: 'lots' is not an amount"),
        (["submit", "no-such.yaml"], "no-such.yaml"),
        (["submit", "digits", "--class", "pi=3,cores=4"], "'cores=4' is neither"),
        (["submit", "digits", "--class", "pi=3,example.com/zone=b_ad!"], "'example.com/zone=b_ad!' is neither"),
        (["submit", "digits", "--class", "pi=3", "--workers", "3"], "leave out --workers"),
        (["submit", "digits", "--class", "pi=3", "--class", "pi=2"], "same name"),
        (["submit", "digits", "--class", "big-pi=3"], "letters and digits"),  # the class pi of a job digits-big
        (["submit", "digits", "--class", "data=3"], "the name data is taken"),
        (["submit", "digits", "--name", "7"], "begins with a letter"),
    ):
        result = command(ROOT, "cluster", *arguments)
        assert result.returncode == 2, result.stderr
        assert words in result.stderr


def test_a_dry_run_prints_what_would_be_sent_and_needs_no_cluster() -> None:
    result = command(
        ROOT, "cluster", "submit", "digits", "--name", "mine", "--class", "pc=2", "--class", "pi=1", "--dry-run"
    )
    assert result.returncode == 0, result.stderr
    documents = list(yaml.safe_load_all(result.stdout))
    assert [d["metadata"]["name"] for d in documents if d["kind"] == "StatefulSet"] == ["mine-pc", "mine-pi"]
    assert not [d for d in documents if d["kind"] == "Secret"]
