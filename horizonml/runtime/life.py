"""Holds what a rank keeps from one group to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horizonml.data.dataset import Data, DataInfo
from horizonml.data.workers import Processes, Workers, workers_for
from horizonml.files import cache_folder
from horizonml.job.schema import Job
from horizonml.machine.host import rss_bytes
from horizonml.machine.sensors import Condition
from horizonml.machine.signals import StopRequest
from horizonml.plan.plan import PLAIN, Execution
from horizonml.runtime.agreement import Agreed, Measured
from horizonml.state.mirror import Mirror
from horizonml.state.runfolder import RunFolder
from horizonml.state.train_state import TrainState
from horizonml.telemetry.lifeline import Lifeline
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.record import Observer
from horizonml.telemetry.recorder import Outage
from horizonml.telemetry.sinks import Feeds

if TYPE_CHECKING:
    from horizonml.state.backup import Backup


@dataclass(frozen=True)
class Loaded:
    """Holds the parts of the data set that this rank has read."""

    data: Data
    inputs: bool
    targets: bool


@dataclass(frozen=True)
class Last:
    """Describes the group before, to those who were its members."""

    generation: int
    members: list[int]  # the ranks as they were started
    mirror: Mirror
    execution: Execution = PLAIN  # how layers ran here


@dataclass
class Life:
    """What a rank keeps from one group to the next."""

    job: Job
    rank: int  # as it was started
    world_size: int  # as the job was started
    metrics: Metrics
    stop: StopRequest
    folder: RunFolder
    fresh: bool  # whether the run is to start over
    lifeline: Lifeline
    feeds: Feeds
    backup: Backup | None = None
    idle: int = field(default_factory=rss_bytes)  # bytes of this process before it has a model
    taken: int | None = None  # bytes of this process before it has layers
    state: TrainState | None = None
    data: Loaded | None = None
    workers: Processes | None = None  # that load samples, from one group to the next
    info: DataInfo | None = None  # of the data that the state is for
    plans: dict[tuple[int, ...], Agreed] = field(default_factory=dict)  # made so far, by the ranks as they were started
    measured: Measured | None = None
    measured_for: list[int] = field(default_factory=list)  # the ranks that were measured, as they were started
    threads: int | None = None
    execution: Execution | None = None  # how layers run here
    last: Last | None = None  # the group before
    outage: Outage | None = None  # since a loss, until the first step after it
    awaited: float | None = None  # since when disks of other machines are waited for, by `monotonic`
    # Set once all ranks have agreed on it: an earlier run is moved away, and this one begins, only once.
    moved_away: bool = False
    begun: bool = False
    steps: int = 0  # done by this process
    started: float | None = None  # when this process began to train, by `monotonic`
    newest_checkpoint: int | None = None
    observer: Observer | None = None  # of rank 0's records
    condition: Condition = field(default_factory=Condition)  # of this rank's device, compared with that at first

    def measured_among(self, ranks: Sequence[int]) -> Measured | None:
        """Return what was measured of some ranks, as they were started, if all of them were."""
        if self.measured is None or not set(ranks) <= set(self.measured_for):
            return None
        return self.measured.among([self.measured_for.index(rank) for rank in ranks])

    def workers_for(self, data: Data, inputs: bool, targets: bool) -> Workers:
        """Return what loads samples for a group. Processes that load them for the next group, too, are not ended."""
        spec, cache = self.job.data, cache_folder() / "data"
        if self.workers is not None and not self.workers.goes_on(spec, data, cache):
            self.workers.close()
            self.workers = None
        if self.workers is not None and (inputs or targets):
            return self.workers
        found = workers_for(spec, data, cache, inputs, targets)
        self.workers = found if isinstance(found, Processes) else self.workers
        return found

    def close(self) -> None:
        """End what lives as long as the process."""
        if self.workers is not None:
            self.workers.close()
        if self.backup is not None:
            self.backup.close(self.stop.wanted)
        self.lifeline.end()
        self.feeds.close()
