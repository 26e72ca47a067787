"""The commands that measure and compare, on this machine: `horizonml bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from horizonml.cli.options import Emulate, Overrides
from horizonml.errors import JobError
from horizonml.machine.code import require
from horizonml.text import nearest

if TYPE_CHECKING:
    from horizonml.job.schema import Job
    from horizonml.report.bench.study import Case, StudySettings
    from horizonml.report.section import Section

STRATEGIES = ("single", "ddp", "pipeline", "hybrid", "auto", "tensor", "horovod")
BUILT_IN = {
    "cifar10": "{name: cifar10, epochs: 5, batch_size: 160, model: {name: resnet18}, data: {name: cifar10}, "
    "optimizer: {lr: 0.1, nesterov: true}, lr_schedule: {warmup_steps: 20}}",
    "digits": "{name: digits, epochs: 5, batch_size: 64, data: {name: digits}, lr_schedule: {warmup_steps: 10}}",
    "synthetic": "{name: synthetic, epochs: 5, batch_size: 160, model: {name: resnet18}, "
    "data: {name: synthetic, image_size: 32}, optimizer: {lr: 0.05}, lr_schedule: {warmup_steps: 20}}",
}


class _ManyValues(TyperCommand):
    """A command whose repeatable options also take several values at once: `--workers 1 2 4`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.spread(args))

    def spread(self, args: list[str]) -> list[str]:
        """Return `--workers 1 2 4` as `--workers 1 --workers 2 --workers 4`; a word with a dot or slash is a file."""
        many = {name for option in self.params if getattr(option, "multiple", False) for name in option.opts}
        many.discard("--set")
        spread: list[str] = []
        option, given = "", False  # the option whose values these may be, and whether it has one already
        for word in args:
            if word.startswith("-"):
                option, given = word if word in many else "", False
            elif option and given and not {".", "/"} & set(word):
                spread.append(option)
            else:
                option, given = option if not given else "", True
            spread.append(word)
        return spread


app = typer.Typer(help="Measure and compare ways of training, on this machine.", no_args_is_help=True)

JobFile = Annotated[
    Path | None,
    typer.Argument(metavar="JOB", help="A job file (YAML). Default: a built-in one for --data.", show_default=False),
]
Data = Annotated[
    str,
    typer.Option(
        metavar="NAME", help=f"Without a job file: {', '.join(BUILT_IN)}. digits and synthetic need no network."
    ),
]
DataFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where the data lies, or is downloaded to.", show_default=False)
]
Repeats = Annotated[
    int, typer.Option(metavar="N", min=1, help="Repeats of everything, with seeds of their own: error bars.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Do the runs again that are done already.")]
Strategies = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME ...", help=f"Ways of training, several at once: {', '.join(STRATEGIES)}."),
]
Workers = Annotated[list[int], typer.Option(metavar="N ...", min=1, help="Numbers of workers, several at once.")]
Models = Annotated[list[str], typer.Option(metavar="NAME ...", help="Models, several at once.")]


@app.command(cls=_ManyValues)
def compare(
    job_file: JobFile = None,
    samples: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N ...",
            min=1,
            help="Training samples, several at once. Default: 1000 10000 50000; all, for a job file or digits.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", "-n", metavar="N", min=2, help="World size of the parallel runs.")
    ] = 5,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Passes over the samples. Default: 5, or the job file's.", show_default=False
        ),
    ] = None,
    strategies: Strategies = None,
    data: Data = "cifar10",
    data_folder: DataFolder = None,
    overrides: Overrides = None,
    repeats: Repeats = 1,
    emulate: Emulate = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for records, numbers, pictures and the report.")
    ] = Path("runs/compare"),
    fresh: Fresh = False,
) -> None:
    """Compare ways of training on the same samples.

    All make the same updates from the same seeds. For example, without a network: horizonml bench compare --data digits
    --samples 400 1400 --strategies single ddp pipeline. Interrupted, the same command goes on where it stopped.
    """
    require("matplotlib", "`horizonml bench`")
    from horizonml.machine.emulation import emulated_devices
    from horizonml.report.bench import compare as study
    from horizonml.report.bench.study import StudySettings

    job = _job(
        job_file,
        data,
        data_folder,
        [*(overrides or []), *([] if epochs is None else [f"epochs={epochs}", "steps=null"])],
    )
    chosen = _strategies(strategies, ("single", "ddp", "pipeline", "hybrid"))
    sizes = samples or ([] if job_file is not None or data == "digits" else [1000, 10000, 50000])
    devices = emulated_devices(workers)
    facts = StudySettings.facts(job)
    settings = StudySettings(workers=workers, repeats=repeats, emulated=devices, job=facts)
    cases = study.cases(job, chosen, sizes, workers, repeats)
    _run("compare", cases, settings, out, fresh)


