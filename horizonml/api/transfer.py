"""Carries a job and the objects given with it from a process to its own children.

The objects are pickled by value, with the code of classes and functions that no other process can import, such as those
of a notebook. A pickle is code. This one is written to an unnamed temporary file whose descriptor only the children
inherit, so that nobody else can read or replace it; it never comes from a network or from a file that has a name.
"""

from __future__ import annotations

import json
import mmap
import pickle
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import CodeType
from typing import IO, Any, ClassVar

from horizonml.api.given import Given, install
from horizonml.errors import JobError
from horizonml.job.jobfile import from_values
from horizonml.job.schema import Job

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
