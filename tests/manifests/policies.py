"""What NetworkPolicies allow, decided as Kubernetes defines it: for tests without a network plugin."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """One end of a connection: a pod, or an address outside the cluster, which has no labels."""

    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    namespace_labels: dict[str, str] = field(default_factory=dict)
    address: str = "10.244.0.9"


def allowed(documents: Sequence[Document], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection is allowed at both of its ends."""
    policies = [document for document in documents if document["kind"] == "NetworkPolicy"]
    return all(
        _side(policies, own, other, direction, peers, port, protocol)
        for own, other, direction, peers in (
            (source, target, "Egress", "to"),
            (target, source, "Ingress", "from"),
        )
    )


def connections(
    documents: Sequence[Document], pods: Mapping[str, Pod], about: Sequence[str], ports: Sequence[int]
) -> set[tuple[str, str, int]]:
    """What is allowed, by name, of all connections that have one of some pods at either end."""
    return {
        (source, target, port)
        for source in pods
        for target in pods
        for port in ports
        if (source in about or target in about) and allowed(documents, pods[source], pods[target], port)
    }


def _side(
    policies: Sequence[Document], own: Pod, other: Pod, direction: str, peers: str, port: int, protocol: str
) -> bool:
    """Whether one end allows it: no policy is about it, or a rule of one of them says so."""
    about = [
        policy["spec"]
        for policy in policies
        if own.namespace == policy["metadata"]["namespace"]
        and direction in policy["spec"]["policyTypes"]
        and _matches(policy["spec"]["podSelector"], own.labels)
    ]
    return not about or any(
        _rule(rule, peers, own, other, port, protocol) for spec in about for rule in spec.get(direction.lower(), [])
    )


def _rule(rule: Document, peers: str, own: Pod, other: Pod, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if ports and not any(entry["port"] == port and entry.get("protocol", "TCP") == protocol for entry in ports):
        return False
    return peers not in rule or any(_peer(peer, own, other) for peer in rule[peers])


def _peer(peer: Document, own: Pod, other: Pod) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        address = ipaddress.ip_address(other.address)
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(left_out) for left_out in block.get("except", [])
        )
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        if not _matches(peer["namespaceSelector"], other.namespace_labels):
            return False
    elif other.namespace != own.namespace:
        return False
    return _matches(peer.get("podSelector", {}), other.labels)


def _matches(selector: Document, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels", "matchExpressions"}, "these tests know no other kind of selector"
    expressions = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in expressions)
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )
