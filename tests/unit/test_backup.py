"""Copies of checkpoints in another place, and the command that looks after checkpoints."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from typer.testing import CliRunner

from horizonml.cli.app import app
from horizonml.errors import CheckpointError, JobError
from horizonml.state.backup import Backup, CopyStore, restore
from horizonml.state.shards import KEPT, folder_name, steps
from tests.checkpoints import checkpoint


def saved(run: Path, step: int, best: int | None = None) -> Path:
    """Write a checkpoint of two stages, and return its folder."""
    known = {} if best is None else {KEPT: {"metric": "held_out_loss", "value": 0.5, "step": best}}
    stages = ({"model/weight": torch.full((64,), float(step + stage))} for stage in range(2))
    return checkpoint(run / "checkpoints" / folder_name(step), *stages, step=step, best=known)


def spoil(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder, and a store of objects behind a URL."""
    if request.param == "folder":
        return str(tmp_path / "copies")
    fsspec.filesystem("memory").store.clear()
    return "memory://bucket/run"


def test_the_newest_copies_and_the_best_one_are_kept_and_come_back_bit_for_bit(tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    backup = Backup(place, 2, keeps_best=True)
    for step in range(1, 6):
        path = saved(run, step, best=min(step, 2))
        backup.add(path)
        with backup._changed:
            assert backup._changed.wait_for(lambda: backup._next is None and not backup._busy, 30)
    backup.close(stopped=True)
    assert CopyStore(place).steps() == [folder_name(step) for step in (5, 4, 2)]
    elsewhere = tmp_path / "elsewhere"
    restored, metadata = restore(place, elsewhere / "checkpoints")
    assert metadata.step == 5
    for file in path.iterdir():
        assert (restored / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(CheckpointError, match="is there already, and intact"):
        restore(place, elsewhere / "checkpoints")
    spoil(restored / "stage-1.safetensors")
    restore(place, elsewhere / "checkpoints")
    assert [one.name for one in (elsewhere / "checkpoints").iterdir()] == [folder_name(5)]


def test_copies_of_another_training_are_neither_replaced_nor_kept_instead_of_new_ones(
    tmp_path: Path, place: str
) -> None:
    store = CopyStore(place)
    for step in (10, 20):
        store.put(saved(tmp_path / "earlier", step, best=10))
    store.put(tmp_path / "earlier" / "checkpoints" / folder_name(20))  # it is there
    for step in (5, 10, 20):
        with pytest.raises(CheckpointError, match="step-00000020 is there, of another training"):
            store.put(saved(tmp_path / "fresh", step))
    assert store.steps() == [folder_name(20), folder_name(10)]
    store.put(saved(tmp_path / "fresh", 30))
    assert store.steps()[0] == folder_name(30)


def test_a_copy_that_is_damaged_or_not_complete_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies, run = tmp_path / "copies", tmp_path / "run"
    for step in (1, 2, 3):
        CopyStore(str(copies)).put(saved(run, step))
    (copies / folder_name(3) / "checkpoint.json").unlink()  # as if its writer had been killed
    spoil(copies / folder_name(2) / "stage-0.safetensors")
    shutil.rmtree(run)
    with caplog.at_level(logging.WARNING):
        assert restore(str(copies), run / "checkpoints")[1].step == 1
    assert "does not match its SHA-256; an older copy is taken instead: step-00000001" in caplog.text
    spoil(copies / folder_name(1) / "stage-0.safetensors")
    with pytest.raises(CheckpointError, match="does not match its SHA-256"):
        restore(str(copies), tmp_path / "other")
    with pytest.raises(CheckpointError, match="there is no copy of a checkpoint"):
        restore(str(tmp_path / "nothing"), tmp_path / "other")


def test_a_place_that_cannot_be_written_to_is_named_once_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    backup = Backup(str(tmp_path / "file"), 2, keeps_best=False)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            backup.add(saved(tmp_path / "run", step))
            with backup._changed:
                backup._changed.wait_for(lambda: backup._next is None and not backup._busy, 30)
        backup.close(stopped=False)
    assert caplog.text.count("is not copied to") <= 2
    assert "step-00000001 is not copied to" in caplog.text
    with pytest.raises(JobError, match=r"checkpoint\.copy_to: gopher://x cannot be reached"):
        CopyStore("gopher://x")


def test_the_command_lists_verifies_prunes_and_restores(tmp_path: Path) -> None:
    run, copies = tmp_path / "run", tmp_path / "copies"
    for step in range(1, 6):
        CopyStore(str(copies)).put(saved(run, step, best=min(step, 2)))

    def call(*words: str) -> tuple[int, str]:
        done = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["checkpoints", *words])
        return done.exit_code, done.stdout

    code, said = call(str(run))
    assert code == 0
    assert [line.split()[0] for line in said.splitlines()[2:]] == ["5", "4", "3", "2", "1"]
    assert "the best" in said.splitlines()[5]
    spoil(run / "checkpoints" / folder_name(5) / "stage-1.safetensors")
    assert call(str(run))[0] == 0  # only sizes are compared
    code, said = call(str(run), "--verify")
    assert code == 1
    assert "stage-1.safetensors is damaged: its content does not match its SHA-256" in said
    code, said = call(str(run), "--prune", "1")
    assert code == 0
    assert [path.name for path in steps(run / "checkpoints")] == [folder_name(4), folder_name(2)]
    assert "deleted step-00000005, step-00000003, step-00000001" in said
    code, said = call(str(run), "--restore", str(copies))
    assert code == 0
    assert "(step 5)" in said
    assert call(str(run), "--verify")[0] == 0
    assert call(str(copies), "--verify")[0] == 0
    for path in steps(run / "checkpoints"):
        spoil(path / "stage-0.safetensors")
    with pytest.raises(CheckpointError, match="no checkpoint is intact"):
        CliRunner().invoke(app, ["checkpoints", str(run), "--prune", "1"], catch_exceptions=False)
