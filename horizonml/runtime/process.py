"""Ends a process of ours: with an exit code, and with errors in words instead of tracebacks.

Whoever has started it finds the words in a file, so that nobody need search through what it has printed.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import horizonml
from horizonml.errors import (
    HorizonError,
    NoTemporaryFolder,
    OutOfMemory,
    TooManyFiles,
    is_out_of_files,
    is_out_of_memory,
    lacks_temporary_folder,
)
from horizonml.machine.host import needs_one_thread
from horizonml.machine.signals import explain_signal, watch_launcher
from horizonml.text import escaped, plain_lines

ENDING = "HORIZONML_ENDING"  # the file into which a process writes why it fails, for the one that has started it
TOLD_ABOVE = "HORIZONML_TOLD_ABOVE"  # set if that one shows the error, so that it is not shown twice
_PACKAGE = Path(horizonml.__file__).parent
_BEGIN_SECONDS, _LOOK_SECONDS = 10.0, 0.25  # for a thread to begin, and between two looks
_LAST_LINES = 15  # of what a process has said, if it could not say why it fails
_AGAIN_SECONDS = 0.1  # until an interrupt that was lost is repeated
_python_start = threading.Thread.start
_endings: list[Path] = []  # the file of this process, if it has one
_is_told_above = False


def run_and_exit(action: Callable[[], object]) -> NoReturn:
    """Run a process's action and end the process; errors that are meant for the user are printed as one sentence."""
    code = HorizonError.exit_code
    try:
        ended = _run(action)
        sys.stdout.flush()
        sys.stderr.flush()
        code = ended
    except KeyboardInterrupt:
        code = 130
    except (OSError, MemoryError) as error:  # what there was to say could not be said
        os.write(2, f"error: {error or 'out of memory'}\n".encode())
    finally:
        # Unloading torch takes a quarter of a second, and threads inside it may still talk to the network. Without
        # this, threads such as the heartbeat could also outlive the main thread, when that dies of an error in here.
        os._exit(code)


def _run(action: Callable[[], object]) -> int:
    """Run a process's action, print its error if it fails, and return the exit code."""
    watch_launcher()
    global _is_told_above
    _endings[:] = [Path(path) for path in [os.environ.pop(ENDING, "")] if path]  # its own children have others
    _is_told_above = bool(os.environ.pop(TOLD_ABOVE, ""))
    threading.Thread.start = _start  # type: ignore[method-assign, assignment]
    sys.unraisablehook = _interrupt_again
    if needs_one_thread():  # before PyTorch is loaded
        os.environ["OMP_NUM_THREADS"] = "1"
    faulthandler.enable()  # an instruction that the processor lacks, in PyTorch, would end this without a word
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain("%(levelname)s: %(message)s"))
    logging.basicConfig(level=os.environ.get("HORIZONML_LOG", "WARNING").upper(), handlers=[handler])
    try:
        action()
    except HorizonError as error:
        return _print_error(error)
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Exception as error:
        scarce = next((one for one in _chain(error) if is_out_of_memory(one)), None)
        if scarce is not None:
            traceback.clear_frames(scarce.__traceback__)  # which hold what has filled the memory
            return _print_error(OutOfMemory(loading=isinstance(scarce, ImportError)))
        limited = next((one for one in _chain(error) if is_out_of_files(one)), None)
        if limited is not None:
            return _print_error(TooManyFiles(limited))
        if any(map(lacks_temporary_folder, _chain(error))):
            return _print_error(NoTemporaryFolder())
        place = own_line(error)
        if place is not None:  # the user's code: all of it for the log, and a sentence for the terminal
            traceback.print_exc()
            return _print_error(HorizonError(f"{place}: {type(error).__name__}: {str(error).strip() or 'no message'}"))
        logging.exception("please report this")  # a bug: show it all
        return 70
    return 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class _Begun(threading.Event):
    """Is set by a thread that begins; who starts it waits for that, but not for ever.

    Python waits without a limit. A thread that has a stack, but no memory for its first step, ends before it can say
    so, and whoever started it would hang, while the heartbeat goes on.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Wait; raise RuntimeError if the thread does not begin. Time in which the process is stopped counts little."""
        if timeout is not None:
            return super().wait(timeout)
        for _ in range(int(_BEGIN_SECONDS / _LOOK_SECONDS)):
            if super().wait(_LOOK_SECONDS):
                return True
        raise RuntimeError(f"can't start new thread: it has not begun within {_BEGIN_SECONDS:.0f} s")


def _start(thread: threading.Thread) -> None:
    """Start a thread, whoever made it; raise RuntimeError if it does not begin, instead of waiting for ever."""
    thread._started = _Begun()  # type: ignore[attr-defined]
    _python_start(thread)


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Interrupt the main thread anew if Ctrl-C came in a callback whose exceptions Python ignores, as in an import."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT)).start()


class _Plain(logging.Formatter):
    """Formats messages so that what they quote of other ranks and of files can neither forge lines nor move cursors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or the lines, of a record."""
        return escaped(super().format(record))


def _print_error(error: HorizonError) -> int:
    sys.stdout.flush()  # what was said before comes before
    report(str(error))
    return error.exit_code


def report(error: str) -> None:
    """Say why this process ends: to the process that has started it, and on standard error unless that one does so."""
    if not _is_told_above:
        print(f"error: {plain_lines(error)}", file=sys.stderr, flush=True)
    for path in _endings:
        with suppress(OSError):
            path.write_text(error)


def how_ended(code: int) -> str:
    """Return what became of a process, from its exit code as `subprocess` gives it."""
    return f"was killed by {explain_signal(-code)}" if code < 0 else f"ended with code {code}"


def why_it_failed(code: int, ending: Path, said: Sequence[str]) -> str:
    """Return why a process failed: what it has reported in its `ENDING`, or else the last lines that it has `said`."""
    if code < 0:
        return f"it {how_ended(code)}"
    with suppress(OSError):
        return plain_lines(ending.read_text(errors="replace"))
    return "\n".join(said[-_LAST_LINES:]) or f"it {how_ended(code)} and said nothing"


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
