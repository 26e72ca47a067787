"""Horovod as a strategy: gradient truth against ddp, checkpoints, compression."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from horizonml.comm.group import Group
from horizonml.engine.session import Session, Wishes
from horizonml.errors import PeerLost
from horizonml.job.schema import Job
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.state.spec import Adam, Sgd
from horizonml.tasks.task import InputSpec
from horizonml.telemetry.log import read_lines
from tests.distributed.pool import Pool
from tests.distributed.processes import rank_process, steps, wait_for
from tests.distributed.sessions import session_for, state_of
from tests.distributed.test_training import job, run, whole
from tests.distributed.truth import FULL, LR, SHAPE, RandomBatch, distance


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    processes = Pool(3)
    yield processes
    processes.close()


def session_of(kind: Sync, rank: int, world_size: int, store: Store, name: str, optimizer: Sgd | Adam) -> Session:
    model = build(ModelSpec(name=f"tests.models:{name}"), 0, 10, InputSpec.of(SHAPE))
    group = Group(store, rank, world_size, 30.0)
    plan = Plan((Stage(0, len(model.chain), tuple(range(world_size)), (1.0,) * world_size, kind),))
    return session_for(plan, model, group, optimizer, FULL)


def train(rank: int, world_size: int, store: Store, kind: Sync, *arguments: Any) -> tuple[dict[str, Tensor], list[Any]]:
    one = session_of(kind, rank, world_size, store, *arguments)
    reports = [one.step(RandomBatch(step), LR, Wishes(measure_divergence=True)) for step in range(3)]
    evaluated = one.evaluate([RandomBatch(9)])
    state = state_of(one)
    one.close()
    one.group.close()
    return state, [*reports, evaluated]


@pytest.mark.parametrize("optimizer", [Sgd(weight_decay=1e-3), Sgd(nesterov=True), Sgd(momentum=0.0)], ids=str)
@pytest.mark.parametrize("model", ["plain", "normed", "wide"])
def test_horovod_changes_the_parameters_as_ddp_does(pool: Pool, model: str, optimizer: Sgd) -> None:
    ours, theirs = (pool.run(3, train, kind, model, optimizer) for kind in (Sync.ALL_REDUCE, Sync.HOROVOD))
    for (expected, reports), (state, others) in zip(ours, theirs, strict=True):
        assert state.keys() == expected.keys()
        assert all(distance(value, expected[key]) < 1e-5 for key, value in state.items())
        for one, other in zip(reports[:3], others[:3], strict=True):
            assert other.totals.loss == pytest.approx(one.totals.loss, rel=1e-5)
            assert other.divergence == pytest.approx(one.divergence, rel=1e-3)
            assert other.samples == one.samples
            assert other.compute + other.transfer + other.wait == pytest.approx(other.wall, rel=0.02)
        assert others[3].loss == pytest.approx(reports[3].loss, rel=1e-5)
        assert (others[3].metrics, others[3].samples) == (reports[3].metrics, reports[3].samples)


def test_compression_to_16_bits_is_near_but_not_the_same(pool: Pool) -> None:
    exact, _ = pool.run(2, train, Sync.HOROVOD, "plain", Sgd())[0]
    state, reports = pool.run(2, train, Sync.HOROVOD_FP16, "plain", Sgd())[0]
    differences = [distance(value, exact[key]) for key, value in state.items() if key.startswith("model/")]
    assert 1e-6 < max(differences) < 1e-2
    full, _ = pool.run(2, train, Sync.HOROVOD, "plain", Sgd())[1]
    assert full.keys() == state.keys()
    assert reports[0].bytes_sent < 0.6 * pool.run(2, train, Sync.HOROVOD, "plain", Sgd())[0][1][0].bytes_sent


def lose_and_train(rank: int, world_size: int, store: Store) -> tuple[str, dict[str, Tensor]]:
    """Lose a rank between two steps, as when it is killed, and train again in a new group."""
    one = session_of(Sync.HOROVOD, rank, world_size, PrefixStore("first", store), "plain", Sgd())
    one.step(RandomBatch(0), LR)
    message = ""
    if rank == 1:
        import horovod.torch as hvd

        hvd.shutdown()
        store.get("noticed")  # until then, all but Horovod goes on
    else:
        time.sleep(0.5)  # by when Horovod's thread has ended here, too, and refuses to begin any sum
        try:
            one.step(RandomBatch(1), LR)
        except PeerLost as error:
            message = str(error)
        store.set("noticed", "yes")
    one.close()
    one.group.close()
    return message, train(rank, world_size, PrefixStore("second", store), Sync.HOROVOD, "plain", Sgd())[0]


def test_a_rank_that_is_lost_between_two_steps_is_noticed_in_the_next_and_horovod_starts_again(pool: Pool) -> None:
    (message, state), (_, other) = pool.run(2, lose_and_train)
    assert message == "a peer closed its connection, or did not answer Horovod (Horovod has been shut down)"
    expected, _ = pool.run(2, train, Sync.HOROVOD, "plain", Sgd())[0]
    for key, value in expected.items():
        assert torch.equal(state[key], value)
        assert torch.equal(other[key], value)


def horovod_job(folder: Path, **changes: Any) -> Job:
    return job(folder, workers=2, parallel={"strategy": "horovod", "micro_batches": 1}, **changes)


def test_checkpoints_go_from_horovod_to_ddp_and_back(pool: Pool, tmp_path: Path) -> None:
    first = pool.run(2, run, horovod_job(tmp_path), 9)
    assert first[0][2] is None
    done = {"epochs": 1, "checkpoint": {"every_steps": 5, "keep": 9}}
    ddp = pool.run(2, run, job(tmp_path, workers=2, **done))
    back = pool.run(2, run, horovod_job(tmp_path, **done))
    for results in (ddp, back):
        assert {outcome for outcome, _, _ in results} == {"already complete"}
        for key, value in whole(results).items():
            assert torch.equal(value, whole(first)[key]), key
    further = pool.run(2, run, horovod_job(tmp_path))
    assert {outcome for outcome, _, _ in further} == {"complete"}


def runs(folder: Path, rank: int) -> list[int]:
    """The world sizes of the groups that a rank was in."""
    path = folder / "runs" / "test" / f"rank-{rank}.jsonl"
    records = read_lines(path) if path.exists() else ()
    return [record["world_size"] for record in records if record["kind"] == "run"]


def test_horovod_goes_on_without_a_lost_rank_and_takes_it_in_again(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    service = start("rendezvous", "--port", "0")
    assert service.stdout is not None
    address = service.stdout.readline().split()[-1]

    def rank(number: int) -> subprocess.Popen[str]:
        options = [
            "parallel.strategy=horovod",
            "epochs=5000",
            "checkpoint.every_steps=5",
            "rendezvous.replace_timeout=3",
        ]
        sets = [word for option in options for word in ("--set", option)]
        return start("train", "job.yaml", *sets, RANK=str(number), WORLD_SIZE="3", HORIZONML_RENDEZVOUS=address)

    ranks = [rank(number) for number in range(3)]
    wait_for(lambda: steps(folder) > 7, "the first steps")
    rank_process(folder, 1).kill()
    # Horovod may notice a lost peer only when its own connections time out, after 30 s. Until then the rank that has
    # noticed goes on alone.
    wait_for(lambda: runs(folder, 0)[-1] == 2, "a group of two", 180)
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 5, "steps of the two")
    ranks[1] = rank(1)
    wait_for(lambda: runs(folder, 0)[-1] == 3, "a group of three again", 120)
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 5, "more steps")
    for process in ranks:
        process.terminate()
    outputs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], outputs
    assert "Traceback" not in "".join(outputs)
    service.terminate()
    service.communicate(timeout=10)
