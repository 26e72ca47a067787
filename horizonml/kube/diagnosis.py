"""Finds out why a pod does not run, and says what to do about it.

Pods and nodes are the API's objects as plain dictionaries.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from horizonml.machine.signals import explain_signal

Object = dict[str, Any]
_UNITS = (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10))


class PodState(StrEnum):
    """How far a pod has come, as a word for people."""

    MISSING = "Missing"
    PENDING = "Pending"
    NO_IMAGE = "No image"
    MISCONFIGURED = "Misconfigured"
    RUNNING = "Running"
    READY = "Ready"
    ENDED = "Ended"
    TERMINATING = "Terminating"
    OTHER = "Unknown"


@dataclass(frozen=True)
class Condition:
    """How a pod is, and what is wrong with it, if something is."""

    state: PodState
    problem: str | None = None
    detail: str | None = None  # Kubernetes' own word, where it says more than the state
    fix: str | None = None  # what to do about the problem, where other pods may need the same

    @property
    def phase(self) -> str:
        """Return the pod's condition in a word or two."""
        return self.detail or self.state.value


def condition(pod: Object, last_words: str, nodes: Sequence[Object], pods: Sequence[Object]) -> Condition:
    """Return a worker's condition. `last_words` is the last error line of its log; `pods` are all pods on the nodes."""
    name = str(pod["metadata"]["name"])
    status = pod["status"]
    if pod["metadata"].get("deletionTimestamp"):
        return Condition(PodState.TERMINATING)
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        waiting = state.get("waiting") or {}
        ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
        reason = waiting.get("reason", "")
        if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
            return Condition(
                PodState.NO_IMAGE,
                f"{name}: the image {container['image']} cannot be pulled on node {pod['spec'].get('nodeName', '?')}; "
                "push it to a registry that the node reaches, load it into the node, or name another with --image",
            )
        if reason == "CreateContainerConfigError":
            return Condition(PodState.MISCONFIGURED, f"{name}: {waiting.get('message', reason)}")
        if reason == "CrashLoopBackOff" or "terminated" in state:
            why = f"{name}: {_ending(pod, ended, last_words)}"
            return Condition(PodState.ENDED, why, reason or None, _fix(pod, ended))
        if "running" in state:
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or [])
            again = container.get("restartCount", 0)
            if ready or not again:  # a worker that is in the group again has no problem any more
                return Condition(PodState.READY if ready else PodState.RUNNING)
            times = "once" if again == 1 else f"{again} times"
            why = _ending(pod, ended, last_words) if ended else "Kubernetes does not know why it ended"
            why = f"{name}: restarted {times}; the last time {why}"
            return Condition(PodState.RUNNING, why, fix=_fix(pod, ended))
    for entry in status.get("conditions") or []:
        if entry["type"] == "PodScheduled" and entry["status"] == "False":
            return Condition(PodState.PENDING, f"{name}: {_not_scheduled(pod, entry.get('message', ''), nodes, pods)}")
    # A pod that was evicted, or whose node has shut down, has no container that could tell.
    reason = status.get("reason")
    problem = f"{name}: {reason}: {status.get('message') or 'no message'}" if reason else None
    return Condition(PodState.OTHER, problem, status.get("phase"))


def _ending(pod: Object, ended: Object, last_words: str) -> str:
    """Return why a container has ended: the reason that Kubernetes gives, its exit code, and what lies behind it."""
    code, reason = ended.get("exitCode"), ended.get("reason")
    at = f" at {ended['finishedAt']}" if "finishedAt" in ended else ""
    facts = ", ".join(part for part in (reason if reason != "Error" else None, f"exit code {code}") if part)
    if _was_out_of_memory(ended):
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
    return f"it ended{at} ({facts})" + (f": {last_words}" if last_words else "; see its log")


def _was_out_of_memory(ended: Object) -> bool:
    """Return whether the kernel has ended a container for its memory.

    The exit code does not say so: every SIGKILL ends with the same one.
    """
    return ended.get("reason") == "OOMKilled"


def _memory_limit(pod: Object) -> str | None:
    """Return the memory limit of a worker as its manifest has it, or None without one."""
    limit = pod["spec"]["containers"][0].get("resources", {}).get("limits", {}).get("memory")
    return None if limit is None else str(limit)


def _fix(pod: Object, ended: Object) -> str | None:
    """Return what to do about a container that has ended, where that does not depend on the pod."""
    if not _was_out_of_memory(ended):
        return None
    raised = "raise the limit with --memory" if _memory_limit(pod) is not None else "use nodes with more memory"
    return (
        f"{raised}, use more workers with strategy pipeline or auto, or lower batch_size; `horizonml plan JOB` shows "
        "what every rank needs, and the workers' logs say how much they used"
    )


def _not_scheduled(pod: Object, message: str, nodes: Sequence[Object], pods: Sequence[Object]) -> str:
    """Return why a pod was not placed on a node; Kubernetes says it as text only."""
    if "PersistentVolumeClaim" in message or "persistentvolumeclaim" in message:
        claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"].get("volumes", [])
                  if "persistentVolumeClaim" in volume]  # fmt: skip
        return (
            f"no disk for claim {', '.join(claims)}; is there a default storage class (kubectl get storageclass)? Name "
            "one with --storage-class"
        )
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
    for unit, size in _UNITS:
        if abs(value) >= size:
            return f"{value / size:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}"
