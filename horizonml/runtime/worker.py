"""The life of one rank: meet the others, agree on a plan, train, leave; or meet again when one of them is lost.

Ranks on other machines are reached through this process's tunnel, and a watch reports those that are not reached.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from ipaddress import ip_address

from horizonml.comm.group import Group
from horizonml.comm.tunnel.client import Links, Tunnel, TunnelGone, TunnelPeer, link_port
from horizonml.comm.work import Moves
from horizonml.errors import HorizonError, PeerLost, RendezvousError, is_out_of_memory
from horizonml.job.schema import Job
from horizonml.machine.accelerator import computing
from horizonml.machine.emulation import emulated_host, is_emulated
from horizonml.machine.host import device_name, keep_freed_memory, machine_id, raise_descriptor_limit
from horizonml.machine.network import AddressProbe
from horizonml.machine.signals import Cancelled, StopRequest
from horizonml.rendezvous.client import Endpoint
from horizonml.rendezvous.identity import Identity, local_rank
from horizonml.rendezvous.meeting import JobComplete, JobReplaced, RendezvousSettings, meet
from horizonml.rendezvous.membership import Membership
from horizonml.rendezvous.messages import Departure, Fingerprint, Lost
from horizonml.rendezvous.places import Lobby, MeetingPlaces, Standby
from horizonml.runtime.agreement import prepare
from horizonml.runtime.checks import use_device
from horizonml.runtime.command import job_files, tls_of, token_of_rank
from horizonml.runtime.generation import Generation
from horizonml.runtime.life import Life
from horizonml.runtime.outcome import Outcome
from horizonml.runtime.watchdog import Watchdog
from horizonml.security.spec import SecuritySpec
from horizonml.security.token import Token
from horizonml.state.runfolder import RunFolder
from horizonml.state.shards import completed
from horizonml.state.train_state import TrainState
from horizonml.telemetry.lifeline import Lifeline, explain_last
from horizonml.telemetry.metrics import Metrics
from horizonml.telemetry.record import Observer
from horizonml.telemetry.recorder import Outage
from horizonml.telemetry.sinks import Feeds

_END_SECONDS = 1.0  # for a tunnel to end, which may have other ranks' connections to carry
_STILL_SECONDS = 0.5  # without a message, after which a rank looks whether it reaches the others
_PROBE_SECONDS = 3.5  # for their answers: longer than a link that flaps, or has a long queue, takes
_LOOK_SECONDS = 0.05
_EACH_SECONDS = 0.02  # for each other machine, which the looks at it are apart


class Linking:
    """Holds the tunnel of this process, through all the groups that it is a member of."""

    def __init__(self, security: SecuritySpec, token: Token | None) -> None:
        """Protect links between machines with this token; without one they are as readable as the network is."""
        self._security, self._token = security, token
        self._tunnel: Tunnel | None = None
        self._place = ("", 0)
        self._failed = False  # the last time

    def between(self, members: Sequence[Fingerprint], rank: int) -> Links | None:
        """Return the links of a group, None if it needs none.

        Raises SecurityError if the port cannot be had, and PeerLost if the tunnel's process cannot be started: it may
        have been killed, or the machine may be busy for a moment, so the ranks meet again. The second time in a row
        that is a RendezvousError, so that the others go on without this rank.
        """
        if self._token is None or len({member.host_id for member in members}) == 1:
            return None
        place = members[rank].address, members[rank].link_port
        try:
            tunnel = self._open(self._token, place)
        except (TunnelGone, OSError) as error:
            words = f"this machine cannot be linked to the others: {error}"
            if not self._failed:
                self._failed = True
                raise PeerLost(words) from error
            raise RendezvousError(
                f"{words}; that was the second time in a row, and this machine may be out of memory or processor time. "
                "Let it do less beside the training, or start fewer ranks on it, and start this one again"
            ) from error
        self._failed = False
        return Links([TunnelPeer(one.host_id, one.address, one.link_port) for one in members], tunnel)

    def _open(self, token: Token, place: tuple[str, int]) -> Tunnel:
        """Return the tunnel, which serves at this place. Raises SecurityError, TunnelGone."""
        if self._tunnel is None or place != self._place:  # the machine may be in another network than before
            self.close()
            self._tunnel, self._place = Tunnel(token, *place, self._security.encrypt), place
        else:
            self._tunnel.ensure()
        return self._tunnel

    def counted(self) -> Mapping[str, float]:
        """Return what the tunnel has counted so far, by metric; nothing if there is none."""
        tunnel = self._tunnel  # which the rank's own thread may let go of meanwhile
        if tunnel is None:
            return {}
        usage = tunnel.usage()
        return {
            "link_sent_bytes": usage.sent,
            "link_received_bytes": usage.received,
            "link_cpu_seconds": usage.seconds,
            "link_refused": usage.refused,
        }

    def close(self) -> None:
        """Let go of the tunnel."""
        if self._tunnel is not None:
            self._tunnel.close(_END_SECONDS)
            self._tunnel = None


def _packed(one: Fingerprint) -> bytes:
    """Return a rank's address as gloo compares them, or nothing if it has stated something else."""
    with suppress(ValueError):
        return ip_address(one.address).packed
    return b""


