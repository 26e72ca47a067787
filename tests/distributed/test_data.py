"""Any data set with any plan: the same samples, the same parameters, whoever loads them and whatever cannot be read."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.data.choose import load
from horizonml.data.dataset import Data, stand_ins
from horizonml.data.sampler import Sampler
from horizonml.data.stream import write_index
from horizonml.data.workers import workers_for
from horizonml.errors import DataError, PeerLost
from horizonml.job.jobfile import parse
from horizonml.job.schema import Job
from horizonml.machine.signals import StopRequest
from horizonml.planner.strategies import fixed_plan
from horizonml.runtime.agreement import describe_data, model_for
from horizonml.runtime.checks import find_unreadable
from horizonml.runtime.outcome import Outcome
from horizonml.runtime.trainer import Training
from horizonml.tasks.choose import task_for
from horizonml.telemetry.log import read_lines
from horizonml.telemetry.recorder import Display, Recorder
from tests.datasets import Points
from tests.distributed.pool import Pool
from tests.distributed.processes import wait_for
from tests.distributed.sessions import session_for, state_of
from tests.distributed.truth import distance
from tests.programs import need_package
from tests.records import run_info
from tests.unit.test_data_loading import opened, own_workers
from tests.unit.test_data_stream import write_shard
from tests.web import served

PIPELINE = [{"ranks": [0], "layers": [0, 0]}, {"ranks": [1], "layers": [1, 2]}, {"ranks": [2], "layers": [3, 4]}]
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp, shares 3:1": (2, {"stages": [{"ranks": [0, 1], "shares": [3, 1], "layers": [0, 4]}]}),
    "pipeline": (3, {"stages": PIPELINE}),
}
DATA: dict[str, tuple[dict[str, Any], list[str]]] = {
    "random, processes": ({"options": {"noise": 0.5}, "workers": 1}, ["ddp, shares 3:1"]),
    "skipped, threads": ({"options": {"broken": [3, 4, 50]}, "workers": 2, "corrupt": "skip"}, [*PLANS]),
}


def job(folder: Path, data: dict[str, Any], parallel: dict[str, Any]) -> Job:
    """Two epochs of four steps on 49 points, the last of one sample."""
    values = {
        "folder": str(folder), "epochs": 2, "batch_size": 16, "model": {"name": "tests.tasks:perceptron"},
        "data": {"name": "tests.datasets:Points", **data}, "lr_schedule": {"name": "constant"},
        "optimizer": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0},
        "parallel": {"micro_batches": 2, **parallel},
    }  # fmt: skip
    return parse(json.dumps(values), "job")


def run(rank: int, world_size: int, store: Store, job: Job) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train as a rank does; return its state and what the last evaluation found."""
    group = Group(store, rank, world_size, 60.0)
    try:
        info = describe_data(job, group)
        model, task = model_for(job, info), task_for(job, info)
        session = session_for(
            fixed_plan(job, len(model.chain), world_size), model, group, job.optimizer, job.batch_size, task
        )
        data = load(job.data, info, Path("unused"), session.is_first, session.is_last)
        if job.data.corrupt == "skip":
            info = find_unreadable(job, session, data, lambda text: None)
            data = Data(info, data.train, data.held_out, data.draws)
        recorder = Recorder(
            job.run_folder / f"{world_size}-rank-{rank}.jsonl", Display(), run_info(job, session.plan, rank), 1
        )
        assert Training(job, session, data, None, recorder, StopRequest()).run() is Outcome.COMPLETE
        recorder.close("done")
        return state_of(session), dict(session.state.metrics)
    finally:
        group.close()


