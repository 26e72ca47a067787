"""Determines what each worker of a job is doing, or why its pod does not run and how to fix that.

What a worker is doing is read from the metrics that it serves. Pods and nodes are the API's objects as plain
dictionaries.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum, auto
from itertools import count, takewhile
from typing import Any

from kubernetes.utils.quantity import parse_quantity
from prometheus_client.parser import text_string_to_metric_families

from horizonml.machine.signals import explain_signal
from horizonml.telemetry.kubernetes import PROGRESS
from horizonml.text import human_bytes, printable

PHASES = ("compute", "transfer", "wait")
_MOST = 1_000_000  # ranks
Samples = dict[str, float]
Object = dict[str, Any]


class Activity(Enum):
    """What a rank is doing, as far as its metrics show."""

    UNKNOWN = auto()  # it does not answer
    STARTING = auto()
    WAITING = auto()  # for other ranks
    TRAINING = auto()
    COMPLETE = auto()


@dataclass(frozen=True)
class RankStatus:
    """The state of one rank. None stands for what is not known, or not known yet."""

    rank: int
    node: str | None
    phase: str  # for people
    stage: str | None = None
    layers: str | None = None
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    samples_per_second: float | None = None
    loss: float | None = None
    compute: float | None = None  # shares of the time between two looks, else since the start
    transfer: float | None = None
    wait: float | None = None
    generation: int | None = None
    plan_memory: float | None = None  # bytes that an automatic plan expects the rank to need
    activity: Activity = Activity.UNKNOWN

    def to_json(self) -> dict[str, str | int | float | None]:
        """Return plain JSON values."""
        values = asdict(self)
        del values["activity"]  # which is the phase, for programs
        return values


def parse(text: str) -> Samples:
    """Return the values of metrics by `name` or `name{key=value}`, without the label `rank`, which is one of them."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "rank" in sample.labels:
                found["rank"] = float(sample.labels["rank"])
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key != "rank")
            found[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


def rank_status(
    rank: int, node: str | None, condition: PodCondition, before: Samples, after: Samples, seconds: float
) -> RankStatus:
    """Return a rank's row from its metrics at two times, `seconds` apart, which are empty where it did not answer."""
    if not after:
        activity = Activity.COMPLETE if condition.state is PodState.COMPLETE else Activity.UNKNOWN
        return RankStatus(rank, node, condition.phase, activity=activity)
    activity, phase = _activity(condition, after)
    compute, transfer, wait = _split(before, after)

    def whole(name: str) -> int | None:
        value = after.get(f"horizonml_{name}")
        return None if value is None else int(value)

    return RankStatus(
        rank,
        node,
        phase,
        stage=next(iter(_labels(after, "horizonml_stage_info", "stage")), None),
        layers=next(iter(_labels(after, "horizonml_stage_info", "layers")), None),
        epoch=whole("epoch"),
        epochs=whole("epochs_planned"),
        step=whole("step"),
        steps=whole("steps_planned"),
        samples_per_second=_rate(before, after, seconds),
        loss=after.get("horizonml_training_loss"),
        compute=compute,
        transfer=transfer,
        wait=wait,
        generation=whole("generation"),
        plan_memory=after.get("horizonml_plan_memory_bytes"),
        activity=activity,
    )


def _activity(condition: PodCondition, metrics: Samples) -> tuple[Activity, str]:
    """Return what a rank is doing, and that in words."""
    if metrics.get("horizonml_complete") == 1:
        return Activity.COMPLETE, "Complete"
    if condition.state not in (PodState.READY, PodState.RUNNING):
        return Activity.UNKNOWN, condition.phase
    missing = sorted(_labels(metrics, "horizonml_waiting_for_rank", "peer"), key=int)
    if missing:
        return Activity.WAITING, f"Waits for rank {', '.join(missing)}"
    if condition.state is PodState.READY:
        return Activity.TRAINING, "Training"
    return Activity.STARTING, "Starting"


def ordinal(pod: Object) -> int:
    """Return the number of a pod among the workers of its class."""
    name = str(pod["metadata"]["name"])
    index = pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index")
    return int(index if index is not None else name.rpartition("-")[2])


def ranks_of(pod: Object) -> tuple[int, int]:
    """Return the first and the last rank of the class of workers that a pod, or the template of one, belongs to."""
    env = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0].get("env", [])}
    first, _, last = str(env.get("HORIZONML_RANKS") or f"0-{_MOST}").partition("-")
    return int(first), int(last)


