"""Implements `horizonml.train`: all ranks of a job on this machine, from a script or a notebook.

A job and the objects given with it travel from this process to its own children only, pickled by value, with the code
of classes and functions that no other process can import, such as those of a notebook. A pickle is code. This one is
written to an unnamed temporary file whose descriptor only the children inherit, so that nobody else can read or replace
it; it never comes from a network or from a file that has a name.

Every rank is a process of its own, also where there is one only, so that threads, memory and signal handlers of the
calling process stay as they are. The ranks end with the call, whatever ends it, and with this process, however it ends.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import signal
import sys
import tempfile
import threading
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BytesIO
from multiprocessing.reduction import DupFd
from pathlib import Path
from queue import SimpleQueue
from types import CodeType
from typing import IO, Any, ClassVar

from horizonml.api.given import Given, in_plain_words, install
from horizonml.api.history import Run, Step
from horizonml.api.jobs import DataLike, JobLike, ModelLike, TaskLike, make_job
from horizonml.api.notebook import NotebookBar, in_notebook
from horizonml.errors import JobError
from horizonml.job.jobfile import from_values
from horizonml.job.schema import Job
from horizonml.rendezvous.identity import identify
from horizonml.runtime.launch import for_this_machine, run_ranks
from horizonml.telemetry.record import StepRecord, read

NOTHING_DONE = "nothing done"  # the kind of record by which a rank tells that nothing was left to train
_HEADER = 8  # bytes of the header's length


@contextmanager
def packed(job: Job, given: Given, fresh: bool) -> Iterator[int]:
    """Yield the descriptor of a file with a job and its objects, for children to inherit. Raises JobError."""
    pickles = {name: _pickled(given.kinds[name], thing) for name, thing in given.objects.items()}
    parts = [[name, given.kinds[name], len(content)] for name, content in pickles.items()]
    header = json.dumps({"job": job.model_dump(), "fresh": fresh, "parts": parts}).encode()
    with tempfile.TemporaryFile() as file:
        _write(file, [len(header).to_bytes(_HEADER, "big"), header, *pickles.values()])
        yield file.fileno()


def unpack(descriptor: int) -> tuple[Job, bool]:
    """Return the job that the parent has written, and whether the run is to start over.

    The job's objects can be found from now on; each is unpickled only where it is needed, so that a rank without a
    need for data holds none.
    """
    content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    start = _HEADER + int.from_bytes(content[:_HEADER], "big")
    header = json.loads(content[_HEADER:start])
    for name, kind, length in header["parts"]:
        stop = start + length
        install(name, kind, partial(_unpickled, content, start, stop))
        start = stop
    return from_values(header["job"], "the job"), bool(header["fresh"])


class Objects:
    """Gives the objects of a run to a process that loads samples for a rank: it inherits the file, too."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._descriptor),)

    def __call__(self) -> None:
        unpack(self._descriptor)


def _received(duplicate: Any) -> Objects:
    return Objects(duplicate.detach())


def _pickled(kind: str, thing: Any) -> bytes:
    import cloudpickle  # only who gives objects needs it

    reducers = cloudpickle.Pickler.dispatch_table

    def reduced(code: CodeType) -> tuple[Any, ...]:
        return _code_of_file, (code.co_filename, *reducers[CodeType](code))

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        """Keeps the file names of code, which errors in the user's code name and cloudpickle 3.1.3 leaves out."""

        dispatch_table: ClassVar = ChainMap({CodeType: reduced}, reducers)

    content = BytesIO()
    try:
        Pickler(content).dump(thing)
        return content.getvalue()
    except Exception as error:
        raise JobError(
            f"{kind}: the object cannot be sent to the processes of the ranks ({type(error).__name__}: {error}); give "
            "a function that makes it there"
        ) from error


