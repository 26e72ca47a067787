"""Runs and studies for tests, as ranks and benches record them."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horizonml.telemetry.record import EvaluationRecord, StepRecord

JOB = {
    "batch_size": 32, "epochs": 2, "model": {"name": "digits_cnn"}, "data": {"name": "digits", "image_size": 8},
}  # fmt: skip


def write_run(
    folder: Path, strategy: str = "ddp", ranks: int = 2, wall: float = 0.2, steps: int = 6, epochs: int = 2,
    accuracy: float = 0.9, rss: int = 400 << 20, batch: int = 32,
) -> None:  # fmt: skip
    """Records as ranks write them: rank r waits (r + 1) * 10% of each step, and transfers 10%; from rank 8 on again."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = [{"start": 0, "stop": 4, "ranks": list(range(ranks)), "shares": [1.0] * ranks}]
    if strategy == "pipeline":
        stages = [{"start": r, "stop": r + 1, "ranks": [r], "shares": [1.0]} for r in range(ranks)]
    for rank in range(ranks):
        lines: list[dict[str, Any]] = [
            {
                "kind": "run", "rank": rank, "stage": rank if strategy == "pipeline" else 0, "world_size": ranks,
                "host": "here", "cores": 2.0, "rss_idle_bytes": 100 << 20, "machine": {"processor": "a test"},
                "versions": {"python": "3", "torch": "2", "horizonml": "1"},
                "job": JOB | {"batch_size": batch, "epochs": epochs},
                "plan": {"stages": stages, "micro_batches": 2, "schedule": "1f1b"},
            }
        ]  # fmt: skip
        wait, transfer = 0.1 * (rank % 8 + 1) * wall, 0.1 * wall
        for number in range(1, steps + 1):
            epoch = 1 + (number - 1) * epochs // steps
            lines.append(
                StepRecord(
                    step=number, epoch=epoch, time=100.0 + number, wall=wall, compute=wall - wait - transfer,
                    transfer=transfer, wait=wait, samples=batch // ranks, batch=batch, loss=2.0 / number,
                    metrics={"accuracy": 0.5}, lr=0.1, bytes_sent=1000, bytes_received=1000,
                    links={"members": (1000, 1000), "next": (0, 0)},
                    cpu_seconds=wall / 2, rss_bytes=rss + rank, joules=3.0 if rank == 0 else None,
                    divergence=0.5 if number % 2 else None,
                ).to_json()
            )  # fmt: skip
            if number % (steps // epochs) == 0:
                lines.append(EvaluationRecord(number, epoch, 100.0, 0.1, 0.3, {"accuracy": accuracy}, 10).to_json())
        spans = [["compute", "forward", 0, 1.0, 1.1], ["wait", "receive", -1, 1.1, 1.2]]
        lines.append({"kind": "timeline", "step": steps, "spans": spans})
        (folder / f"rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_group(
    folder: Path, ranks: Sequence[int], generation: int, begin: float, steps: range, outcome: str = "failed",
    recovery: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Append what the `ranks` of one group record of steps of 1 s, the first of which begins at `begin`."""
    for place, rank in enumerate(ranks):
        about = {
            "kind": "run", "rank": place, "started_as_rank": rank, "generation": generation, "world_size": len(ranks),
            "time": begin - 0.1 + 0.01 * place, "job": JOB, "host": "here",
        }  # fmt: skip
        lines = [about]
        for done, number in enumerate(steps, 1):
            lines.append(
                {
                    "kind": "step", "step": number, "epoch": 1, "time": begin + done, "wall": 1.0, "compute": 0.6,
                    "transfer": 0.2, "wait": 0.2, "batch": 32, "loss": 2.0 / number, "bytes_sent": 10,
                    "cpu_seconds": 0.5, "rss_bytes": 1 << 20,
                }
            )  # fmt: skip
            if done == 1 and recovery is not None:
                own = {"kind": "recovery", "time": begin + 1, "generation": generation, "seconds": 2.0 + 0.1 * place}
                lines.append(own | recovery)
        append(folder / f"rank-{rank}.jsonl", *lines, {"kind": "end", "time": begin + len(steps), "outcome": outcome})


def write_study(folder: Path, kind: str, settings: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    """A study whose cases are (factors, and what `write_run` is to write)."""
    environment = {
        "machine": {"processor": "a test", "system": "any"}, "cores": 2.0, "memory_limit": 4 << 30, "time": "now",
        "versions": {"python": "3", "torch": "2", "horizonml": "1"},
    }  # fmt: skip
    manifest = {"kind": kind, "settings": settings, "environment": environment, "cases": []}
    for number, case in enumerate(cases):
        run = folder / "runs" / f"case-{number}"
        write_run(run, **case["run"])
        (run / "done.json").write_text(json.dumps({"digest": "x", "seconds": 1.0, "error": case.get("error")}))
        manifest["cases"].append({"name": f"case-{number}", "factors": case["factors"], "digest": "x"})
    (folder / "study.json").write_text(json.dumps(manifest))


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def comparison(folder: Path) -> None:
    cases = []
    for repeat, slower in enumerate((1.0, 1.2)):
        for samples in (1000, 2000):
            for strategy, wall, ranks in (("single", 0.2, 1), ("ddp", 0.1, 3), ("pipeline", 0.15, 3)):
                run = {"strategy": strategy, "ranks": ranks, "wall": wall * slower, "rss": int(1e8 / wall)}
                cases.append({"factors": {"strategy": strategy, "samples": samples, "repeat": repeat}, "run": run})
    write_study(folder, "compare", {"workers": 3, "repeats": 2, "job": JOB}, cases)


def append(path: Path, *lines: str | dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