def ranked(pods: Sequence[Object], looks: Sequence[Samples]) -> list[int]:
    """Return the ranks of workers' pods, which only its metrics know of one that came to a class that was full.

    Those that no metrics tell yet come after all others.
    """
    classes = [ranks_of(pod) for pod in pods]
    found = [first + ordinal(pod) for pod, (first, _) in zip(pods, classes, strict=True)]
    further = {at for at, (_, last) in enumerate(classes) if found[at] > last}
    for at in further & {at for at, samples in enumerate(looks) if "rank" in samples}:
        found[at] = int(looks[at]["rank"])
        further.remove(at)
    known = {rank for at, rank in enumerate(found) if at not in further}
    free = count(1 + max(known | {last for _, last in classes if further}, default=0))
    for at in sorted(further):
        found[at] = next(free)
    return found


def problems(rows: Iterable[RankStatus], conditions: Mapping[int, PodCondition]) -> list[str]:
    """Return what is wrong, one line each, with what to do about it once, at the last line that it is for."""
    rows = list(rows)
    planned = {entry.rank: entry.plan_memory for entry in rows}
    wrong = [(rank, entry.problem, entry.fix) for rank, entry in sorted(conditions.items()) if entry.problem]
    last = {fix: rank for rank, _, fix in wrong}
    found = []
    for rank, problem, fix in wrong:
        expected = planned.get(rank) if fix is not None else None
        needs = f"; the plan expects it to need {human_bytes(expected)}" if expected is not None else ""
        found.append(problem + needs + (f"; {fix}" if fix is not None and last[fix] == rank else ""))
    generations = {entry.generation for entry in rows if entry.activity is Activity.TRAINING}
    if len(generations) > 1:
        found.append(f"ranks are in different generations {sorted(map(str, generations))}: they are just forming again")
    return found


def size_of(workers: Object) -> int:
    """Return how many workers a StatefulSet or a Job is to have."""
    return int(workers["spec"].get("replicas", workers["spec"].get("parallelism", 0)))


def progress_of(workers: Sequence[Object]) -> str | None:
    """Return how far a job is, in its leading rank's words, from its workers' StatefulSets or Jobs."""
    notes = (one["metadata"].get("annotations", {}).get(PROGRESS) for one in workers)
    return next((str(note) for note in notes if note), None)


def job_row(name: str, workers: Sequence[Object]) -> list[str]:
    """Return a job's row in the list of jobs, from its workers' StatefulSets or Jobs."""
    wanted = sum(map(size_of, workers))
    ready = sum(one.get("status", {}).get("readyReplicas", one.get("status", {}).get("active")) or 0 for one in workers)
    return [name, str(wanted), str(ready), progress_of(workers) or "-"]


def _labels(samples: Samples, metric: str, label: str) -> list[str]:
    """Return the values of a label among the samples of a metric."""
    found = []
    for name in samples:
        base, _, labels = name.partition("{")
        if base == metric:
            pairs = [pair.partition("=") for pair in labels.rstrip("}").split(",")]
            found += [value for key, _, value in pairs if key == label]
    return found


def _rate(before: Samples, after: Samples, seconds: float) -> float | None:
    """Return the samples per second between two times, if they are known."""
    name = "horizonml_rank_samples_total"  # the other counter moves at the first stage alone
    if name not in before or name not in after or seconds <= 0 or after[name] < before[name]:
        return None
    return (after[name] - before[name]) / seconds


def _split(before: Samples, after: Samples) -> list[float | None]:
    """Return the shares of compute, transfer and wait, of all steps so far if none ended between the two times."""
    names = [f"horizonml_step_phase_seconds_sum{{phase={phase}}}" for phase in PHASES]
    recent = [after.get(name, 0.0) - before.get(name, 0.0) for name in names]
    for parts in (recent, [after.get(name, 0.0) for name in names]):
        if min(parts) >= 0 and sum(parts) > 0:
            return [part / sum(parts) for part in parts]
    return [None, None, None]


class PodState(StrEnum):
    """How far a pod has come, as a word for people."""

    MISSING = "Missing"
    PENDING = "Pending"
    NO_IMAGE = "No image"
    MISCONFIGURED = "Misconfigured"
    RUNNING = "Running"
    READY = "Ready"
    ENDED = "Ended"
    COMPLETE = "Complete"  # and is not started again
    TERMINATING = "Terminating"
    OTHER = "Unknown"


@dataclass(frozen=True)
class PodCondition:
    """How a pod is, and what is wrong with it, if something is."""

    state: PodState
    problem: str | None = None
    detail: str | None = None  # Kubernetes' own word, where it says more than the state
    fix: str | None = None  # what to do about the problem, where other pods may need the same

    @property
    def phase(self) -> str:
        """Return the pod's condition in a word or two."""
        return self.detail or self.state.value


