"""Runs the reading of samples in threads or processes, or here, when the rows are asked for."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from horizonml.data.choose import load
from horizonml.data.dataset import Data, DataBatch, DataInfo, Rows, loads_ahead
from horizonml.data.spec import DataSpec
from horizonml.errors import DataError, HorizonError
from horizonml.machine.code import inheritance
from horizonml.machine.host import available_cores

_MOST_WORKERS = 4  # that `auto` takes
_CLOSE_SECONDS = 5.0  # for workers to finish what they read
_OTHERS = (None, -signal.SIGTERM)  # exit codes of processes that run, or that the executor ended after another one
_PATIENCE = 30.0  # seconds without samples after which the log says so

_log = logging.getLogger(__name__)


class PendingRows:
    """Stands for rows that are read, or waited for, when they are asked for the first time."""

    def __init__(self, read: Callable[[], Rows], cancel: Callable[[], object] = lambda: None) -> None:
        """`cancel` gives up rows that nobody has begun to read."""
        self._read, self.cancel = read, cancel
        self._found: Rows | None = None

    def rows(self) -> Rows:
        """Return the rows, once they are read. Raises what reading them raised."""
        if self._found is None:
            self._found = self._read()
        return self._found


def workers_for(spec: DataSpec, data: Data, cache: Path, inputs: bool, targets: bool) -> Workers:
    """Return the workers that a job asks for. Raises DataError."""
    if spec.worker_kind == "threads" and data.draws:
        raise DataError(
            "data.worker_kind: the data set draws random numbers, which threads share, so that no run could be "
            "repeated; choose processes or auto"
        )
    count = spec.workers if isinstance(spec.workers, int) else _automatic(spec)
    if not count or not (inputs or targets):
        return Inline()
    if spec.worker_kind == "processes" or data.draws:
        return Processes(count, spec, data, cache, inputs, targets)
    return Threads(count)


def _automatic(spec: DataSpec) -> int:
    """Return how many workers are worth having: as many as computing leaves cores free, but at least one."""
    if not loads_ahead(spec):
        return 0
    return max(1, min(_MOST_WORKERS, int(available_cores()) - torch.get_num_threads()))


class Inline:
    """Reads rows in the calling thread, when they are asked for."""

    count = 0

    def read(self, batch: DataBatch, start: int, stop: int, inputs: bool, targets: bool) -> PendingRows:
        """Remember which rows to read."""
        return PendingRows(lambda: batch.rows(start, stop, inputs, targets))

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class _Executor:
    """Hands rows to an executor, and ends it without waiting long for one that is stuck."""

    def __init__(self, executor: Executor, count: int) -> None:
        self.count, self._executor = count, executor
        self._begun: set[Future[Any]] = set()

    def _submit(self, unpack: Callable[[Any], Rows], function: Callable[..., Any], *arguments: Any) -> PendingRows:
        try:
            future = self._executor.submit(function, *arguments)
        except BrokenExecutor as error:
            future = Future()
            future.set_exception(error)
        self._begun = {one for one in self._begun if not one.done()} | {future}
        return PendingRows(lambda: unpack(self._result(future)), future.cancel)

    def _result(self, future: Future[Any]) -> Any:
        """Return what was read; while it does not come, say so, since all ranks wait for it. Raises DataError."""
        seconds = 0.0
        while wait_for_futures([future], _PATIENCE).not_done:
            seconds += _PATIENCE
            _log.warning(
                "data: samples that a step needs have not been read for %.0f s, and all ranks wait for them; if they "
                "never come, look at the data set's __getitem__ and at the disk or the server that it reads",
                seconds,
            )
        try:
            return future.result()
        except BrokenExecutor as error:
            raise DataError(f"data.workers: a process that loads samples {self._how_ended()}") from error

    def _how_ended(self) -> str:
        """Return, as a part of a sentence, how a worker has ended that should not have, and what to do."""
        return "has ended"  # which threads do not

    def close(self) -> None:
        """End the workers; each of them finishes the rows that it is reading."""
        running = [future for future in self._begun if not future.cancel()]
        _, stuck = wait_for_futures(running, _CLOSE_SECONDS)
        self._executor.shutdown(wait=not stuck, cancel_futures=True)


class Threads(_Executor):
    """Reads rows in threads of this process; decoders of images and files run side by side with the computing."""

    def __init__(self, count: int) -> None:
        super().__init__(ThreadPoolExecutor(count, "load"), count)

    def read(self, batch: DataBatch, start: int, stop: int, inputs: bool, targets: bool) -> PendingRows:
        """Hand the rows to a thread."""
        return self._submit(lambda rows: rows, batch.rows, start, stop, inputs, targets)


class Processes(_Executor):
    """Reads rows in processes, each of which opens the data set for itself.

    They are started anew rather than forked, because a rank's threads would not survive that. Rows come back through a
    pipe and not in shared memory, of which containers have little.
    """

    def __init__(self, count: int, spec: DataSpec, data: Data, cache: Path, inputs: bool, targets: bool) -> None:
        self._data, self._of = data, (spec, cache)
        context = multiprocessing.get_context("spawn")
        end, self._end = context.Pipe(duplex=False)
        given = (end, inheritance(), spec.model_dump_json(), data.info.to_json(), str(cache), inputs, targets)
        self._pool = ProcessPoolExecutor(count, context, _open, given)
        self._processes: dict[int, BaseProcess] = {}  # all that have been started
        super().__init__(self._pool, count)

    def read(self, batch: DataBatch, start: int, stop: int, inputs: bool, targets: bool) -> PendingRows:
        """Hand the rows to a process."""
        part = batch.split is self._data.train, batch.indices.tolist(), batch.augment_seed
        pending = self._submit(pickle.loads, _read, *part, start, stop, inputs, targets)
        self._processes |= self._pool._processes or {}
        return pending

    def goes_on(self, spec: DataSpec, data: Data, cache: Path) -> bool:
        """Load samples of `data` from now on, and return whether that can be: starting processes anew takes seconds.

        It can if the data is the same, whatever part of it was read before, and all processes are alive.
        """
        if (spec, cache) != self._of or data.info != self._data.info or self._is_broken():
            return False
        self._data = data
        return True

    def _how_ended(self) -> str:
        """Return how the first worker ended; the executor has sent SIGTERM to the others."""
        until = time.monotonic() + _CLOSE_SECONDS
        while not (codes := [one.exitcode for one in self._processes.values() if one.exitcode not in _OTHERS]):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        code = codes[0] if codes else None
        if code == -signal.SIGKILL:
            return (
                "was killed (SIGKILL), as the kernel does when memory runs out (see dmesg); lower data.workers, "
                "data.prefetch or data.memory if it did"
            )
        if code is not None and code < 0:
            return (
                f"has crashed ({signal.Signals(-code).name}) in code that the data set calls, whose lines are above; "
                "with data.workers: 0, the rank itself crashes there"
            )
        return f"has ended by itself (exit code {code}); a data set must not end its process"

    def close(self) -> None:
        """End the workers; one that is stuck, or whose fellow was killed, is ended as it is."""
        running = [future for future in self._begun if not future.cancel()]
        _, stuck = wait_for_futures(running, _CLOSE_SECONDS)
        if stuck or self._is_broken():
            self._end.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._end.close()

    def _is_broken(self) -> bool:
        try:
            self._executor.submit(int).cancel()
        except BrokenExecutor:
            return True
        return False


_opened: Data | HorizonError | None = None  # the data set of a process that loads samples, or why it has none
_load: Callable[[bool, bool], Data]  # loads the wanted parts, inputs or targets, of that data set
_parts = (False, False)  # which of them it has


Workers = Inline | Threads | Processes
"""What reads rows of batches; `count` is 0 if that happens only when they are asked for."""


def _open(
    end: Connection,
    inherited: list[Callable[[], object]],
    spec: str,
    info: dict[str, object],
    cache: str,
    inputs: bool,
    targets: bool,
) -> None:
    """Begin a process that loads samples; it ends with the process that started it, or when that closes `end`."""
    global _opened, _load, _parts
    # Signals reach the whole group of processes; it is the rank that decides when its workers end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        wait([parent.sentinel, end])
        os._exit(1)

    threading.Thread(target=leave, name="leave-with-parent", daemon=True).start()
    torch.set_num_threads(1)
    faulthandler.enable()  # a library that crashes says where
    try:
        for receive in inherited:
            receive()
        _load = partial(load, DataSpec.model_validate_json(spec), DataInfo.from_json(info), Path(cache))
        _opened, _parts = _load(inputs, targets), (inputs, targets)
    except HorizonError as error:
        _opened = error


def _read(
    training: bool, indices: list[int], seed: int | None, start: int, stop: int, inputs: bool, targets: bool
) -> bytes:
    """Return rows of a batch, in a process that loads samples."""
    global _opened, _parts
    if isinstance(_opened, Data) and (inputs > _parts[0] or targets > _parts[1]):  # the rank has another stage now
        _parts = (inputs or _parts[0], targets or _parts[1])
        _opened = _load(*_parts)
    if not isinstance(_opened, Data):
        raise _opened or DataError("data.workers: a process has not opened the data set")
    batch = DataBatch(_opened.train if training else _opened.held_out, torch.tensor(indices), seed)
    return pickle.dumps(batch.rows(start, stop, inputs, targets), pickle.HIGHEST_PROTOCOL)
