"""Runs the process that becomes a rank: `python -m horizonml.runtime.lobby.rank`.

It loads PyTorch while devices still gather, which takes seconds on a small board, and waits for its orders on standard
input: first the job's file, then the rank. Nothing secret is on its command line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from horizonml.machine.network import METRICS, metrics_address
from horizonml.runtime.process import run_and_exit


def main() -> None:
    """Prepare, wait for the rank, and train. Raises HorizonError."""
    metrics = metrics_address(os.environ.get(METRICS))
    first = _order()
    if first is None:
        return
    from horizonml.job.jobfile import load

    job = load(Path(first["job"]))
    import horizonml.rendezvous.meeting
    import horizonml.runtime.worker
    import horizonml.telemetry.server  # noqa: F401  (what takes time is loaded now)
    from horizonml.state.shards import completed

    if not (first["fresh"] or first["joins"]) and completed(job.run_folder / "checkpoints", job):
        print(f"{job.run_folder} is trained to the end already; --fresh starts over", flush=True)
        return
    with os.fdopen(first["ready"], "wb") as ready:
        ready.write(b"1")
    second = _order()
    if second is None:
        return
    os.environ.update(second["env"])
    from horizonml.rendezvous.identity import identify
    from horizonml.runtime.launch import train_as_rank

    identity = identify(os.environ, job.parallel.max_workers)
    assert identity is not None
    train_as_rank(job, identity, first["fresh"], metrics, stay=False)


def _order() -> dict[str, Any] | None:
    """Return the next line of standard input, or None if whoever started this process is gone."""
    line = sys.stdin.readline()
    return dict(json.loads(line)) if line.endswith("\n") else None


if __name__ == "__main__":
    run_and_exit(main)
