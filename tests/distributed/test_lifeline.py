from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.distributed.processes import horizonml, wait_for

ALONE = ("train", "job.yaml", "--set", "parallel.strategy=single", "--set", "parallel.workers=1")


def test_a_rank_that_is_started_again_says_once_that_the_one_before_was_killed(
    folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    who = {"RANK": "0", "WORLD_SIZE": "1"}
    lifeline = folder / "runs" / "test" / ".places" / "rank-0.lifeline"
    first = start(*ALONE, "--set", "epochs=100000", **who)
    wait_for(lambda: lifeline.exists() and (json.loads(lifeline.read_text())["step"] or 0) > 0, "a step")
    first.send_signal(signal.SIGKILL)
    first.wait()
    step = json.loads(lifeline.read_text())["step"]
    second = horizonml(folder, *ALONE, "--set", "epochs=1", "--fresh", **who)
    assert second.returncode == 0, second.stderr
    told = f"the process before this one (rank 0) ended without a word at step {step}: it was killed, or its container"
    assert second.stderr.startswith(told)
    assert not lifeline.exists()