def condition(
    pod: Object, nodes: Sequence[Object], pods: Sequence[Object], events: Sequence[Object] = ()
) -> PodCondition:
    """Return a worker's condition; `pods` are all pods on the nodes, and `events` all Events of the pod's namespace."""
    name, space = str(pod["metadata"]["name"]), str(pod["metadata"].get("namespace", "NAMESPACE"))
    status = pod["status"]
    if pod["metadata"].get("deletionTimestamp"):
        return PodCondition(PodState.TERMINATING)
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
        reason = waiting.get("reason", "")
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
            return PodCondition(
                PodState.NO_IMAGE,
                f"{name}: the image {container['image']} cannot be pulled on node {pod['spec'].get('nodeName', '?')}; "
                "push it to a registry that the node reaches, load it into the node, or name another with --image",
            )
        if reason == "CreateContainerConfigError":
            why = str(waiting.get("message", reason))
            return PodCondition(PodState.MISCONFIGURED, f"{name}: {why}", fix=_remedy(why, space))
        if (state.get("terminated") or {}).get("exitCode") == 0:
            return PodCondition(PodState.COMPLETE if status.get("phase") == "Succeeded" else PodState.ENDED)
        if reason == "CrashLoopBackOff" or "terminated" in state:
            why = f"{name}: {_ending(pod, ended)}"
            return PodCondition(PodState.ENDED, why, reason or None, _fix(pod, ended))
        if "running" in state:
            known = next((c for c in status.get("conditions") or [] if c["type"] == "Ready"), {"status": "False"})
            ready, again = known["status"] == "True", container.get("restartCount", 0)
            was_ready = known.get("lastTransitionTime", "") > (state["running"].get("startedAt") or "9")
            if ready or was_ready or not again:  # a worker that has been in the group again has no problem any more
                return PodCondition(PodState.READY if ready else PodState.RUNNING)
            times = "once" if again == 1 else f"{again} times"
            why = _ending(pod, ended) if ended else "Kubernetes does not know why it ended"
            why = f"{name}: restarted {times}; the last time {why}"
            return PodCondition(PodState.RUNNING, why, fix=_fix(pod, ended))
    for entry in status.get("conditions") or []:
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            why = _not_scheduled(pod, entry.get("message", ""), nodes, pods, events)
            return PodCondition(PodState.PENDING, f"{name}: {why}", fix=_remedy(why, space))
    warning = _warning(events, kind="Pod", name=name, uid=pod["metadata"].get("uid"))
    if status.get("phase") == "Pending" and warning is not None:
        fix = _remedy(warning, space) or f"kubectl -n {space} describe pod {name}"
        return PodCondition(PodState.MISCONFIGURED, f"{name}: {warning}", fix=fix)
    # A pod that was evicted, or whose node has shut down, has no container that could tell.
    reason = status.get("reason")
    problem = f"{name}: {reason}: {status.get('message') or 'no message'}" if reason else None
    return PodCondition(PodState.OTHER, problem, status.get("phase"))


def missing(name: str, events: Sequence[Object]) -> PodCondition:
    """Return the condition of a pod that is not there, with the reason why it could not be made, if there is one."""
    told = [one for one in events if one.get("reason") == "FailedCreate" and f" {name} " in one.get("message", "")]
    if not told:
        return PodCondition(PodState.MISSING)
    why, space = printable(max(told, key=_when)["message"]), told[0]["metadata"].get("namespace", "NAMESPACE")
    return PodCondition(PodState.MISSING, f"{name}: {why}", fix=_remedy(why, space))


def _when(event: Object) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def _warning(events: Sequence[Object], **about: str | None) -> str | None:
    """Return what is wrong with an object by its newest Events, unless something has gone well since.

    Of several warnings, one that names what is missing says more than that it has been waited for in vain.
    """
    own = [one for one in events if about.items() <= one["involvedObject"].items()]
    recent = takewhile(lambda event: event.get("type") == "Warning", sorted(own, key=_when, reverse=True))
    found = [printable(str(event.get("message"))) for event in recent]
    return next(filter(_ABSENT.search, found), found[0] if found else None)


_ABSENT = re.compile(r'\b(secret|configmap|serviceaccount|storageclass)(?:\.storage\.k8s\.io)? "([^"]+)" not found')


def _remedy(problem: str, namespace: str) -> str | None:
    """Return what to do about an object that is not there, None if the problem is another one."""
    absent = _ABSENT.search(problem)
    if absent is None:
        return None
    if absent[1] == "storageclass":
        return (
            "name one of `kubectl get storageclass` with --storage-class; a claim keeps its class, so first delete "
            f"those that are Pending (kubectl -n {namespace} delete pvc CLAIM)"
        )
    if absent[1] == "secret" and absent[2].endswith("-token"):
        job = absent[2].removesuffix("-token")
        return f"make the token: horizonml token --secret {job} | kubectl apply --namespace {namespace} -f -"
    return f"make it (kubectl -n {namespace} create {absent[1]} --help), or apply the job's manifests again"


_OUT_OF_MEMORY = "OOMKilled"  # the exit code does not say so: every SIGKILL ends with the same one


