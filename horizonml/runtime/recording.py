"""Prepares the record of a group's training: what it begins with, and who takes it down."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from horizonml.comm.expected import measure, optional
from horizonml.comm.group import Group
from horizonml.data.dataset import DataInfo
from horizonml.engine.session import Trainer
from horizonml.job.schema import Job
from horizonml.machine.accelerator import computing
from horizonml.machine.host import MachineInfo, machine_info, memory_limit, threads_per_rank, versions
from horizonml.machine.sensors import EnergyMeter
from horizonml.models.zoo import Model
from horizonml.plan.plan import PLAIN, Execution, Plan
from horizonml.planner.evaluator import Evaluator
from horizonml.planner.explain import explain
from horizonml.planner.problem import Problem
from horizonml.planner.profile import LOCAL_NETWORK, Host
from horizonml.planner.reasons import asked_for, inexact_parts
from horizonml.planner.record import DeviceFacts, Planning, write_planning
from horizonml.planner.worth import Worth
from horizonml.profiling.alone import samples_per_second
from horizonml.profiling.execution import untried
from horizonml.profiling.measure import compare_with_run, kept_profile
from horizonml.profiling.probe import turns
from horizonml.runtime.agreement import describe_problem, profile_key
from horizonml.runtime.life import Life
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.telemetry.recorder import Recorder, display_for
from horizonml.telemetry.run_info import JobFacts, MemberFacts, PlanFacts, RunInfo
from horizonml.text import count


def record_alone(life: Life, group: Group, hosts: Sequence[Host], names: Sequence[str], recorder: Recorder) -> None:
    """Measure what each device does alone, and record it beside what all do together; all ranks call this.

    The first rank of a device measures, and containers of one machine take turns. Raises PeerLost.
    """
    assert life.state is not None
    own, here = None, next(host for host in hosts if group.rank in host.ranks)
    for turn in turns(hosts):
        if group.rank == here.ranks[0] and group.rank in turn:
            threads = {torch.get_num_threads(), threads_per_rank(here.cores, 1)}
            job, execution = life.job, life.execution or PLAIN
            own = samples_per_second(life.state.model, execution, job.optimizer, job.batch_size, threads)
        group.barrier()
    everyone = group.gather_json(own, optional(measure))
    leads = [host.ranks[0] for host in hosts]
    worth = Worth(recorder.speed, [everyone[rank] for rank in leads], [names[rank] for rank in leads])
    recorder.alone(worth.together, worth.alone, worth.names)
    if worth.together:
        recorder.message(worth.words)


def run_info(
    life: Life,
    group: Group,
    number: int,
    model: Model,
    here: Host,
    members: Sequence[MemberFacts],
) -> RunInfo:
    """Return what the records of this rank begin with, in the group's formation `number` with these `members`."""
    return RunInfo(
        rank=group.rank,
        started_as_rank=life.rank,
        world_size=group.world_size,
        generation=number,
        host=members[group.rank].host,
        node=group.hosts[group.rank],
        job=JobFacts.model_validate(life.job.model_dump()),
        layers=model.chain.names,
        rss_idle_bytes=life.idle,
        threads=torch.get_num_threads(),
        cores=here.cores,
        memory=memory_limit(),
        machine=machine_info(),
        versions=versions(),
        unigram=life.info.unigram if life.info is not None else None,
        device=computing().described if computing().accelerates else "",
        device_memory=computing().memory(),
        members=members,
    )


def describe_members(
    started_as: Sequence[int], hosts: Sequence[Host], devices: Sequence[DeviceFacts]
) -> list[MemberFacts]:
    """Return who the ranks of the group are, for the records; `devices` are those of all ranks."""
    found = []
    for rank, (began_as, device) in enumerate(zip(started_as, devices, strict=True)):
        host = next(host for host in hosts if rank in host.ranks)
        memory = host.memory if math.isfinite(host.memory) else None
        machine = MachineInfo(device.processor, device.architecture)
        found.append(MemberFacts(rank, began_as, device.name, device.node, host.cores, memory, machine))
    return found


def device_facts(name: str, node: str) -> DeviceFacts:
    """Return what the other ranks should know of this rank's device and machine."""
    return DeviceFacts(name, computing().described, machine_info().architecture, node)


