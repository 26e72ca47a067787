"""Where the command line begins: nothing is imported before Ctrl-C and errors are handled."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run a command, and print the errors that are meant for the user without a traceback."""
    if os.name == "nt":
        sys.exit(
            "error: HorizonML does not run on Windows itself. Install it in WSL2 (`wsl --install`), which is Linux, "
            "with networkingMode=mirrored in .wslconfig, so that other devices reach it."
        )
    try:
        from horizonml.runtime.process import run_and_exit
    except KeyboardInterrupt:
        os._exit(130)
    run_and_exit(_command)


def _command() -> None:
    from horizonml.cli.app import tree

    tree()
