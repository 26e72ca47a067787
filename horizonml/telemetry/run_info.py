"""Declares the record that describes what a rank trains, where, and with which plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from horizonml.machine.host import MachineInfo
from horizonml.telemetry.fields import Amount, Count, Record, Time


class _Facts(BaseModel):
    """A part of a record; what this version does not know is kept, so that it is written and compared, too."""

    model_config = ConfigDict(extra="allow", frozen=True)


class ModelFacts(_Facts):
    """The model of a recorded job."""

    name: str


class DataFacts(_Facts):
    """The data set of a recorded job."""

    name: str
    image_size: int | None = None


class JobFacts(_Facts):
    """A recorded job, which may have been checked by another version."""

    name: str = ""
    model: ModelFacts
    data: DataFacts
    batch_size: int
    epochs: int = 1
    steps: int | None = None
    seed: int = 0


class StageFacts(_Facts):
    """A stage of a recorded plan."""

    start: int = 0  # its first layer
    stop: int = 0  # the layer after its last one
    ranks: list[int]


class PlanFacts(_Facts):
    """A recorded plan, as `Plan.to_json` describes it."""

    stages: list[StageFacts] = []
    micro_batches: int = 1
    schedule: str = ""

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank, or the first one if it holds several; -1 if it has no work."""
        return next((number for number, stage in enumerate(self.stages) if rank in stage.ranks), -1)


@dataclass(frozen=True)
class MemberFacts:
    """Says who a rank of the group is, as every rank records it of all."""

    rank: int
    started_as_rank: int  # its number in reports
    host: str = ""
    node: str | None = None  # identifies the machine
    cores: Amount = 1.0
    memory: float | None = None
    machine: MachineInfo | None = None


@dataclass(frozen=True)
class RunInfo(Record):
    """Describes what one rank trains, where, and with which plan: the first record, and one for each new group or plan.

    Records of older versions lack what has a default.
    """

    kind = "run"
    time: Time = 0.0
    rank: Count = 0  # in the group; the process may have been started as another one
    started_as_rank: Count | None = None
    world_size: Count | None = None
    generation: Count | None = None  # counts the formations of the group
    host: str = ""
    node: str | None = None  # identifies the machine
    job: JobFacts | None = None
    layers: Sequence[str] = ()  # their names
    rss_idle_bytes: Count = 0  # of this process before it had a model
    threads: Count | None = None
    cores: Amount = 1.0  # that this machine's ranks may use
    memory: float | None = None  # bytes that they may use
    machine: MachineInfo | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    plan: PlanFacts = field(default_factory=PlanFacts)
    forecast: Amount | None = None  # predicted seconds of a step, for an automatic plan
    resumed_at: Count = 0  # steps that were completed before
    expected_memory: float | None = None  # bytes that an automatic plan expects this process to need
    unigram: float | None = None  # perplexity on a held-out text of knowing how frequent each token is, and no more
    total_steps: Count | None = None  # of the whole run, unless it ends early
    total_epochs: Count | None = None
    device: str = ""  # the accelerator that the rank computes on; empty for the processor
    device_memory: float | None = None  # bytes of it that the rank may use
    members: Sequence[MemberFacts] = ()  # the ranks of the group

    @property
    def started_as(self) -> int:
        """Return the rank that the process was started as."""
        return self.rank if self.started_as_rank is None else self.started_as_rank

    @property
    def stage(self) -> int:
        """Return the rank's stage, or the first one if it holds several; -1 if it has no work."""
        return self.plan.stage_of(self.rank)

    @property
    def group(self) -> tuple[int | None, int | None]:
        """Return what the descriptions of one group's ranks have in common."""
        return self.generation, self.world_size

    @property
    def setting(self) -> tuple[int, int | None, PlanFacts]:
        """Return what steps must share to be timed together."""
        return self.rank, self.world_size, self.plan

    def of(self, member: MemberFacts) -> RunInfo:
        """Return what another member of the group would have recorded in place of this."""
        return replace(self, **vars(member), threads=None)

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        parts = {
            "job": None if self.job is None else self.job.model_dump(exclude_unset=True),
            "plan": self.plan.model_dump(exclude_unset=True),
            "machine": None if self.machine is None else asdict(self.machine),
            "members": [asdict(one) for one in self.members],
        }
        return {**super().to_json(), **parts, "stage": self.stage}
