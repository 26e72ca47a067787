"""How many threads a rank computes with, and how they wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from horizonml.comm.group import Group
from horizonml.job.schema import Job
from horizonml.models.spec import ModelSpec
from horizonml.models.zoo import Model, build
from horizonml.planner.profile import Host
from horizonml.profiling import execution
from horizonml.profiling.execution import choose_threads, fewest, try_threads
from horizonml.tasks.task import InputSpec


@pytest.fixture
def model() -> Model:
    return build(ModelSpec(name="digits_cnn"), 0, 10, InputSpec.of((1, 8, 8)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("HORIZONML_CACHE", str(tmp_path))
    return tmp_path


def test_more_threads_must_be_worth_it() -> None:
    assert fewest({1: 1.0}) == 1
    assert fewest({1: 1.0, 2: 0.95, 4: 0.92}) == 1
    assert fewest({1: 1.0, 2: 0.6, 4: 0.58}) == 2
    assert fewest({1: 1.0, 2: 1.1, 4: 0.5}) == 4


def test_trying_threads_changes_nothing(model: Model) -> None:
    state, before = torch.get_rng_state(), torch.get_num_threads()
    seconds = try_threads(model, 4, 3)
    assert sorted(seconds) == [1, 2, 3]
    assert all(value > 0 for value in seconds.values())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == before
    assert all(parameter.is_meta for parameter in model.chain.slice(0, len(model.chain)).parameters())


def test_with_one_core_there_is_no_choice(model: Model, cache: Path) -> None:
    assert choose_threads(Job(), model, Group(None, 0, 1, 60.0), Host((0,), 1.9, 1e9)) == 1
    assert not list(cache.iterdir())


def test_a_choice_is_remembered_for_the_load_that_it_was_made_under(
    model: Model, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads are twenty times slower on a busy machine than one, and were the default."""
    group, job, host = Group(None, 0, 1, 60.0), Job(batch_size=16), Host((0,), 4.0, 1e9)
    monkeypatch.setattr(execution, "try_threads", lambda *_: {1: 1.0, 2: 3.0, 4: 20.0})
    others = [0.0]  # cores that they take, whatever this machine does beside the test
    monkeypatch.setattr(execution.OtherWork, "cores_taken", lambda *_: others[0])
    assert choose_threads(job, model, group, host) == 1
    for file in (cache / "threads").iterdir():
        file.write_text('{"threads": 3}')
    assert choose_threads(job, model, group, host) == 3
    others[0] = 1e3
    assert choose_threads(job, model, group, host) == 1
    others[0] = 0.0
    assert choose_threads(job, model, group, host) == 3


def test_a_cache_that_cannot_be_written_is_no_error(model: Model, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("HORIZONML_CACHE", str(cache / "file"))
    assert 1 <= choose_threads(Job(), model, Group(None, 0, 1, 60.0), Host((0,), 2.0, 1e9)) <= 2


def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise() -> None:
    """OpenMP itself tells what it has read: the variable must be there before torch is."""

    def told(code: str, **extra: str) -> str:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
        environment = kept | {"OMP_DISPLAY_ENV": "VERBOSE"} | extra
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    assert "OMP_WAIT_POLICY = 'PASSIVE'" in told("import horizonml, torch")
    code = "import horizonml, os; print('it is', os.environ['OMP_WAIT_POLICY'])"
    assert "it is ACTIVE" in told(code, OMP_WAIT_POLICY="ACTIVE")