class LinkWatch(threading.Thread):
    """Reports which ranks on other machines this one does not reach while it waits for a message.

    A link that is cut closes no connection: without this, ranks would wait as long as a step may take.
    """

    def __init__(
        self,
        members: Sequence[Fingerprint],
        rank: int,
        tunnelled: bool,
        moves: Moves,
        report: Callable[[Sequence[int]], None],
    ) -> None:
        """Watch the links of the member `rank` to the others; `report` gets ranks as they were started.

        A link is watched from the end that connects, because a firewall may close the other direction: through tunnels
        that is the higher rank, and else gloo lets the higher address connect.
        """
        super().__init__(name="links", daemon=True)
        own = members[rank]
        lower = members[:rank] if tunnelled else [one for one in members if _packed(one) < _packed(own)]
        far = [one for one in lower if one.host_id != own.host_id and _packed(one)]
        self._ranks = {one.rank: (one.address, one.link_port) for one in far}
        self._moves, self._report, self._over = moves, report, threading.Event()
        if far:
            self.start()

    def end(self) -> None:
        """Report nothing more."""
        self._over.set()

    def run(self) -> None:
        """Look until the group is over."""
        pause = max(_STILL_SECONDS, _EACH_SECONDS * len(self._ranks))
        seen, since = self._moves.count, time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            if self._moves.count != seen:
                seen, since = self._moves.count, time.monotonic()
            elif time.monotonic() - since >= pause:
                silent = self._silent(seen)
                if silent and not self._over.is_set():
                    self._report(silent)
                since = time.monotonic()

    def _silent(self, seen: int) -> list[int]:
        """Return the ranks that do not answer, as long as no message comes."""
        until = time.monotonic() + _PROBE_SECONDS
        with closing(AddressProbe(self._ranks.values())) as probe:
            while probe.silent and self._moves.count == seen and not self._over.wait(_LOOK_SECONDS):
                if time.monotonic() >= until:
                    return [rank for rank, address in self._ranks.items() if address in probe.silent]
                probe.look()
        return []


_ELASTIC_BEGIN_SECONDS = 60.0  # longer than nodes that pull an image at the same time are apart
_OWN_DESCRIPTORS, _DESCRIPTORS_PER_PEER = 32, 4  # that a rank has open at a time, at least


def settings_for(job: Job, elastic: bool = False) -> RendezvousSettings:
    """Return what a rank of a job joins for.

    In an `elastic` run the number of workers changes while they run. If the job says nothing else, as many may take
    part as its strategy allows; and once there is a checkpoint, those that are left after all were stopped begin
    without those that come no more.
    """
    parallel = job.parallel
    most, begin_with, begin_after = parallel.max_workers, parallel.min_workers, RendezvousSettings.begin_after
    if elastic and parallel.stages is None:
        most = parallel.most_elastic()
        if begin_with is None and any((job.run_folder / "checkpoints").glob("*")):
            begin_with, begin_after = parallel.min_world_size(), _ELASTIC_BEGIN_SECONDS
    return RendezvousSettings(
        job.name,
        job.digest(),
        job.rendezvous.timeout,
        job.rendezvous.replace_timeout,
        parallel.min_world_size(),
        most or 0,
        begin_with or 0,
        begin_after,
        job_files(),
        link_port(job.security.port),
    )