def record_plan(
    life: Life,
    group: Group,
    plan: Plan,
    problem: Problem | None,
    hosts: Sequence[Host],
    devices: Sequence[DeviceFacts],
    say: Callable[[str], None],
) -> None:
    """Write into the run's folder what the group trains by from now on, for those who ask what another device changes.

    `problem` is what was measured, if anything was; `devices` are those of all ranks.
    """
    assert life.state is not None
    assert life.info is not None
    measured, job, model = problem is not None, life.job, life.state.model
    problem = problem or assumed_problem(job, model, life.info, hosts, untried(job, life.execution or PLAIN))
    splits_channels = any(stage.splits_channels for stage in plan.stages)  # whose time cannot be predicted
    seconds: float | None = None
    told: tuple[str, ...] = ()
    if problem is not None and not splits_channels:
        evaluator = Evaluator(problem)
        found = evaluator.judge(plan)
        seconds = found.prediction.seconds
        if measured:
            told = tuple(reason.text for reason in explain(evaluator, found, [device.name for device in devices]))
    told = told or tuple(reason.text for reason in asked_for(inexact_parts(plan)))
    if life.state.tried is not None:
        told += life.state.tried.texts
    planning = Planning(
        job=job,
        layers=tuple(model.chain.names),
        devices=tuple(devices),
        hosts=tuple(problem.hosts if problem is not None else hosts),
        plan=plan,
        step=life.state.step,
        time=time.time(),
        started_as=tuple(group.started_as),
        problem=problem if seconds is not None else None,
        seconds=seconds,
        measured=measured and seconds is not None,
        reasons=told,
        tried=life.state.tried,
    )
    try:
        write_planning(job.run_folder, planning)
    except OSError as error:
        say(f"warning: the plan could not be written to {job.run_folder}: {error.strerror or error}")


def assumed_problem(
    job: Job, model: Model, info: DataInfo, hosts: Sequence[Host], execution: Execution
) -> Problem | None:
    """Return what a plan that needs no measurements would be made for, as far as this device was measured before.

    Its profile stands for all devices, and the links are those of ranks on one machine. Return None if it was not.
    """
    profile = kept_profile(model, profile_key(job), job.batch_size, execution)
    if profile is None:
        return None
    ranks = sum(len(host.ranks) for host in hosts)
    return describe_problem(job, model, info, [profile] * ranks, hosts, LOCAL_NETWORK)


def doubt_profile(life: Life, session: Trainer, recorder: Recorder) -> None:
    """Have this machine's profile measured again before the next plan, if the steps of a plan show that it is wrong."""
    group, plan, batch = session.group, session.plan, life.job.batch_size
    if group.hosts.index(group.hosts[group.rank]) != group.rank or math.isinf(recorder.quickest):
        return
    passes = []
    for number in plan.stages_of(group.rank):
        stage = plan.stages[number]
        if stage.splits_channels:
            return
        place = stage.ranks.index(group.rank)
        if stage.sync.steps_alone:  # in a step that has the least of it
            first, end = stage.mean_rows(batch)[place]
            passes.append((stage.start, stage.stop, max(1, math.floor(end - first))))
            continue
        for size in plan.micro_sizes(batch, batch):
            first, end = stage.rows(size)[place]
            passes.append((stage.start, stage.stop, end - first))
    execution = untried(life.job, life.execution or PLAIN)
    told = compare_with_run(session.state.model, profile_key(life.job), batch, execution, passes, recorder.quickest)
    if told is not None:
        recorder.message(told)


def recorder_for(
    life: Life,
    about: RunInfo,
    session: Trainer,
    detector: StragglerDetector | None,
    energy: EnergyMeter | None,
    source: str,
) -> Recorder:
    """Return what takes down all that happens from now on, by this plan; `source` is the word for going on."""
    job, plan, done = life.job, session.plan, session.state.step
    assert life.info is not None
    per_epoch = -(-life.info.train // job.batch_size)
    steps, epochs = job.total_steps(per_epoch), job.total_epochs(per_epoch)
    display = display_for(about.rank, epochs, steps, done, about.unigram)
    forecast = detector.forecast if detector is not None else None
    expected = (
        (life.taken or life.idle) + forecast.memory[about.rank] if forecast is not None and forecast.memory else None
    )
    life.lifeline.expected(expected)
    seconds = forecast.seconds if forecast is not None else None
    about = replace(
        about,
        plan=PlanFacts.model_validate(plan.to_json()),
        forecast=seconds,
        resumed_at=done,
        expected_memory=expected,
        total_steps=steps,
        total_epochs=epochs,
    )
    file = job.run_folder / f"rank-{life.rank}.jsonl"
    feeds = life.feeds if about.rank == 0 else None
    given = life.metrics, energy, life.lifeline, feeds, life.folder.restore
    recorder = Recorder(file, display, about, job.telemetry.timeline_every, *given)
    if about.rank == 0 and life.observer is not None:
        recorder.observer = life.observer
    life.metrics.started(about, job, plan, done)
    if 0 < done < steps:
        recorder.message(f"{source} from step {done} of {steps}")
    if about.rank:
        others = count(session.group.world_size - 1, "other rank")
        held = [
            f"stage {number + 1} of {len(plan.stages)}, layers {plan.stages[number].start} to "
            f"{plan.stages[number].stop - 1}"
            for number in session.stages
        ]
        does = f"trains {'; '.join(held)}" if held else "is left out by this plan, and waits"
        print(
            f"rank {life.rank}: connected to {others}; {does}, from step {done} of {steps}",
            flush=True,
        )
    return recorder
