"""The job `text`, as a user starts it: it learns more about the text than how frequent its characters are."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizonml.data.text import unigram_perplexity
from horizonml.job.jobfile import load, ready_jobs
from horizonml.telemetry.log import read_lines
from tests.distributed.processes import horizonml

pytestmark = pytest.mark.slow


@pytest.mark.longest
def test_a_small_gpt_learns_to_spell(tmp_path: Path) -> None:
    job = load(ready_jobs()["text"])
    done = horizonml(tmp_path, "train", "text", "--set", "epochs=3", HORIZONML_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " tokens/s |" in done.stdout
    lines = list(read_lines(tmp_path / "runs" / "text" / "rank-0.jsonl"))
    last = [line for line in lines if line["kind"] == "evaluation"][-1]
    assert last["perplexity"] < unigram_perplexity(job.data) / 2
    step = next(line for line in lines if line["kind"] == "step")
    assert (step["unit"], step["units"]) == ("tokens", 64 * job.data.length)