class Worker:
    """One rank of a job, through all the groups it is a member of."""

    def __init__(
        self,
        job: Job,
        identity: Identity,
        endpoint: Endpoint | None,
        metrics: Metrics,
        stop: StopRequest,
        observer: Observer | None = None,
        settings: RendezvousSettings | None = None,
        lobby: Lobby | None = None,
    ) -> None:
        """`endpoint` is the rendezvous service's; None for a world of one. Rank 0 hands its records to `observer`.

        The rank joins with these `settings`, by default those of a job whose number of workers stays as it is. Where
        new devices may come to the run, the `lobby` takes them in when the service is gone.
        """
        self._lobby = lobby
        self._settings = settings or settings_for(job)
        self._observer = observer
        self._job, self._identity, self._endpoint = job, identity, endpoint
        self._places: MeetingPlaces | None = None
        self._metrics, self._stop = metrics, stop
        metrics.wanted(identity.world_size)
        self._rank = identity.rank  # in the group that there is, or was last
        self._life: Life | None = None
        self._broke_at = 0.0  # when the last group broke, a time of `monotonic`
        self._linking = Linking(job.security, token_of_rank() if endpoint is not None else None)
        metrics.link(self._linking.counted)

    @property
    def newest_checkpoint(self) -> int | None:
        """The step of the newest checkpoint, if there is any."""
        return self._life.newest_checkpoint if self._life is not None else None

    @property
    def step(self) -> int:
        """The number of steps that this rank's state has been trained for."""
        return self._life.state.step if self._life is not None and self._life.state is not None else 0

    def run(self, fresh: bool, rejoin: bool) -> Outcome:
        """Train to the end. Raises HorizonError.

        With `rejoin`, when another rank is lost or stops, this one meets the others again and goes on with the state in
        memory, or from the newest checkpoint if that is not complete; otherwise that ends it, too.
        """
        try:
            return self._run(fresh, rejoin)
        except Exception as error:
            if self._life is not None and self._rank == 0:
                self._life.feeds.kubernetes.trouble(str(error) or type(error).__name__, ends=True)
            raise
        finally:
            self._linking.close()
            if self._places is not None:
                self._places.close()
            if self._life is not None:
                self._life.close()

    def _run(self, fresh: bool, rejoin: bool) -> Outcome:
        keep_freed_memory()
        job, identity = self._job, self._identity
        raise_descriptor_limit(_OWN_DESCRIPTORS + _DESCRIPTORS_PER_PEER * (identity.world_size - 1))
        folder = RunFolder(job.run_folder, identity.rank, job.name, job.checkpoint.enabled)
        story = explain_last(job.run_folder, identity.rank)
        if story is not None:
            print(story, file=sys.stderr, flush=True)
        lifeline = Lifeline(job.run_folder, identity.rank)
        feeds = Feeds(job.telemetry, job.run_folder)
        life = Life(job, identity.rank, identity.world_size, self._metrics, self._stop, folder, fresh, lifeline, feeds)
        self._life, life.observer = life, self._observer
        if not fresh and completed(job.run_folder / "checkpoints", job):
            return Outcome.ALREADY_COMPLETE
        use_device(job, local_rank(os.environ), self.say_waiting)
        prepared = prepare(job)
        if prepared is not None:
            life.info, local = prepared[0], job.parallel.may_take_local_steps
            life.state = TrainState(prepared[1], job.optimizer, job.ema, local, device=computing().device)
        if self._endpoint is None:
            return self._train(life, None)
        membership, fruitless = None, 0
        settings = self._settings
        # Ranks that end with each other need no service that outlives theirs.
        places = self._places = MeetingPlaces(
            self._endpoint, Standby(tls_of(token_of_rank()), self._lobby) if rejoin else None
        )
        while not self._stop.wanted:
            before = life.steps
            old = membership
            try:
                membership = meet(identity, settings, places, self, membership, lambda: self._stop.wanted)
            except Cancelled:
                return Outcome.STOPPED_WAITING
            except JobComplete:
                return Outcome.COMPLETE_WITHOUT
            except JobReplaced:
                self._stop.replace()
                return Outcome.STOPPED
            self._rank = membership.rank
            membership.on_replaced(self._stop.replace)
            if life.outage is not None and old is not None:
                # A rank that was taken for lost may be back already.
                life.outage = replace(life.outage, lost=_missing(old, membership) or life.outage.lost)
            try:
                outcome = self._train(life, membership, rejoin)
            except PeerLost as error:
                named = membership.name_lost(error)
                self._note_loss(life, membership, error)
                fruitless = 0 if life.steps > before else fruitless + 1
                if self._stop.wanted:
                    break
                if not rejoin or named.ends_job or fruitless >= job.rendezvous.max_attempts:
                    raise named from error
                print(f"rank {identity.rank}: {named}; meeting the others again", file=sys.stderr, flush=True)
                left = {one.rank for one in membership.members} - {one.rank for one in membership.lost}
                if identity.rank == min(left, default=None):
                    life.feeds.kubernetes.trouble(str(named), ends=False)
            else:
                membership.leave(*_parting(outcome))
                if outcome is not Outcome.RE_FORM:
                    return outcome
                if not rejoin:
                    break
                self.say("another rank stops or joins; meeting again")
            self._metrics.waiting([])
        return Outcome.STOPPED

    def _note_loss(self, life: Life, membership: Membership, error: PeerLost) -> None:
        """Note when the loss of ranks became known, for the record of the recovery."""
        lost = [member.rank for member in membership.lost]  # more may be known once the others have met
        silent = noticed_after(membership.lost, error, self._job.rendezvous.step_timeout)
        self._metrics.lost(max(1, len(lost)), silent)
        step = life.state.step + life.state.given_up if life.state is not None else 0
        if life.outage is None and life.steps:  # ranks that are lost before they have gone on belong to the same outage
            life.outage = Outage(self._broke_at, lost, silent, step)

    def say(self, text: str) -> None:
        """Tell the user, as rank 0 of the group."""
        if self._rank == 0:
            self.say_waiting(text)

    def say_waiting(self, text: str) -> None:
        """Tell the user, as every rank does about what it waits for."""
        prefix = f"rank {self._identity.rank}: " if self._identity.rank else ""
        print(prefix + text, file=sys.stderr if self._rank else sys.stdout, flush=True)

    def waiting(self, ranks: Sequence[int], first: bool) -> None:
        """Show that these ranks have not come yet."""
        self._metrics.waiting(ranks, first)

    def _train(self, life: Life, membership: Membership | None, rejoin: bool = False) -> Outcome:
        """Train as a member of one group, which takes in newcomers if its ranks can `rejoin`."""
        rank = membership.rank if membership else 0
        nodes = [member.host_id for member in membership.members] if membership else [machine_id()]
        if is_emulated():
            nodes = [emulated_host(host, number) for number, host in enumerate(nodes)]
        names = [member.hostname for member in membership.members] if membership else [device_name()]
        started_as = [member.rank for member in membership.members] if membership else [self._identity.rank]
        others = [one for place, one in enumerate(membership.members) if place != rank] if membership else []
        life.condition.siblings = [one.pid for one in others if one.machine == machine_id()]
        store = membership.store if membership else None
        generation = membership.generation if membership else 0

        def newcomers() -> bool:
            return rejoin and membership is not None and bool(membership.newcomers)

        group, over, watch, moves = None, threading.Event(), None, Moves()
        try:
            if membership is not None:  # so that not even connecting waits for a rank that is lost
                membership.on_end(lambda ended: over.set())
            links = self._linking.between(membership.members, rank) if membership is not None else None
            if membership is not None:
                tunnelled = links is not None
                watch = LinkWatch(membership.members, rank, tunnelled, moves, membership.report_unreached)
            timeout = self._job.rendezvous.step_timeout
            group = Group(store, rank, len(nodes), timeout, nodes, over, links, moves, started_as)
            if membership is not None:
                membership.connected()
                abort = group.abort
                membership.on_end(lambda ended: abort())
            self._metrics.formed(generation, group.world_size)
            life.lifeline.begin(generation)
            meets_again = rejoin and membership is not None
            own = Generation(life, group, generation, names, newcomers, meets_again, self.say)
            if membership is None:
                return own.run()
            with Watchdog(group, group.timeout, rejoin, membership.leave, life.lifeline.end):
                return own.run()
        except BaseException as error:
            self._broke_at = time.monotonic()
            if membership is not None:  # before the connections close, so that the others find the reason
                membership.leave(*_farewell(error))
            raise
        finally:
            if watch is not None:
                watch.end()
            if group is not None:
                group.close()


