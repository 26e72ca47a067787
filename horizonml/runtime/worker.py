"""The life of one rank: meet the others, agree on a plan, train, leave; or meet again when one of them is lost."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from horizonml.comm.group import Group
from horizonml.errors import HorizonError, PeerLost, is_out_of_memory
from horizonml.job.schema import Job
from horizonml.machine.host import machine_id
from horizonml.machine.memory import keep_freed_memory
from horizonml.machine.signals import Cancelled, StopRequest
from horizonml.rendezvous.identity import Identity
from horizonml.rendezvous.meeting import RendezvousSettings, meet
from horizonml.rendezvous.membership import Membership
from horizonml.rendezvous.messages import Departure
from horizonml.runtime.generation import Generation, Life
from horizonml.runtime.outcome import Outcome
from horizonml.state.runfolder import RunFolder
from horizonml.state.shards import completed
from horizonml.telemetry.metrics import Metrics


def settings_for(job: Job) -> RendezvousSettings:
    """Return what a rank of a job joins for."""
    parallel = job.parallel
    return RendezvousSettings(
        job.name,
        job.digest(),
        job.rendezvous.timeout,
        job.rendezvous.replace_timeout,
        parallel.min_world_size(),
        parallel.max_workers or 0,
        parallel.min_workers or 0,
    )


class Worker:
    """One rank of a job, through all the groups it is a member of."""

    def __init__(
        self, job: Job, identity: Identity, address: tuple[str, int] | None, metrics: Metrics, stop: StopRequest
    ) -> None:
        """`address` is the rendezvous service's; None for a world of one."""
        self._job, self._identity, self._address = job, identity, address
        self._metrics, self._stop = metrics, stop
        metrics.wanted(identity.world_size)
        self._rank = identity.rank  # in the group that there is, or was last
        self._life: Life | None = None

    @property
    def newest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint, if there is any."""
        return self._life.newest_checkpoint if self._life is not None else None

    def run(self, fresh: bool, rejoin: bool) -> Outcome:
        """Train to the end. Raises HorizonError.

        With `rejoin`, when another rank is lost or stops, this one meets the others again and goes on from the newest
        checkpoint; otherwise that ends it, too.
        """
        keep_freed_memory()
        job, identity = self._job, self._identity
        folder = RunFolder(job.run_folder, identity.rank, job.name, job.checkpoint.enabled)
        life = Life(job, identity.rank, identity.world_size, self._metrics, self._stop, folder, fresh)
        self._life = life
        if not fresh and completed(job.run_folder / "checkpoints", job):
            return Outcome.ALREADY_COMPLETE
        if self._address is None:
            return self._train(life, None)
        membership, fruitless = None, 0
        settings = settings_for(job)
        while not self._stop.wanted:
            before = life.steps
            try:
                membership = meet(identity, settings, self._address, self, membership, lambda: self._stop.wanted)
            except Cancelled:
                return Outcome.STOPPED_WAITING
            self._rank = membership.rank
            try:
                outcome = self._train(life, membership)
            except PeerLost as error:
                named = membership.name_lost(error)
                membership.leave(f"lost a peer: {named}", Departure.LOST_PEER)
                self._metrics.lost_peer()
                fruitless = 0 if life.steps > before else fruitless + 1
                if self._stop.wanted:
                    break
                if not rejoin or named.ends_job or fruitless >= job.rendezvous.max_attempts:
                    raise named from error
                self._check_recoverable(life, str(named))
                print(f"rank {identity.rank}: {named}; meeting the others again", file=sys.stderr, flush=True)
            except BaseException as error:
                # A mistake in the model's or the data's own code comes again, too; too little memory perhaps not.
                passing = isinstance(error, (OSError, KeyboardInterrupt, SystemExit)) or is_out_of_memory(error)
                failed = error.ends_job if isinstance(error, HorizonError) else not passing
                membership.leave(str(error) or type(error).__name__, Departure.FAILED if failed else Departure.OTHER)
                raise
            else:
                again = outcome is Outcome.RE_FORM
                membership.leave("meets again" if again else "done", Departure.AGAIN if again else Departure.DONE)
                if outcome is not Outcome.RE_FORM:
                    return outcome
                if not rejoin:
                    break
                self._check_recoverable(life, "another rank stops")
                self.say("another rank stops or joins; meeting again")
            self._metrics.waiting([])
        return Outcome.STOPPED

    @staticmethod
    def _check_recoverable(life: Life, reason: str) -> None:
        """Raise PeerLost if there is nothing that training could go on from."""
        if not life.job.checkpoint.enabled and life.steps:
            raise PeerLost(
                f"{reason}; the {life.steps} steps done so far are lost, because checkpoint.enabled is false: with "
                "checkpoints the others would go on"
            )

    def say(self, text: str) -> None:
        """Tell the user, as rank 0 of the group."""
        if self._rank == 0:
            self.say_waiting(text)

    def say_waiting(self, text: str) -> None:
        """Tell the user, as every rank does about what it waits for."""
        prefix = f"rank {self._identity.rank}: " if self._identity.rank else ""
        print(prefix + text, file=sys.stderr if self._rank else sys.stdout, flush=True)

    def waiting(self, ranks: Sequence[int]) -> None:
        """Show that these ranks have not come yet."""
        self._metrics.waiting(ranks)

    def _train(self, life: Life, membership: Membership | None) -> Outcome:
        """Train as a member of one group."""
        rank = membership.rank if membership else 0
        nodes = [member.host_id for member in membership.members] if membership else [machine_id()]
        names = [member.hostname for member in membership.members] if membership else [socket.gethostname()]
        started_as = [member.rank for member in membership.members] if membership else [self._identity.rank]
        store = membership.store if membership else None
        group = Group(store, rank, len(nodes), self._job.rendezvous.step_timeout, nodes)
        generation = membership.generation if membership else 0
        self._metrics.formed(generation, group.world_size)

        def newcomers() -> bool:  # who cannot be taken in without losing everything has to wait
            return membership is not None and self._job.checkpoint.enabled and bool(membership.newcomers)

        try:
            return Generation(life, group, generation, names, started_as, newcomers, self.say).run()
        finally:
            group.close()