def _code_of_file(name: str, constructor: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return constructor(*arguments).replace(co_filename=name)


def _unpickled(content: mmap.mmap, start: int, stop: int) -> Any:
    with memoryview(content) as view:
        return pickle.loads(view[start:stop])  # noqa: S301  (from this process's own parent, see above)


def _write(file: IO[bytes], parts: list[bytes]) -> None:
    try:
        for part in parts:
            file.write(part)
        file.flush()
    except OSError as error:
        raise JobError(
            f"cannot write {sum(map(len, parts)):,} bytes for the ranks to {Path(tempfile.gettempdir())}: "
            f"{error.strerror or error}; set TMPDIR to a folder with room, or give a function that makes the data"
        ) from None


_LAST_SECONDS = 5.0  # for the streams to end, which a process that a rank has started may hold open


@in_plain_words()
def train(
    job: JobLike = None,
    *,
    model: ModelLike = None,
    data: DataLike = None,
    task: TaskLike = None,
    workers: int | None = None,
    on_step: Callable[[Step], object] | None = None,
    fresh: bool = False,
    progress: bool = True,
    **fields: Any,
) -> Run:
    """Train a job with all its ranks on this machine, and return the run.

    A run goes on from its newest checkpoint, as with `horizonml train`. To start another one, give it a `name` of its
    own, or `fresh=True`.
    Ctrl-C saves a checkpoint and raises KeyboardInterrupt; the same call goes on from there.

    Parameters:
        job: The path of a job file, the name of a ready job, a mapping of fields, or a `Job`. Without it, every field
            has its default.
        model: A subclass of `torch.nn.Module`, a function that returns a module, a module whose values training begins
            with, or a name. A class or function receives `num_classes` or `num_outputs` if it has such an argument.
        data: A `torch.utils.data.Dataset` of pairs (inputs, targets), or the tensors or arrays of all (inputs,
            targets); a pair of either to train on and to hold out; a function that returns one of these; a name; or a
            folder of images.
        task: What is learned: a name such as "regression", or a class or an instance that implements `horizonml.Task`.
        workers: The number of ranks. The planner decides how they divide the work (`parallel.strategy: auto`), unless
            the job sets a strategy.
        on_step: Called in this process with every step, in order. An error that it raises ends the run.
        fresh: Whether to start over; the earlier run is kept beside the new one as NAME.previous.
        progress: Whether to show the progress: as a bar on a terminal, as plain lines elsewhere, and in a notebook as
            both.
        **fields: Further fields of the job, such as `epochs=3` or `optimizer={"name": "adam"}`. A section is changed
            field by field.

    Raises HorizonError, which says what is wrong and names the field, the file or the rank.
    """
    if on_step is not None and not callable(on_step):
        raise JobError(f"on_step: give a function that is called with every step, not {on_step!r}")
    made, given = make_job(job, model, data, task, workers, fields)
    found = identify(os.environ, made.parallel.max_workers)
    if found is not None:
        raise JobError(
            f"this process is rank {found.rank} by {found.source}, but horizonml.train starts its ranks itself: run "
            "the script without that launcher, or let the launcher run `horizonml train JOB`"
        )
    given.install()
    made = for_this_machine(made, print if progress else lambda text: None)
    folder = made.run_folder.absolute()
    with ExitStack() as stack:
        objects = stack.enter_context(packed(made, given, fresh))
        parent = stack.enter_context(
            _Parent(on_step, NotebookBar(folder) if progress and in_notebook() else None, progress)
        )
        command = [sys.executable, "-P", "-m", "horizonml.api.rank", str(objects), str(parent.records)]
        stopped = run_ranks(
            made,
            command,
            fresh,
            {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)},  # as in this process
            output=parent.output,
            inherited=(objects, parent.records),
            say=parent.say,
            meanwhile=parent.dispatch,
        )
        parent.finish()
    if stopped == signal.SIGTERM:
        raise SystemExit(128 + stopped)
    if stopped is not None:
        raise KeyboardInterrupt
    if parent.nothing_done and not progress:  # or it is printed
        warnings.warn(
            f"{made.run_folder} had been trained to the end before, so this call has trained nothing and returns that "
            "run: pass fresh=True to start over, or another name",
            stacklevel=3,
        )
    return Run(folder, given=given, job=made)


class _Parent:
    """Receives what the first rank prints and records, and passes it on within this process.

    Threads read both streams, so that a slow `on_step` never holds up the training.
    """

    def __init__(self, on_step: Callable[[Step], object] | None, bar: NotebookBar | None, progress: bool) -> None:
        self._on_step, self._bar, self._progress = on_step, bar, progress
        self._queue: SimpleQueue[str | Step] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open: list[int] = []
        self.output: int | None = None
        # A bar needs the terminal for itself.
        if not progress or on_step is not None or not _on_terminal():
            self.output = self._pipe(lambda line: line if progress else None)
        self.nothing_done = False  # because an earlier call had trained to the end
        self.records = self._pipe(self._parse_record)

    def __enter__(self) -> _Parent:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            self._on_step = None  # what went wrong is raised at once
        self.finish()

    def _pipe(self, parse: Callable[[str], str | Step | None]) -> int:
        """Return the end to write to of a pipe whose lines are queued as `parse` returns them."""
        source, target = os.pipe()
        thread = threading.Thread(target=self._read, args=(os.fdopen(source, encoding="utf-8"), parse), daemon=True)
        thread.start()
        self._threads.append(thread)
        self._open.append(target)
        return target

    def _parse_record(self, line: str) -> Step | None:
        found = json.loads(line)
        if found.get("kind") == NOTHING_DONE:
            self.nothing_done = True
        record = read(found) if self._on_step is not None else None
        return Step.from_record(record) if isinstance(record, StepRecord) else None

    def _read(self, stream: IO[str], parse: Callable[[str], str | Step | None]) -> None:
        with stream:
            for line in stream:
                found = parse(line)
                if found is not None:
                    self._queue.put(found)

    def say(self, text: str) -> None:
        """Print a message of this process."""
        if self._progress:
            print(text, flush=True)

    def dispatch(self) -> None:
        """Print what has been printed, and hand over the steps that have been recorded since the last call."""
        if self._bar is not None:
            self._bar.update()
        while not self._queue.empty():
            found = self._queue.get()
            if isinstance(found, str):
                print(found, end="", flush=True)
            elif self._on_step is not None:
                self._on_step(found)

    def finish(self) -> None:
        """Hand over the rest, once the ranks have ended."""
        while self._open:
            os.close(self._open.pop())
        for thread in self._threads:
            thread.join(_LAST_SECONDS)
        self.dispatch()
        if self._bar is not None:
            self._bar.update(last=True)


def _on_terminal() -> bool:
    """Return whether this process prints to a terminal, and through the descriptor that its children inherit."""
    try:
        return sys.stdout.isatty() and sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):  # a stream of a notebook, or of a test, may have no descriptor
        return False
