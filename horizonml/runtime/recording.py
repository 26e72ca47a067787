"""Prepares the record of a group's training: what it begins with, and who takes it down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.machine.energy import EnergyMeter
from horizonml.machine.host import machine_info, versions
from horizonml.machine.resources import memory_limit
from horizonml.models.zoo import Model
from horizonml.plan.plan import Plan
from horizonml.planner.hardware import Host
from horizonml.runtime.life import Life
from horizonml.runtime.stragglers import StragglerDetector
from horizonml.telemetry.progress import display_for
from horizonml.telemetry.record import RunInfo
from horizonml.telemetry.recorder import Recorder
from horizonml.text import count


def run_info(
    life: Life, group: Group, number: int, names: Sequence[str], model: Model, plan: Plan, here: Host
) -> RunInfo:
    """Return what the records of this rank begin with, in the group's formation `number`; `names` are its machines'."""
    return RunInfo(
        rank=group.rank,
        started_as_rank=life.rank,
        world_size=group.world_size,
        generation=number,
        host=names[group.rank],
        node=group.hosts[group.rank],
        job=life.job,
        layers=model.chain.names,
        rss_idle_bytes=life.idle,
        threads=torch.get_num_threads(),
        cores=here.cores,
        memory=memory_limit(),
        machine=machine_info().to_json(),
        versions=versions(),
        plan=plan,
        unigram=life.info.unigram if life.info is not None else None,
    )


def recorder_for(
    life: Life,
    about: RunInfo,
    session: Session,
    detector: StragglerDetector | None,
    energy: EnergyMeter | None,
    source: str,
) -> Recorder:
    """Return what takes down all that happens from now on, by this plan; `source` is the word for going on."""
    job, plan, done = life.job, session.plan, session.state.step
    assert life.info is not None
    per_epoch = -(-life.info.train // job.batch_size)
    steps, epochs = job.total_steps(per_epoch), job.total_epochs(per_epoch)
    display = display_for(about.rank, epochs, steps, done, life.observer, about.unigram)
    forecast = detector.forecast if detector is not None else None
    expected = (
        (life.taken or life.idle) + forecast.memory[about.rank] if forecast is not None and forecast.memory else None
    )
    life.lifeline.expected(expected)
    seconds = forecast.seconds if forecast is not None else None
    about = replace(
        about,
        plan=plan,
        forecast=seconds,
        resumed_at=done,
        expected_memory=expected,
        total_steps=steps,
        total_epochs=epochs,
    )
    file = job.run_folder / f"rank-{life.rank}.jsonl"
    feeds = life.feeds if about.rank == 0 else None
    every = job.telemetry.timeline_every
    recorder = Recorder(file, display, about, every, life.metrics, energy, life.lifeline, feeds)
    life.metrics.started(about, epochs, steps, done)
    if 0 < done < steps:
        recorder.message(f"{source} from step {done} of {steps}")
    if about.rank:
        others = count(about.world_size - 1, "other rank")
        held = [
            f"stage {number + 1} of {len(plan.stages)}, layers {plan.stages[number].start} to "
            f"{plan.stages[number].stop - 1}"
            for number in session.stages
        ]
        print(
            f"rank {life.rank}: connected to {others}; trains {'; '.join(held)}, from step {done} of {steps}",
            flush=True,
        )
    return recorder
