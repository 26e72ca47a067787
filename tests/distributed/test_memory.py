"""A model that is too large for one process trains on several, each of which is as small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import Store

from horizonml.comm.group import Group
from horizonml.data.choose import describe
from horizonml.job.jobfile import parse
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import build
from horizonml.plan.plan import Plan, Stage, Sync
from horizonml.runtime.agreement import model_for
from horizonml.runtime.checks import state_bytes
from horizonml.runtime.forkserver import SERVER
from horizonml.state import checkpoint
from horizonml.state.checkpoint import Checkpoints
from horizonml.state.spec import Sgd
from horizonml.tasks.task import InputSpec
from tests.distributed.pool import Pool
from tests.distributed.processes import environment
from tests.distributed.sessions import session_for
from tests.distributed.truth import LR, RandomBatch

pytestmark = pytest.mark.slow

LIMIT = 1250 << 20  # bytes of memory that a process may take for its data
JOB = """
name: test
steps: 2
batch_size: 4
model: {name: gpt, options: {layers: 12, heads: 8, width: 896}}
data: {name: text, length: 16, samples: 40}
optimizer: {name: adamw, lr: 1e-3}
checkpoint: {enabled: false}
parallel:
  micro_batches: 2
  stages:
    - {layers: [0, 9], ranks: [0]}
    - {layers: [10, 17], ranks: [1]}
    - {layers: [18, 28], ranks: [2]}
"""
LIMITED = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2); "


def limited(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that may take `LIMIT` bytes, and so may each of the processes that it starts."""
    return subprocess.run(
        [sys.executable, "-c", LIMITED + code, str(LIMIT), *arguments],
        cwd=folder,
        env=environment(**{SERVER: ""}),  # what forks its ranks is limited, too
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return limited(
        "os.execv(sys.executable, [sys.executable, '-m', 'horizonml', 'train', 'job.yaml', *sys.argv[2:]])",
        *arguments,
        folder=folder,
    )


@pytest.mark.longest
def test_a_gpt_that_exceeds_the_memory_of_one_rank_trains_on_three(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    job = parse(JOB, "job")
    info = describe(job.data)
    assert info is not None
    model = model_for(job, info)
    parameters = sum(parameter.nbytes for parameter in model.chain.slice(0, len(model.chain)).parameters())
    assert 3 * parameters > LIMIT  # parameters and the two moments of AdamW

    # The limit is real: whoever wants that much at once is refused it.
    ask = "import torch; torch.empty(int(sys.argv[2]), dtype=torch.uint8)"
    refused = limited(ask, str(3 * parameters), folder=tmp_path)
    assert "can't allocate memory" in refused.stderr

    ended = train(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "epoch 1/1, step 2: held-out loss" in ended.stdout

    alone = train(tmp_path, "--set", "parallel.stages=null", "--set", "parallel.strategy=ddp", "--workers", "1")
    assert alone.returncode == 2, alone.stderr
    assert "parameters, gradients and optimizer state of rank 0 take 1.7 GiB, and " in alone.stderr
    assert "MiB are left for them. Divide the layers among more ranks" in alone.stderr


@pytest.mark.parametrize(("channels", "expected"), [(False, (4, 4)), (True, (3, 1))])
def test_the_state_of_each_rank_is_counted(channels: bool, expected: tuple[int, int]) -> None:
    """In quarters of a stage's state; the members of a stage that splits channels hold a part each."""
    model = build(ModelSpec(name="tests.models:plain"), 0, 10, InputSpec.of((1, 8, 8)))
    layers = len(model.chain)
    whole = model.chain.slice(0, layers)
    total = 4 * sum(parameter.nbytes for parameter in whole.parameters()) + sum(b.nbytes for b in whole.buffers())
    stage = Stage(0, layers, (0, 1), (0.75, 0.25), Sync.CHANNELS if channels else Sync.ALL_REDUCE)
    assert state_bytes(Plan((stage,)), model, 2) == [total * share / 4 for share in expected]


def without_room(rank: int, world_size: int, store: Store, folder: Path) -> tuple[list[int], bool]:
    """Save where rank 1 has no memory for a copy; the steps that are saved at once, and whether a thread wrote them."""
    group = Group(store, rank, world_size, 30.0)
    model = build(ModelSpec(name="tests.models:plain"), 0, 10, InputSpec.of((1, 8, 8)))
    plan = Plan((Stage(0, len(model.chain), tuple(range(world_size)), (1.0,) * world_size),))
    session = session_for(plan, model, group, Sgd(), 24)
    session.step(RandomBatch(0), LR)
    checkpoints, own = Checkpoints(folder, group, 2, {}), checkpoint.memory_here
    try:
        checkpoint.memory_here = lambda group: 0.0 if rank else own(group)
        checkpoints.begin(session.state, plan, {})
        saved = checkpoints.finished()
    finally:
        checkpoint.memory_here = own
        session.close()
        group.close()
    return [one.step for one in saved if not one.problems], any(one.writing for one in saved)


def test_training_waits_for_a_checkpoint_that_cannot_be_copied(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, without_room, tmp_path) == [([1], False)] * 2
