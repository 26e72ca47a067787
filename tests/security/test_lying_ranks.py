"""A rank that has the token and lies: the others lose it by name, take no memory for it, and write nothing for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import PrefixStore, Store

from horizonml.comm import expected
from horizonml.comm.group import MOST_JSON, Group
from horizonml.errors import CheckpointError, HorizonError, PeerLost
from horizonml.plan.plan import Plan, Stage
from horizonml.runtime.stragglers import slowdowns
from tests.distributed.pool import Pool
from tests.security.bounds import bounded

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(JSON)
def test_a_value_of_any_kind_is_read_or_refused(value: Any) -> None:
    """Every reader returns what it promises, or raises ValueError, whatever JSON it gets."""
    value = json.loads(json.dumps(value))
    kinds: list[tuple[expected.Reader[Any], type | tuple[type, ...]]] = [
        (expected.boolean, bool),
        (expected.whole(0, 10), int),
        (expected.number, float),
        (expected.measure, float),
        (expected.text, str),
        (expected.items(expected.whole()), list),
        (expected.mapping(expected.text), dict),
        (expected.fields(expected.text, expected.boolean), list),
        (expected.optional(expected.text), (str, type(None))),
    ]
    for read, kind in kinds:
        with suppress(ValueError):
            assert isinstance(read(value), kind)


def lied_to(
    rank: int, world_size: int, store: Store, lies: list[str], act: Callable[[int, Group], object], about: Any = None
) -> list[str]:
    """What an act ends in, once for each lie of rank 1, which takes the place of its first value, or of `about`."""
    from tests.security.liars import member

    said = []
    for number, lie in enumerate(lies):
        group = member(PrefixStore(str(number), store), rank, world_size, lie, lambda value: about in (None, value))
        try:
            act(rank, group)
            said.append("nothing")
        except HorizonError as error:
            said.append(f"{type(error).__name__} {error}")
        finally:
            group.close()
    return said


def gathers(rank: int, group: Group) -> None:
    """Gather a pair of numbers."""
    group.gather_json([1, 2.5], expected.fields(expected.whole(0, 8), expected.number))


def test_a_value_of_another_kind_loses_the_rank_by_name(pool: Pool) -> None:
    kinds = ["null", "[1]", '["1", 2]', "[true, 2]", "[-1, 2]", "[1e400, 2]", "[1, NaN]", "[9, 2]", '{"a": 1}']
    lies = [*kinds, "[1, [2]]", '["\\u001b[2J", 1]', "[" * 900 + "]" * 900]
    for text in pool.run(2, lied_to, lies, gathers)[0]:
        assert text.startswith("PeerLost rank 1 sent something else than is expected here: ")
        assert text.isprintable()
        assert len(text) < 300


def announces_all(rank: int, world_size: int, store: Store) -> str:
    """Gather values of which rank 1's is as long as it may be alone, though not from every rank."""
    group = Group(store, rank, world_size, 60.0)
    try:
        with bounded(100 + 2 * (MOST_JSON >> 20)):
            group.gather_json("x" * (MOST_JSON - 100) if rank == 1 else None)
    except PeerLost as error:
        return str(error)
    finally:
        group.close()
    return "nothing"


def test_all_values_together_are_bounded(pool: Pool) -> None:
    """Each rank's value takes as much memory as the longest one."""
    assert pool.run(4, announces_all)[0] == (
        f"rank 1 announced a message of {MOST_JSON - 98} bytes; at most {MOST_JSON // 4} are allowed"
    )


def finds_disks(rank: int, group: Group, folder: Path) -> None:
    """Find out who shares a disk: each rank says the first rank that does, 0."""
    from tests.distributed.test_disks import disks_in

    disks_in(folder, group)


def test_a_rank_cannot_claim_a_disk_that_there_is_not(pool: Pool, tmp_path: Path) -> None:
    lies = ["-1", "7", '"../.."', "null", "1e99", "[0]"]
    for text in pool.run(2, lied_to, lies, partial(finds_disks, folder=tmp_path), 0)[0]:
        assert "rank 1 sent something else" in text


def state_of(rank: int) -> Any:
    """Return the state of a rank that trains the digits by the plan."""
    from horizonml.data.dataset import TensorSpec
    from horizonml.job.schema import Job
    from horizonml.models.zoo import build
    from horizonml.state.train_state import TrainState
    from horizonml.tasks.task import InputSpec

    job = Job()
    model = build(job.model, 0, 10, InputSpec((TensorSpec((1, 8, 8)),)))
    plan = Plan((Stage(0, 2, (0,), (1.0,)), Stage(2, len(model.chain), (1,), (1.0,))))
    state = TrainState(model, job.optimizer, job.ema)
    stage = plan.stages[rank]
    state.take([(stage.start, stage.stop)])
    state.valid = True
    return state, plan


