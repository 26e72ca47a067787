"""Enforces network policies in a kind cluster, with iptables on its nodes: its own network plugin may not.

Where the plugin does, this changes nothing: both allow the same.
"""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from tests.e2e.cluster import Cluster
from tests.manifests.policies import Document, Pod, allowed

PORTS = (
    ("TCP", 53),
    ("UDP", 53),
    ("TCP", 6443),
    ("TCP", 9090),
    ("TCP", 9400),
    ("TCP", 29400),
    ("TCP", 29401),
    ("TCP", 29402),
)
CHAIN = "NETWORK-POLICY"
FLAGS = {"Ingress": "-d", "Egress": "-s"}


class Enforcer:
    """Keeps the rules in step with pods and policies. Use it as a context: it ends with it, and takes them away."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._done = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="policies")
        self._rules: list[str] | None = None  # as the nodes have them
        # Docker does not always name the gateway of a network, so a node is asked for its own.
        routes = cluster.docker("exec", cluster.nodes()[0], "ip", "-4", "route", "show", "default")
        self._gateways = re.findall(r"^default via (\S+)", routes, re.M)

    def __enter__(self) -> Enforcer:
        self._apply()
        self._kept = self._pool.submit(self._keep)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the rules away, before the end of the context, too.

        Raises whatever has ended the thread before: without it, rules are out of date.
        """
        self._done.set()
        try:
            self._kept.result(30)
        finally:
            self._restore([])
            self._pool.shutdown(wait=False)

    def _keep(self) -> None:
        while not self._done.wait(0.5):
            self._apply()

    def _apply(self) -> None:
        found = self._found()
        pods, servers = pods_of(found), servers_of(found)
        policies = [one for one in found if one["kind"] == "NetworkPolicy"]
        closed = [(pod, direction) for pod in pods for direction in FLAGS if not _open(policies, pod, direction)]
        about = {pod.address for pod, _ in closed}
        rules = [
            f"-s {source.address} -d {target.address} -p {protocol.lower()} --dport {port} -j RETURN"
            for source in pods
            for target in (*pods, *servers)
            for protocol, port in PORTS
            if {source.address, target.address} & about and allowed(policies, source, target, port, protocol)
        ]
        # What the API server asks a pod on its own node does not come through here, and is let through elsewhere, too.
        # Where the nodes' network rewrites addresses on the way to another node's pods, it comes from the gateway.
        rules += [f"-s {address} -j RETURN" for address in (*(one.address for one in servers), *self._gateways)]
        self._restore([*rules, *(f"{FLAGS[direction]} {pod.address} -j DROP" for pod, direction in closed)])

    def _restore(self, rules: list[str]) -> None:
        if rules == self._rules:
            return
        lines = ["*filter", f":{CHAIN} - [0:0]", f"-A {CHAIN} -m conntrack --ctstate RELATED,ESTABLISHED -j RETURN"]
        text = "\n".join([*lines, *(f"-A {CHAIN} {rule}" for rule in rules), "COMMIT"])
        script = (
            f"iptables-restore --noflush <<'END'\n{text}\nEND\n"
            f"iptables -C FORWARD -j {CHAIN} 2>/dev/null || iptables -I FORWARD -j {CHAIN}"
        )
        for node in self._cluster.nodes():
            self._cluster.docker("exec", node, "sh", "-c", script)
        self._rules = rules

    def _found(self) -> list[Document]:
        kinds = "networkpolicies,endpoints,namespaces,pods"
        return list(json.loads(self._cluster.kubectl("get", kinds, "--all-namespaces", "-o", "json"))["items"])


def servers_of(found: list[Document]) -> list[Pod]:
    """The API server, which is no pod to policies."""
    ends = [one for one in found if (one["kind"], one["metadata"]["name"]) == ("Endpoints", "kubernetes")]
    parts = [part for one in ends for part in one.get("subsets", [])]
    return [Pod(address=one["ip"]) for part in parts for one in part.get("addresses", [])]  # none while it is busy


def pods_of(found: list[Document]) -> list[Pod]:
    spaces = {one["metadata"]["name"]: labels_of(one) for one in found if one["kind"] == "Namespace"}
    pods = [one for one in found if one["kind"] == "Pod" and one["status"].get("podIP")]
    alive = [one for one in pods if one["status"]["phase"] in ("Pending", "Running")]
    return [
        Pod(
            space := pod["metadata"]["namespace"],
            labels_of(pod),
            # Kubernetes adds this label by itself since 1.21.
            {"kubernetes.io/metadata.name": space, **spaces.get(space, {})},
            pod["status"]["podIP"],
        )
        for pod in alive
        if not pod["spec"].get("hostNetwork")
    ]


def labels_of(document: Document) -> dict[str, Any]:
    return dict(document["metadata"].get("labels") or {})


def _open(policies: list[Document], pod: Pod, direction: str) -> bool:
    """Whether no policy is about this pod."""
    return not any(
        pod.namespace == policy["metadata"]["namespace"]
        and direction in policy["spec"]["policyTypes"]
        and all(pod.labels.get(key) == value for key, value in policy["spec"]["podSelector"]["matchLabels"].items())
        for policy in policies
    )
