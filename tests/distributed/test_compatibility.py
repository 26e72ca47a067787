"""What version 0.1.0 left on users' disks can still be read.

`tests/data/version-0.1.0` holds a job and the checkpoint of its step 8 of 10, as that version wrote them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed.processes import horizonml

OLD = Path(__file__).parents[1] / "data" / "version-0.1.0"
HELD_OUT_LOSS = 2.1678135813444768  # which version 0.1.0 found after step 10


def test_a_checkpoint_of_version_0_1_0_is_resumed(tmp_path: Path) -> None:
    shutil.copy(OLD / "job.yaml", tmp_path)
    shutil.copytree(OLD / "checkpoints", tmp_path / "run" / "checkpoints")
    result = horizonml(tmp_path, "train", "job.yaml")
    assert result.returncode == 0, result.stderr
    metadata = json.loads((tmp_path / "run" / "checkpoints" / "step-00000010" / "checkpoint.json").read_text())
    assert metadata["metrics"]["held_out_loss"] == pytest.approx(HELD_OUT_LOSS, rel=1e-5)
    lines = (tmp_path / "run" / "rank-0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert next(record["resumed_at"] for record in records if record["kind"] == "run") == 8
    assert sum(record["kind"] == "step" for record in records) == 2
