"""The part of a job that says where and how the ranks meet."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from horizonml.spec.base import Rule, Spec


class RendezvousSpec(Spec):
    """Where and how the ranks meet."""

    address: Annotated[str | None, Rule("is not host:port, for example 192.168.1.10:29400", always=True)] = Field(
        None,
        pattern=r"^\[?[\w.:-]+\]?:\d+$",
        description="host:port of `horizonml rendezvous`. Default: $HORIZONML_RENDEZVOUS; alone on one machine "
        "it is started for you.",
    )
    timeout: float = Field(
        120.0,
        gt=0,
        description="Seconds to wait for the service, for all ranks, and for the machines that keep missing shards of "
        "a checkpoint.",
    )
    step_timeout: float = Field(
        300.0, gt=0, description="Seconds to wait for a peer within a step before it counts as lost."
    )
    replace_timeout: float = Field(
        0.0,
        ge=0,
        description="Seconds that the others wait for the replacement of a lost rank before they go on without it "
        "(0: go on at once; a replacement that comes later is taken in). `parallel.min_workers` says how many must be "
        "left.",
    )
    max_attempts: int = Field(
        5,
        ge=0,
        description="How often in a row ranks meet again after losing one, without finishing a step in between, "
        "before they give up (0: the first lost rank ends the job).",
    )
