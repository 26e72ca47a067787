"""Trains a job once for each of several seeds, and shows how far the results are apart."""

from __future__ import annotations

from horizonml.errors import JobError
from horizonml.job.schema import Job


def parse_seeds(text: str) -> list[int]:
    """Return the seeds of an option, such as `0,1,2`. Raises JobError."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise JobError(f"--seeds: {text!r} is not a list of different seeds, for example 0,1,2")
    return seeds


def train_seeds(job: Job, seeds: list[int], fresh: bool, metrics: tuple[str, int] | None) -> bool:
    """Run the job for each seed, in folders of their own inside the job's; return whether all ran to their ends.

    Runs that are complete already are not repeated. Raises RankFailed or HorizonError.
    """
    from horizonml.cli.tables import print_table
    from horizonml.job.jobfile import changed
    from horizonml.report.section import write_numbers
    from horizonml.report.seeds import as_rows, as_table, spreads
    from horizonml.runtime.launch import train_here

    folders = {seed: job.run_folder / f"seed-{seed}" for seed in seeds}
    for number, (seed, folder) in enumerate(folders.items(), 1):
        print(f"seed {seed} ({number} of {len(seeds)}), in {folder}", flush=True)
        if not train_here(changed(job, {"seed": seed, "folder": str(folder)}), fresh, metrics):
            return False
    found = spreads(folders)
    table = as_table(found)
    print()
    print_table(table.title, table.header, table.rows)
    rows = as_rows(found)
    files = write_numbers(job.run_folder / "seeds", rows, {"seeds": seeds, "metrics": rows})
    print(f"\nThe numbers are in {' and '.join(map(str, files))}.")
    return True