def noticed_after(lost: Sequence[Lost], error: PeerLost, step_timeout: float) -> float:
    """Return for how many seconds lost ranks had been silent when their loss became known here.

    The service knows it of those that it has declared lost itself. Where the ranks find out first, a closed connection
    tells at once, as when a process is killed.
    """
    return max((one.silent for one in lost), default=step_timeout if error.timed_out else 0.0)


def _missing(before: Membership, now: Membership) -> list[int]:
    there = now.members
    return [one.rank for one in before.members if not any(one.same_process(other) for other in there)]


def _parting(outcome: Outcome) -> tuple[str, Departure]:
    match outcome:
        case Outcome.RE_FORM:
            return "meets again", Departure.AGAIN
        case Outcome.COMPLETE | Outcome.ALREADY_COMPLETE:
            return "the job is complete", Departure.COMPLETE
    return "done", Departure.DONE


def _farewell(error: BaseException) -> tuple[str, Departure]:
    if isinstance(error, PeerLost):
        return f"lost a peer: {error}", Departure.LOST_PEER
    # A mistake in the model's or the data's own code comes again, too; too little memory perhaps not.
    passing = isinstance(error, (OSError, KeyboardInterrupt, SystemExit)) or is_out_of_memory(error)
    failed = error.ends_job if isinstance(error, HorizonError) else not passing
    return str(error) or type(error).__name__, Departure.FAILED if failed else Departure.OTHER
