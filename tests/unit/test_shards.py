"""Checkpoints from strangers and broken disks: refused by name, and nothing hangs or is written elsewhere."""

from __future__ import annotations

import copy
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from horizonml.errors import CheckpointError, is_out_of_files
from horizonml.state.runfolder import Fence
from horizonml.state.shards import (
    METADATA,
    check,
    describe,
    find,
    is_folder_name,
    opened,
    read_metadata,
    steps,
    verify_shard,
)
from tests.checkpoints import checkpoint

PATH = Path("somewhere/step-00000003")
SHA = "0" * 64
GOOD: dict[str, Any] = {
    "format": 1,
    "step": 3,
    "compatible": {"seed": 0},
    "plan": {"stages": [{"start": 0, "stop": 2}, {"start": 2, "stop": 3}], "schedule": "1f1b"},
    "shards": {f"stage-{number}.safetensors": {"bytes": 8, "sha256": SHA} for number in range(2)},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    metadata = copy.deepcopy(GOOD)
    *sections, last = path.split("/")
    target: Any = metadata
    for section in sections:
        target = target[int(section) if isinstance(target, list) else section]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return metadata


def test_metadata_with_values_of_other_kinds_is_refused_by_name() -> None:
    for path, value in (
        ("step", "3"),
        ("step", -1),
        ("format", None),
        ("compatible", [1]),
        ("plan/stages", []),
        ("plan/stages/0/stop", 0),
        ("plan/stages/1/start", 1),
        ("shards", {"../../etc/cron.d/x": {"bytes": 1, "sha256": SHA}}),
        ("shards/stage-1.safetensors", None),
        ("shards/stage-0.safetensors/bytes", -5),
        ("shards/stage-0.safetensors/sha256", "x" * 64),
        ("metrics", {"held_out_accuracy": "100 %"}),
    ):
        with pytest.raises(CheckpointError, match=r"step-00000003: checkpoint\.json is missing or damaged"):
            check(changed(path, value), PATH)


def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "checkpoint.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_metadata(tmp_path)
    made = checkpoint(tmp_path / "step-00000001", {"model/a": torch.ones(2)})
    (made / "stage-0.safetensors").unlink()
    os.mkfifo(made / "stage-0.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        find(made)


def test_a_newer_checkpoint_that_is_damaged_is_passed_over_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = checkpoint(tmp_path / "checkpoints" / "step-00000001", {"model/a": torch.ones(2)})
    (
        checkpoint(tmp_path / "checkpoints" / "step-00000002", {"model/a": torch.ones(2)}) / "stage-0.safetensors"
    ).unlink()
    assert find(tmp_path)[0] == good
    (message,) = caplog.messages
    assert message.endswith(
        "step-00000002: stage-0.safetensors is missing; an older checkpoint is taken instead: step-00000001"
    )


def test_only_names_of_checkpoints_are_names(tmp_path: Path) -> None:
    for name in ("step-00000003", "step-123456789"):
        assert is_folder_name(name)
    for other in ("step-3", "../step-00000003", "step-00000003/x", "step-٠٠٠٠٠٠٠٣", "step-00000003\n", 3, None):
        assert not is_folder_name(other)
    (tmp_path / "step-old").mkdir()
    (tmp_path / "step-00000010").mkdir()
    (tmp_path / "step-123456789").mkdir()
    assert [path.name for path in steps(tmp_path)] == ["step-123456789", "step-00000010"]
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        find(tmp_path / "elsewhere")


def test_a_process_without_descriptors_takes_no_checkpoint_for_damaged(tmp_path: Path) -> None:
    path = tmp_path / "stage-0.safetensors"
    save_file({"a": torch.ones(2)}, path)
    (tmp_path / METADATA).write_text("{}")
    shard = describe(path, 1)
    tries: list[Callable[[], object]] = [
        lambda: read_metadata(tmp_path),
        lambda: verify_shard(path, shard),
        lambda: opened(tmp_path, {path.name: shard}).__enter__(),
        lambda: Fence(tmp_path),
    ]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        for one in tries:
            with pytest.raises(OSError, match="Too many open files") as error:
                one()
            found.append(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(map(is_out_of_files, found))