@app.command(cls=_ManyValues)
def scaling(
    job_file: JobFile = None,
    mode: Annotated[
        str, typer.Option(metavar="MODE", help="weak: a batch for each worker; strong: one batch, shared.")
    ] = "strong",
    workers: Workers = [1, 2, 4],  # noqa: B006  (typer copies it)
    strategies: Strategies = None,
    steps: Annotated[int, typer.Option(metavar="N", min=4, help="Steps of each run.")] = 12,
    data: Data = "synthetic",
    data_folder: DataFolder = None,
    overrides: Overrides = None,
    repeats: Repeats = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder for records and report. Default: runs/scaling-MODE.")
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Measure speed over the number of workers.

    Shows throughput, speed-up and efficiency, against the ideal.
    """
    require("matplotlib", "`horizonml bench`")
    from horizonml.report.bench import scaling as study
    from horizonml.report.bench.study import ScalingMode, StudySettings

    try:
        scaling_mode = ScalingMode(mode)
    except ValueError:
        raise JobError(f"--mode: {mode!r} is neither weak nor strong") from None
    job = _job(job_file, data, data_folder, overrides)
    chosen = _strategies(strategies, ("ddp", "horovod", "pipeline", "hybrid"))
    if "single" in chosen:
        chosen.remove("single")  # it is measured anyway
    settings = StudySettings(mode=scaling_mode, steps=steps, repeats=repeats, job=StudySettings.facts(job))
    cases = study.cases(job, scaling_mode, chosen, workers, steps, repeats)
    _run("scaling", cases, settings, out or Path(f"runs/scaling-{mode}"), fresh)


@app.command("batch-size", cls=_ManyValues)
def batch_size(
    sizes: Annotated[
        list[int] | None, typer.Argument(metavar="SIZE", help="Batch sizes. Default: 64 128 256 512 1024.")
    ] = None,
    models: Models = ["resnet50", "resnet18"],  # noqa: B006
    strategy: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(STRATEGIES)}.")] = "single",
    workers: Annotated[int, typer.Option("--workers", "-n", metavar="N", min=1, help="World size.")] = 1,
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Steps of each run; the first half is warm-up.")] = 4,
    overrides: Overrides = None,
    repeats: Repeats = 1,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for records and report.")] = Path(
        "runs/batch-size"
    ),
    fresh: Fresh = False,
) -> None:
    """Measure speed and memory over the batch size.

    Trains on data of SVHN's shape, and shows where memory would end.
    """
    require("matplotlib", "`horizonml bench`")
    from horizonml.report.bench import batch_size as study
    from horizonml.report.bench.study import StudySettings

    job = _job(None, "synthetic", None, overrides)
    strategy = _strategies([strategy], ())[0]
    chosen = [part for name in models for part in name.split(",") if part]
    facts = StudySettings.facts(job)
    settings = StudySettings(strategy=strategy, workers=workers, steps=steps, repeats=repeats, job=facts)
    cases = study.cases(job, chosen, sizes or [64, 128, 256, 512, 1024], strategy, workers, steps, repeats)
    _run("batch-size", cases, settings, out, fresh)


def _job(path: Path | None, data: str, folder: Path | None, overrides: list[str] | None) -> Job:
    """Return the job to study: that of the file, else the built-in one for some data. Raises JobError."""
    from horizonml.job.jobfile import load, parse

    extra = list(overrides or [])
    if folder is not None:
        extra.append(f"data.folder={folder}")
    if path is not None:
        return load(path, extra)
    if data not in BUILT_IN:
        raise JobError(f"--data: {data!r} is not one of {', '.join(BUILT_IN)}{nearest(data, BUILT_IN)}")
    return parse(BUILT_IN[data], f"the built-in job for {data}", extra)


def _strategies(given: Sequence[str] | None, default: Sequence[str]) -> list[str]:
    """Return the strategies to study, each once. Raises JobError."""
    chosen = [part for name in given or default for part in name.split(",") if part]
    for name in chosen:
        if name not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise JobError(f"--strategies: {name!r} is not one of {known}{nearest(name, STRATEGIES)}")
    if not given and "horovod" in chosen and find_spec("horovod") is None:
        print("horovod is left out: it is not installed (`make horovod` builds it)", flush=True)
        chosen.remove("horovod")
    return list(dict.fromkeys(chosen))


def _run(kind: str, cases: Sequence[Case], settings: StudySettings, out: Path, fresh: bool) -> None:
    """Run a study, show what came out, and write the report. Raises HorizonError, and Exit if a run failed."""
    from horizonml.report.bench.report import SECTIONS, write_report
    from horizonml.report.bench.study import run_study
    from horizonml.runtime.launch import check_strategy

    for case in cases:
        check_strategy(case.job)
    try:
        study = run_study(kind, cases, settings, out, fresh, lambda text: print(text, flush=True))
    except KeyboardInterrupt:  # between two runs
        study = None
    if study is None:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr)
        raise typer.Exit(130)
    print()
    for path in write_report(out):
        print(path)
    _show(SECTIONS[kind](study))
    if study.failed:
        raise typer.Exit(1)


def _show(section: Section) -> None:
    """Print a section's brief table, or else all its tables, and its findings."""
    from horizonml.cli.tables import print_table, print_text

    for table in [section.brief] if section.brief else section.tables:
        print()
        print_table(section.title, table.header, table.rows)
    print()
    for finding in section.findings:
        print_text(finding, "- ")
    print()
