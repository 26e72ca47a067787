"""What `cluster` says of pods: their ranks, what their Events tell, what has healed, and exit codes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from horizonml.cli import cluster
from horizonml.cli.app import app
from horizonml.errors import JobError
from horizonml.job.schema import Job
from horizonml.kube.render import ManifestSettings, WorkerClass
from horizonml.kube.status import (
    Activity,
    PodCondition,
    PodState,
    RankStatus,
    condition,
    missing,
    problems,
    rank_status,
    ranked,
)
from horizonml.rendezvous.identity import ASKED, Identity
from horizonml.runtime import launch
from horizonml.runtime.outcome import Outcome


def pod(**status: Any) -> dict[str, Any]:
    volumes = [{"persistentVolumeClaim": {"claimName": "data-worker-3"}}]
    metadata = {"name": "worker-3", "namespace": "team", "uid": "u1"}
    spec = {"containers": [{"name": "worker", "image": "x:1"}], "volumes": volumes}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Pending", **status}}


def container(again: int = 0, **state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"image": "x:1", "restartCount": again, **state}]}


def unscheduled(message: str) -> dict[str, Any]:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "message": message}]}


def happened(message: str, second: int, kind: str = "Pod", name: str = "worker-3", **fields: Any) -> dict[str, Any]:
    about = {"kind": kind, "name": name, "uid": fields.pop("uid", "u1")}
    stamp = {"lastTimestamp": f"2026-05-04T10:00:{second:02}Z", "metadata": {"namespace": "team"}}
    return {"type": "Warning", "involvedObject": about, "message": message, **stamp, **fields}


ABSENT = happened('MountVolume.SetUp failed for volume "token" : secret "j-token" not found', 5)


@pytest.mark.parametrize(
    ("status", "events", "problem", "fix"),
    [
        ({}, [ABSENT, happened("Unable to attach or mount volumes: timed out", 9)],
         'secret "j-token" not found', "horizonml token --secret j | kubectl apply --namespace team"),
        ({}, [happened('configmap "job" not found', 5), happened("other pod", 9, name="worker-4")], "configmap",
         "kubectl -n team create configmap"),
        ({}, [happened("nfs: no host", 5)], "worker-3: nfs: no host", "kubectl -n team describe pod worker-3"),
        # What has healed, or was an earlier pod's, is no problem.
        ({}, [ABSENT, happened("Pulling image", 9, type="Normal")], None, None),
        ({}, [happened(ABSENT["message"], 5, uid="u0")], None, None),
        ({"phase": "Running", **container(state={"running": {}})}, [ABSENT], None, None),
        (unscheduled("pod has unbound immediate PersistentVolumeClaims"),
         [happened('storageclass.storage.k8s.io "fast" not found', 5, "PersistentVolumeClaim", "data-worker-3")],
         'no disk for claim data-worker-3: storageclass.storage.k8s.io "fast" not found', "kubectl get storageclass"),
        (unscheduled('error getting PVC: storageclass.storage.k8s.io "fast" not found'), [], "fast", "--storage-class"),
        (container(state={"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "s3" not found'}}), [],
         'worker-3: secret "s3" not found', "kubectl -n team create secret --help"),
    ],
)  # fmt: skip
def test_events_tell_what_a_pod_lacks(
    status: dict[str, Any], events: list[dict[str, Any]], problem: str | None, fix: str | None
) -> None:
    found = condition(pod(**status), [], [], events)
    assert (found.problem is None, found.fix is None) == (problem is None, fix is None), found
    assert (problem or "") in (found.problem or "")
    assert (fix or "") in (found.fix or "")


def test_a_pod_that_could_not_be_made_says_why() -> None:
    message = 'create Pod worker-1 in StatefulSet worker failed error: pods "worker-1" is forbidden: exceeded quota'
    events = [happened(message, 5, "StatefulSet", "worker", reason="FailedCreate"), ABSENT]
    assert missing("worker-1", events) == PodCondition(PodState.MISSING, f"worker-1: {message}")
    assert missing("worker-11", events) == missing("worker-1", []) == PodCondition(PodState.MISSING)


def test_what_has_healed_is_forgotten_though_the_group_forms_again() -> None:
    """A worker that was killed, came back, and has lost another one since waits for that, and has no problem itself."""
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    state = container(state={"running": {"startedAt": "2026-05-04T10:00:00Z"}}, lastState=killed, again=1)
    for since, problems_left in (("2026-05-04T09:59:58Z", 1), ("2026-05-04T10:03:00Z", 0)):
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
        found = condition(pod(**state, conditions=[ready]), [], [])
        assert len(problems([], {3: found})) == problems_left
    done = condition(pod(**container(state={"terminated": {"exitCode": 0, "reason": "Completed"}})), [], [])
    assert done == PodCondition(PodState.ENDED)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_status_ends_with_1_if_something_is_wrong(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for problem, code in (("no disk", 1), (None, 0)):
        seen = [RankStatus(3, "pi", "Pending")], {3: PodCondition(PodState.PENDING, problem)}
        found = SimpleNamespace(
            chosen=lambda _: "j", observe=lambda *_, seen=seen: seen,
            workers=lambda _: [{"metadata": {"annotations": {"horizonml/progress": "37%"}}}],
            reader=SimpleNamespace(refused=""),
        )  # fmt: skip
        monkeypatch.setattr(cluster, "_connect", lambda *_, found=found: found)
        result = CliRunner().invoke(cluster.app, ["status", *options])
        assert (result.exit_code, "no disk" in result.stdout) == (code, bool(code))
        assert "37%" in result.stdout


def test_each_pod_has_a_rank_of_its_own_when_a_class_has_grown() -> None:
    def of_class(name: str, ranks: str) -> dict[str, Any]:
        env = [{"name": "HORIZONML_RANKS", "value": ranks}]
        return {"metadata": {"name": name}, "spec": {"containers": [{"env": env}]}}

    pods = [of_class(f"j-pc-{at}", "0-1") for at in range(4)] + [of_class(f"j-pi-{at}", "2-4") for at in range(3)]
    nothing: list[dict[str, float]] = [{} for _ in pods]
    assert ranked(pods, nothing) == [0, 1, 5, 6, 2, 3, 4]
    nothing[2] = {"rank": 6.0}
    assert ranked(pods, nothing) == [0, 1, 6, 7, 2, 3, 4]


def test_a_pod_that_has_succeeded_is_complete_though_it_serves_no_metrics() -> None:
    for phase, activity in (("Succeeded", Activity.COMPLETE), ("Running", Activity.UNKNOWN)):
        found = condition(pod(**{"phase": phase, **container(state={"terminated": {"exitCode": 0}})}), [], [])
        assert rank_status(3, "pi", found, {}, {}, 1.0).activity is activity
        assert found.problem is None


def test_workers_that_are_made_anew_are_not_restarted_besides() -> None:
    done: list[str] = []
    old = ManifestSettings("team", "j", (WorkerClass("pc", 1), WorkerClass("pi", 1)))
    found = SimpleNamespace(
        submitted=lambda _: ({"job.yaml": "name: j"}, old), workers=lambda _: ["j-pc"],
        remake=lambda *_: done.append("remake"),
        apply=lambda _, force, rehearse=False: done.append("rehearse" if rehearse else f"force={force}") or [],
        keep_disks=lambda *_: done.append("disks"), restart=lambda _: done.append("restart"),
        live=lambda _, settings: settings, forget_files=lambda *_: done.append("forget"),
    )  # fmt: skip
    new = ManifestSettings("team", "j", (WorkerClass("pc", 1),))
    cluster._submit(found, Job(), new, {"job.yaml": "name: j\nseed: 7"}, True)  # type: ignore[arg-type]
    assert done == ["rehearse", "disks", "remake", "force=True", "forget"]
    # One by one, a worker would wait for a rank that its neighbour holds, which is replaced only after it.
    for pc, pi, restarts in ((2, 1, ["restart"]), (1, 2, [])):
        done.clear()
        new = ManifestSettings("team", "j", (WorkerClass("pc", pc), WorkerClass("pi", pi)))
        cluster._submit(found, Job(), new, {"job.yaml": "name: j"}, True)  # type: ignore[arg-type]
        assert done == ["rehearse", "force=True", *restarts, "forget"]


def test_a_job_that_was_scaled_or_has_given_its_pods_back_differs(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ManifestSettings("team", "j", (WorkerClass(count=3),))
    for live, words in ((3, None), (0, "classes.worker.count: 0 -> 3")):
        found = SimpleNamespace(
            submitted=lambda _: ({"job.yaml": "name: j"}, settings),
            live=lambda *_, live=live: ManifestSettings("team", "j", (WorkerClass(count=live),)),
            workers=lambda _: ["j-worker"],
        )
        if words is None:
            cluster._submit(found, Job(), settings, {"job.yaml": "name: j"}, False)  # type: ignore[arg-type]
            assert "nothing differs" in capsys.readouterr().out
        else:
            with pytest.raises(JobError, match=words):
                cluster._submit(found, Job(), settings, {"job.yaml": "name: j"}, False)  # type: ignore[arg-type]


def test_a_job_without_workers_cannot_be_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(chosen=lambda name: name, workers=lambda _: [])
    monkeypatch.setattr(cluster, "_connect", lambda *_: found)
    assert "has no workers" in str(CliRunner().invoke(cluster.app, ["scale", "j", "3"]).exception)


def test_an_indexed_job_does_not_count_a_rank_that_was_asked_to_stop_as_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for index, outcome, code in (
        ("0", Outcome.STOPPED, 143), ("0", Outcome.STOPPED_WAITING, 143), ("0", Outcome.COMPLETE_WITHOUT, 0),
        (None, Outcome.STOPPED, 0),
    ):  # fmt: skip
        env = {"HORIZONML_ELASTIC": "1", "HOSTNAME": "j-worker-0", "JOB_COMPLETION_INDEX": index}
        monkeypatch.setattr(launch, "train_as_rank", lambda *_, outcome=outcome: outcome)
        assert CliRunner().invoke(app, ["train", "digits"], env=env).exit_code == code


def test_a_pod_beyond_the_most_that_a_job_takes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", sys.stdout)  # which a rank replaces
    monkeypatch.setattr(launch, "endpoint_for", lambda place: place)
    monkeypatch.setenv("HORIZONML_RENDEZVOUS", "j-rendezvous:29400")
    monkeypatch.setattr("horizonml.rendezvous.meeting.ask_rank", lambda *_: Identity(6, 3, "the rendezvous service"))
    job = Job.model_validate({"parallel": {"strategy": "ddp", "max_workers": 6}})
    with pytest.raises(JobError, match="rank 6 is one too many: the job takes at most 6 ranks"):
        launch.train_as_rank(job, Identity(6, ASKED, "StatefulSet"), False, None, False)
