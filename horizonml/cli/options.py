"""The options that several families of commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from horizonml.machine.host import DEVICE, check_device

if TYPE_CHECKING:
    from horizonml.job.schema import Job


JobFile = Annotated[
    Path,
    typer.Argument(
        metavar="JOB",
        help="A job file (YAML), or a ready job: cifar10, digits, explicit-plan, folder, synthetic, text. A job file "
        "whose model is `module:callable` runs that code: use only those that you trust.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field of the job, e.g. optimizer.lr=0.1 (repeatable)."),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Start over; the earlier run is kept beside the new one as NAME.previous.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-n",
        metavar="N",
        min=1,
        help="World size; short for --set parallel.workers=N.",
        show_default=False,
    ),
]


def _note_device(device: str | None) -> str | None:
    """Hand the device on to the processes that this command starts, and to their ranks. Raises JobError."""
    if device is not None:
        check_device(device, "--device")
        if device not in ("auto", "cpu"):  # or PyTorch need not be loaded
            from horizonml.machine.accelerator import check_there

            check_there(device, "--device")
        os.environ[DEVICE] = device
    return device


Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="What the ranks of this machine compute on: auto, cpu, cuda, cuda:N or mps, whatever the job says. "
        "HORIZONML_DEVICE does the same.",
        callback=_note_device,
        show_default=False,
    ),
]


def _note_emulated(cores: str | None) -> str | None:
    """Hand the devices on to the processes that this command starts. Raises JobError."""
    if cores is not None:
        from horizonml.machine.emulation import EMULATE, parse_cores

        parse_cores(cores)
        os.environ[EMULATE] = cores
    return cores


Emulate = Annotated[
    str | None,
    typer.Option(
        "--emulate",
        metavar="CORES,...",
        help="Let each rank on this machine stand for a device with so many cores, which it is held back to: 0.4 for "
        "equal devices, or 0.8,0.4,0.4,0.2,0.2. Their links are not slowed down.",
        callback=_note_emulated,
        show_default=False,
    ),
]


def _note_measure_again(again: bool) -> bool:
    """Let this command, and the ranks that it starts, use nothing that was measured before."""
    if again:
        from horizonml.profiling.kept import measure_again

        measure_again()
    return again


MeasureAgain = Annotated[
    bool,
    typer.Option(
        "--measure-again",
        help="Measure this device anew, instead of using what earlier commands have measured and kept: layers, "
        "threads, ways to run layers, and how much ranks of one machine slow one another down.",
        callback=_note_measure_again,
    ),
]


def load_job(path: Path, overrides: list[str] | None, workers: int | None = None) -> Job:
    """Return the job of a file with the options that override its fields. Raises JobError."""
    from horizonml.job.jobfile import load

    extra = [f"parallel.workers={workers}"] if workers is not None else []
    return load(path, [*(overrides or []), *extra])
