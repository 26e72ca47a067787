"""The command that looks after the checkpoints of a run: `horizonml checkpoints`."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from horizonml.state.shards import Metadata


def checkpoints(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run's folder (runs/NAME), or a folder of copies.", show_default=False),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all files, and compare them with their checksums.")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            "--prune",
            metavar="N",
            min=1,
            help="Delete all but the newest N intact ones and the best one; all are verified before.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--restore",
            metavar="PLACE",
            help="Fetch the newest intact copy from a folder or URL (see checkpoint.copy_to), such as s3://bucket/run.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the checkpoints of a run, verify, delete or restore them.

    A shard that other machines keep is not missed here, unless it is damaged. The exit code is 1 if any is.
    """
    from horizonml.cli.tables import print_table
    from horizonml.errors import CheckpointError, JobError
    from horizonml.state.saver import was_best
    from horizonml.state.shards import steps
    from horizonml.telemetry.lifeline import living_ranks

    folder = run if steps(run) and not (run / "checkpoints").is_dir() else run / "checkpoints"
    if (keep is not None or source is not None) and living_ranks(run):
        raise JobError(f"{run} is in use: a rank trains there; stop it first")
    if source is not None:
        from horizonml.state.backup import restore

        path, found = restore(source, folder)
        print(f"restored {path} (step {found.step}); `horizonml train` with the run's job goes on from it")
        return
    if not steps(folder):
        raise CheckpointError(f"no checkpoint in {run}; give a run's folder (runs/NAME)")
    listed = [(path, *_row(path, verify or keep is not None)) for path in steps(folder)]
    rows, intact = [row for _, row, _ in listed], [path for path, _, damaged in listed if not damaged]
    print_table("", ["step", "saved", "size", "held-out loss", "state"], rows, text=(1, 4))
    if keep is not None:
        if not intact:
            raise CheckpointError("nothing is deleted, because no checkpoint is intact")
        best = [path for path in intact if was_best(path)][:1]
        old = [path for path in steps(folder) if path not in [*intact[:keep], *best]]
        for path in old:
            shutil.rmtree(path)
        print(f"deleted {', '.join(path.name for path in old) or 'none'}")
    elif len(intact) < len(listed):
        raise typer.Exit(1)


def _row(path: Path, content: bool) -> tuple[list[str], bool]:
    """Return a row about a checkpoint, and whether it is damaged."""
    from horizonml.errors import CheckpointError
    from horizonml.state.shards import read_metadata, step_of, verify_shard
    from horizonml.text import human_bytes, printable

    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    try:
        metadata = read_metadata(path)
    except CheckpointError as error:
        return [str(step_of(path)), saved, "-", "-", printable(str(error), 200)], True
    here, problems, size = list[str](), list[str](), 0
    for name, shard in metadata.shards.items():
        if (path / name).exists():
            here.append(name)
            size += shard.bytes
            try:
                verify_shard(path / name, shard, content)
            except CheckpointError as error:
                problems.append(str(error))
        elif not shard.machines:
            problems.append(f"{name} is missing")
    loss = metadata.metrics.get("held_out_loss")
    return [
        str(metadata.step),
        saved,
        human_bytes(size),
        f"{loss:.4f}" if loss is not None else "-",
        "; ".join([*problems, *_words(metadata, here, content and not problems)]),
    ], bool(problems)


def _words(metadata: Metadata, here: list[str], verified: bool) -> list[str]:
    """Return in words what a checkpoint is, beside damages."""
    from horizonml.state.shards import KEPT

    best = metadata.best.get(KEPT)
    away = {machine for name, shard in metadata.shards.items() if name not in here for machine in shard.machines}
    words = ["verified"] if verified else []
    words += ["the end of the training"] if metadata.complete else []
    words += ["the best"] if best is not None and best.step == metadata.step else []
    if away:
        words.append(f"{len(here)} of {len(metadata.shards)} shards are here, the others on {', '.join(sorted(away))}")
    return words
