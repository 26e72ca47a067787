"""Commands of `horizonml` as a user types them, run within the process of the tests, which has everything loaded."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

from horizonml.cli.app import app
from horizonml.runtime import process

COMMAND = get_command(app)  # once, because it takes 60 ms


def command(folder: Path, *arguments: str, without: str = "", **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, as if one package were not installed; errors end it as they end a process of ours."""
    out, err = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        for name, value in {"COLUMNS": "80", **extra}.items():
            patch.setenv(name, value)
        if without:
            patch.setitem(sys.modules, without, None)
        # What a process does with all of itself is not for the tests' own.
        patch.setattr(process, "watch_launcher", lambda: None)
        patch.setattr(process, "faulthandler", SimpleNamespace(enable=lambda: None))
        patch.setattr(threading.Thread, "start", threading.Thread.start)
        patch.setattr("sys.unraisablehook", sys.unraisablehook)
        patch.setattr(root, "handlers", [])  # it makes its own
        patch.setattr(root, "level", root.level)
        code = process._run(lambda: COMMAND(list(arguments), prog_name="horizonml"))
    return subprocess.CompletedProcess(["horizonml", *arguments], code, out.getvalue(), err.getvalue())