def is_report(value: Any) -> bool:
    """Choose what a rank says of the shards that it has written."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], dict)


def saves(rank: int, world_size: int, store: Store, folder: str, lie: str) -> tuple[list[str], list[str]]:
    """Save a checkpoint, of which rank 1 says something else than it has written."""
    from horizonml.state.checkpoint import Checkpoints
    from tests.security.liars import member

    torch.manual_seed(0)
    state, plan = state_of(rank)
    group = member(store, rank, world_size, lie, is_report)
    checkpoints = Checkpoints(Path(folder) / "checkpoints", group, 2, {"seed": 0})
    try:
        problems = checkpoints.save(state, plan, {"job": {}} if rank == 0 else {})
    except HorizonError as error:
        problems = [str(error)]
    finally:
        group.close()
    return problems, sorted(os.listdir(folder))


SHARD = {"sha256": "0" * 64, "tensors": 1, "machines": []}


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"stage-1.safetensors": {"bytes": 1 << 60, **SHARD}}, "at most"),
        ({"../../stolen": {"bytes": 5, **SHARD}}, "does not say what it wrote"),
        ({"stage-1.safetensors": {"bytes": 5, **SHARD, "sha256": "../x"}}, "does not say what it wrote"),
        ({"stage-1.safetensors": {"bytes": 5, **SHARD}}, "instead of 5"),
        ({"stage-1.safetensors": ["x"]}, "does not say what it wrote"),
    ],
    ids=["size", "path", "hash", "lie", "kind"],
)
def test_a_rank_cannot_name_a_file_or_a_size_of_its_choice(
    pool: Pool, tmp_path: Path, report: dict[str, Any], said: str
) -> None:
    problems, there = pool.run(2, saves, str(tmp_path), json.dumps([report, None]))[0]
    assert any("rank 1" in problem or "stage-1" in problem for problem in problems), problems
    assert said in " ".join(problems)
    assert there == ["checkpoints"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if not path.name.startswith(".")] == []


def moves(rank: int, group: Group) -> None:
    """Bring layer 2, which rank 1 has, to rank 0."""
    from horizonml.state.carry import move

    move(state_of(rank)[0], [(2, 1, 0)], group)


def test_a_rank_cannot_offer_tensors_that_a_layer_does_not_have(pool: Pool) -> None:
    lies = ['[[2, ["model/../../x"]]]', '[[0, ["model/conv1a.weight"]]]', "[[2, 7]]", '[["2", []]]', '{"2": []}']
    lies += ['[[2, ["model/head.bias", "model/head.bias"]]]']
    assert all("rank 1" in text for text in pool.run(2, lied_to, lies, moves)[0])


def agrees(rank: int, group: Group) -> None:
    group.agree(lambda: None)


def test_an_error_of_another_rank_is_its_words_and_no_class_of_its_choice(pool: Pool) -> None:
    lies = [json.dumps([None, [kind, "\x1b[2Jsaid"]]) for kind in ("SystemExit", "os.system", "OutOfMemory")]
    for text in pool.run(2, lied_to, lies, agrees)[0]:
        assert text == "HorizonError rank 1: \x1b[2Jsaid"  # printed plainly: see test_plain_output


def test_a_size_beyond_the_layers_is_refused_before_memory_is_taken() -> None:
    from horizonml.state.resume import check_shard

    state, _ = state_of(0)
    layers = len(state.model.chain)
    own = state.most_bytes(range(layers))
    check_shard(state, "stage-0.safetensors", 0, layers, own)
    for announced, stop in ((1 << 62, layers), (100 * own, layers), (10 * own, 1 << 62)):
        with bounded(20), pytest.raises(CheckpointError, match=r"stage-0.safetensors is said to have"):
            check_shard(state, "stage-0.safetensors", 0, stop, announced)


def sums(rank: int, world_size: int, store: Store, lies: list[float]) -> list[str]:
    """Agree on the totals of a step, of which rank 1 sends its part with a lie."""
    from types import MappingProxyType

    from horizonml.engine.verdict import TotalsSum
    from horizonml.tasks.classification import Classification

    task, said = Classification(), list[str]()
    for number, lie in enumerate(lies):
        group = Group(PrefixStore(str(number), store), rank, world_size, 30.0)
        totals = TotalsSum(group, task, MappingProxyType({}), 0)
        found = torch.ones(2 + len(task.metrics), dtype=torch.float64)
        if rank == 1:
            found[1] = lie
        totals.post()
        try:
            said.append(str(totals.agree(found, 0, None).units))
        except PeerLost as error:
            said.append(str(error))
        finally:
            group.close()
    return said


def test_sums_that_cannot_be_lose_the_peers_instead_of_crashing(pool: Pool) -> None:
    lies = [float("nan"), float("inf"), -5.0, 1e300]
    assert all("one of them lies" in text for text in pool.run(2, sums, lies)[0])


def test_times_that_cannot_be_call_nobody_slow() -> None:
    for lie in (float("nan"), float("inf"), -1.0, 0.0):
        assert slowdowns([lie, lie], [1.0, 1.0]) == (1.0, 1.0)
        assert slowdowns([1.0, lie], [1.0, 1.0]) == (1.0, 1.0)