def by_hand(data: Data, job: Job) -> dict[str, Tensor]:
    """Do the same with plain PyTorch on whole batches, read straight from the list of points."""
    whole, members = Points(), data.train._members
    model = model_for(job, data.info).stage(0, 5).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    sampler = Sampler(49, 16, job.seed)
    broken = {place for place, index in enumerate(members.tolist()) if index in job.data.options.get("broken", ())}
    for number in range(8):
        indices, _ = stand_ins(sampler.indices(*divmod(number, 4)), broken, 49)
        rows = members[indices]
        optimizer.zero_grad()
        ((model(whole.points[rows]) - whole.values[rows]).square().mean()).backward()
        optimizer.step()
    return {f"model/{key}": value.detach() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", DATA)
def test_every_plan_trains_on_a_data_set_of_ones_own_as_one_process_does(pool: Pool, tmp_path: Path, kind: str) -> None:
    own, plans = DATA[kind]
    one = job(tmp_path, {**own, "workers": 0}, {"strategy": "single", "workers": 1})
    ((expected, reached),) = pool.run(1, run, one)
    if kind != "random, processes":
        info = describe_data(one, Group(None, 0, 1, 1.0))
        truth = by_hand(load(one.data, info, Path("unused")), one)
        assert all(distance(expected[key], value) < 1e-5 for key, value in truth.items())
    for name in plans:
        ranks, parallel = PLANS[name]
        seen = set()
        for state, metrics in pool.run(ranks, run, job(tmp_path, own, parallel)):
            assert metrics == pytest.approx(reached, rel=1e-4), name
            for key, value in state.items():
                if key.startswith("model/"):
                    seen.add(key)
                    assert distance(value, expected[key]) < 1e-5, (name, key)
        assert seen == {key for key in expected if key.startswith("model/")}
        for rank in range(ranks):
            lines = list(read_lines(tmp_path / f"{ranks}-rank-{rank}.jsonl"))
            records = [line for line in lines if line["kind"] == "step"]
            reads = name.startswith("ddp") or rank in (0, ranks - 1)
            # The last batch of an epoch is a single sample, of which not all members of a stage have a row.
            assert all((line["load"] > 0) == (reads and line["samples"] > 0) for line in records)
            assert all(line["load"] <= line["wait"] for line in records)
            # Two of the three are in the training part, in two epochs.
            assert sum(line["skipped"] for line in records) == (4 if kind == "skipped, threads" else 0)


def stream_of(folder: Path, path: str | Path, parallel: dict[str, Any]) -> Job:
    """Two epochs of five steps on 40 pictures, in four shards."""
    values = {
        "folder": str(folder), "epochs": 2, "batch_size": 8, "model": {"name": "tests.models:plain"},
        "data": {
            "name": "stream", "path": str(path), "inputs": ["png"], "targets": ["cls"], "image_size": 8, "channels": 1,
        },
        "optimizer": {"lr": 0.05}, "checkpoint": {"every_steps": 1}, "parallel": {"micro_batches": 2, **parallel},
    }  # fmt: skip
    return parse(json.dumps(values), "job")


def train_stream(rank: int, world_size: int, store: Store, job: Job, cache: Path) -> dict[str, Tensor]:
    """Train on a stream; `cache` is where this machine keeps its shards."""
    os.environ["HORIZONML_CACHE"] = str(cache)
    try:
        return run(rank, world_size, store, job)[0]
    finally:
        del os.environ["HORIZONML_CACHE"]


def test_three_ranks_train_on_a_stream_over_http_as_one_does_on_its_folder(pool: Pool, tmp_path: Path) -> None:
    need_package("aiohttp")
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(5):
        write_shard(shards / f"{number}.tar", 10 * number, 10)
    write_index(shards, held_out=["4.tar"], classes=3)
    (expected,) = pool.run(1, train_stream, stream_of(tmp_path, shards, {"strategy": "single"}), tmp_path / "unused")
    with served(shards) as (url, asked):
        found = pool.run(3, train_stream, stream_of(tmp_path, url, {"strategy": "pipeline"}), tmp_path / "cache")
    assert not (tmp_path / "unused").exists()
    assert sorted(path for path in asked if path.endswith(".tar")) == [f"/{number}.tar" for number in range(5)]
    together = {key: value for state in found for key, value in state.items() if key.startswith("model/")}
    assert together.keys() == {key for key in expected if key.startswith("model/")}
    assert {key: distance(value, expected[key]) for key, value in together.items()} == pytest.approx(
        dict.fromkeys(together, 0.0), abs=1e-5
    )


def fail(rank: int, world_size: int, store: Store, job: Job) -> str:
    try:
        return str(run(rank, world_size, store, job))
    except (DataError, PeerLost) as error:
        return f"{type(error).__name__}: {error}"


def test_a_sample_that_cannot_be_read_ends_all_ranks_and_is_named(pool: Pool, tmp_path: Path) -> None:
    ranks, parallel = PLANS["pipeline"]
    first, *others = pool.run(ranks, fail, job(tmp_path, {"options": {"broken": [7]}, "workers": 1}, parallel))
    assert first.startswith("DataError: data.name: tests.datasets:Points: sample 7 cannot be read:")
    assert "ValueError: the disk lost point 7" in first
    assert all("sample 7 cannot be read" in other or "closed its connection" in other for other in others)


def hold_workers(connection: Connection) -> None:
    """Begin a process that loads samples, tell its number, and never end."""
    spec, data = opened(options={"noise": 0.5}, workers=1)
    workers = workers_for(spec, data, Path("unused"), True, True)
    workers.read(data.batch(True, torch.arange(4)), 0, 4, True, True).rows()
    connection.send([worker.pid for worker in own_workers()])
    threading.Event().wait()


def test_worker_processes_end_with_a_rank_that_is_killed(pool: Pool) -> None:
    context = multiprocessing.get_context("forkserver")  # of the pool, which has torch loaded
    ours, theirs = context.Pipe()
    rank = context.Process(target=hold_workers, args=(theirs,))
    rank.start()
    assert ours.poll(60)
    workers = [psutil.Process(number) for number in ours.recv()]
    assert workers
    rank.kill()
    rank.join()
    wait_for(lambda: not any(one.is_running() and one.status() != "zombie" for one in workers), "they end with it", 20)
