"""Ends a process of ours: with an exit code, and with errors in words instead of tracebacks."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import horizonml
from horizonml.errors import HorizonError, OutOfMemory, is_out_of_memory
from horizonml.machine.signals import watch_launcher
from horizonml.text import escaped, plain_lines

_PACKAGE = Path(horizonml.__file__).parent


def run_and_exit(action: Callable[[], object]) -> NoReturn:
    """Run a process's action and end the process; errors that are meant for the user are printed as one sentence."""
    watch_launcher()
    faulthandler.enable()  # an instruction that the processor lacks, in PyTorch, would end this without a word
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain("%(levelname)s: %(message)s"))
    logging.basicConfig(level=os.environ.get("HORIZONML_LOG", "WARNING").upper(), handlers=[handler])
    code: int | str | None = 0
    try:
        action()
    except HorizonError as error:
        code = _print_error(error)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    except Exception as error:
        place = own_line(error)
        if is_out_of_memory(error):
            code = _print_error(OutOfMemory())
        elif place is not None:  # the user's code: all of it for the log, and a sentence for the terminal
            traceback.print_exc()
            code = _print_error(HorizonError(f"{place}: {type(error).__name__}: {str(error).strip() or 'no message'}"))
        else:  # a bug: show it all
            logging.exception("please report this")
            code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    # Unloading torch takes a quarter of a second, and threads inside it may still talk to the network.
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


class _Plain(logging.Formatter):
    """Formats messages so that what they quote of other ranks and of files can neither forge lines nor move cursors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or the lines, of a record."""
        return escaped(super().format(record))


def _print_error(error: HorizonError) -> int:
    """Print an error, and return its exit code."""
    sys.stdout.flush()  # what was said before comes before
    print(f"error: {plain_lines(str(error))}", file=sys.stderr)
    return error.exit_code


def own_line(error: BaseException) -> str | None:
    """Return the last line of the user's own code that HorizonML called and that failed, in words.

    That is `file:line (in function)`, or the line of the model's forward pass as torch.fx has recorded it. Return None
    if the error comes from this package, from Python or from an installed package alone.
    """
    return own_place(traceback.extract_tb(error.__traceback__))


def own_place(frames: traceback.StackSummary) -> str | None:
    """Return the last line of the user's own code that HorizonML called within a stack; see `own_line`."""
    ours = [number for number, frame in enumerate(frames) if Path(frame.filename).is_relative_to(_PACKAGE)]
    for frame in reversed(frames[ours[0] :] if ours else []):
        if frame.filename.startswith("<eval_with_key>"):
            return f"the model's forward pass, at `{frame.line}`" if frame.line else "the model's forward pass"
        if _is_own(frame.filename):
            return f"{frame.filename}:{frame.lineno} (in {frame.name})"
    return None


def _is_own(name: str) -> bool:
    """Return whether a file of code belongs neither to this package, nor to Python, nor to an installed package."""
    file = Path(name)
    if name.startswith(("<frozen", "<string>")) or {"site-packages", "dist-packages"} & {*file.parts}:
        return False
    folders = (_PACKAGE, *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")))
    return not any(file.is_relative_to(folder) for folder in folders)
