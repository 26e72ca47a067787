"""Combines the local steps of a global step, and the synchronisation after them, into one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horizonml.engine.clock import Span
from horizonml.engine.step import WAYS, Step, Told, Totals, Way


@dataclass(frozen=True)
class Tail:
    """Describes what came after the local steps: seconds, spans, bytes, and how far replicas were apart."""

    wall: float
    compute: float
    transfer: float
    wait: float
    spans: list[Span]
    bytes_sent: int
    divergence: float | None


def merged(steps: Sequence[Step], tail: Tail, totals: Totals, told: tuple[Told, ...]) -> Step:
    """Return one step with the given totals."""
    traffic: dict[Way, tuple[int, int]] = {}
    for way in WAYS:
        pairs = [step.traffic.get(way, (0, 0)) for step in steps]
        traffic[way] = sum(sent for sent, _ in pairs), sum(received for _, received in pairs)
    sent, received = traffic["members"]
    traffic["members"] = sent + tail.bytes_sent, received + tail.bytes_sent
    norms = [step.gradient_norm for step in steps if step.gradient_norm is not None]
    return Step(
        totals,
        sum((step.wall for step in steps), tail.wall),
        sum((step.compute for step in steps), tail.compute),
        sum((step.transfer for step in steps), tail.transfer),
        sum((step.wait for step in steps), tail.wait),
        samples=sum(step.samples for step in steps),
        entered=sum(step.entered for step in steps),
        traffic=traffic,
        divergence=tail.divergence,
        spans=[span for spans in (*(step.spans for step in steps), tail.spans) for span in spans],
        load=sum(step.load for step in steps),
        gradient_norm=norms[-1] if norms else None,
        told=told,
        local_steps=len(steps),
    )