def _ending(pod: Object, ended: Object) -> str:
    """Return why a container has ended: the reason and exit code that Kubernetes gives, and what the worker reported.

    A worker writes its error into its termination message (see `horizonml.runtime.process.ENDING`).
    """
    code, reason = ended.get("exitCode"), ended.get("reason")
    at = f" at {ended['finishedAt']}" if "finishedAt" in ended else ""
    facts = ", ".join(part for part in (reason if reason != "Error" else None, f"exit code {code}") if part)
    if reason == _OUT_OF_MEMORY:
        limit = _memory_limit(pod)
        had = f"limit {limit}" if limit is not None else "no limit but the node's memory"
        return f"it ran out of memory{at} ({facts}; {had})"
    if code == 128 + signal.SIGKILL:
        return (
            f"it was killed{at} ({facts}) by SIGKILL; Kubernetes reports no lack of memory, and the worker's log says "
            "how much it used"
        )
    number = ended.get("signal") or (code - 128 if isinstance(code, int) and code > 128 else None)
    if number:
        return f"it was killed{at} ({facts}) by {explain_signal(number)}"
    message = printable(str(ended.get("message") or ""))
    return f"it ended{at} ({facts})" + (f": {message}" if message else "; see its log")


def _memory_limit(pod: Object) -> str | None:
    """Return the memory limit of a worker as its manifest has it, or None without one."""
    limit = pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory")
    return None if limit is None else str(limit)


def _fix(pod: Object, ended: Object) -> str | None:
    """Return what to do about a container that has ended, where that does not depend on the pod."""
    if ended.get("reason") != _OUT_OF_MEMORY:
        return None
    raised = "raise the limit with --memory" if _memory_limit(pod) is not None else "use nodes with more memory"
    return (
        f"{raised}, use more workers with strategy pipeline or auto, or lower batch_size; `horizonml plan JOB` shows "
        "what every rank needs, and the workers' logs say how much they used"
    )


def _not_scheduled(
    pod: Object, message: str, nodes: Sequence[Object], pods: Sequence[Object], events: Sequence[Object]
) -> str:
    """Return why a pod was not placed on a node; Kubernetes says it as text only."""
    if "PersistentVolumeClaim" in message or "persistentvolumeclaim" in message:
        claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"].get("volumes", [])
                  if "persistentVolumeClaim" in volume]  # fmt: skip
        told = filter(None, (_warning(events, kind="PersistentVolumeClaim", name=claim) for claim in claims))
        if why := next(told, None):
            return f"no disk for claim {', '.join(claims)}: {why}"
        return (
            f"no disk for claim {', '.join(claims)}; is there a default storage class (kubectl get storageclass)? Name "
            "one with --storage-class"
        )
    nodes = [node for node in nodes if _may_run(node, pod)]
    for resource in ("memory", "cpu"):
        if re.search(rf"Insufficient {resource}", message) and nodes:
            asked = requests(pod, resource)
            node, free, total = max(
                ((str(n["metadata"]["name"]), *room(n, pods, resource)) for n in nodes), key=lambda entry: entry[1]
            )
            return (
                f"asks for {resource} {amount(asked, resource)}; the nearest node {node} has "
                f"{amount(free, resource)} left of {amount(total, resource)}; lower --{resource}, use fewer workers, "
                "or add a node"
            )
    return message or "not scheduled yet"


def _may_run(node: Object, pod: Object) -> bool:
    """Return whether a node takes a pod, were there room for it: by its taints, and by the pod's selector."""
    tolerated = {one.get("key") for one in pod["spec"].get("tolerations") or []}
    taints = {one["key"] for one in node["spec"].get("taints") or [] if one["effect"] != "PreferNoSchedule"}
    labels = node["metadata"].get("labels") or {}
    return taints <= tolerated and (pod["spec"].get("nodeSelector") or {}).items() <= labels.items()


def requests(pod: Object, resource: str) -> float:
    """Return what a pod asks for, in bytes or cores."""
    return float(
        sum(
            parse_quantity(container.get("resources", {}).get("requests", {}).get(resource, "0"))
            for container in pod["spec"]["containers"]
        )
    )


def room(node: Object, pods: Sequence[Object], resource: str) -> tuple[float, float]:
    """Return what a node has left beside the pods on it, and what it has at all, in bytes or cores."""
    total = float(parse_quantity(node["status"]["allocatable"][resource]))
    name = node["metadata"]["name"]
    here = [pod for pod in pods if pod["spec"].get("nodeName") == name]
    living = [pod for pod in here if pod["status"].get("phase") not in ("Succeeded", "Failed")]
    return total - sum(requests(pod, resource) for pod in living), total


def amount(value: float, resource: str) -> str:
    """Return an amount as people write it in manifests."""
    if resource == "cpu":
        return f"{value:.1f}".rstrip("0").rstrip(".")
    for unit, size in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}"
