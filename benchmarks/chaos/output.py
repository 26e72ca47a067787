"""Records from outside what processes print: a rank whose disk is full can still say so, as in a container."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

_BLOCK = 1 << 16


class Output:
    """Copies the output of processes to files, from a thread of its own."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._closing = threading.Event()
        self._wake, self._woken = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
        self._thread.start()

    def take(self, process: subprocess.Popen[bytes], path: Path) -> None:
        """Append to a file what a process prints to its pipe `stdout`."""
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, path.open("ab", buffering=0))
        os.write(self._woken, b"+")  # the thread may be waiting for the others only

    def close(self) -> None:
        """Copy what was printed, and end. The processes have ended."""
        self._closing.set()
        os.write(self._woken, b".")
        self._thread.join()
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)

    def _copy(self) -> None:
        """Copy until `close` is called and all that was printed before is copied."""
        while True:
            closing = self._closing.is_set()  # before the look at what is there, which must be the last one then
            ready = self._selector.select()
            for key, _ in ready:
                if key.data is None:
                    if not self._closing.is_set():
                        os.read(key.fd, 1)  # one at a time, so that what `close` has written stays to be seen
                    continue
                content = os.read(key.fd, _BLOCK)
                if content:
                    # What the host's own disk has no room for is lost; whoever prints must not wait for it.
                    with suppress(OSError):
                        key.data.write(content)
                else:
                    self._drop(key.fileobj, key.data)
            if closing and all(key.data is None for key, _ in ready):
                break
        for key in list(self._selector.get_map().values()):
            if key.data is not None:  # something else has inherited the pipe, and lives on
                self._drop(key.fileobj, key.data)

    def _drop(self, pipe: object, file: IO[bytes]) -> None:
        assert hasattr(pipe, "close")
        self._selector.unregister(pipe)  # type: ignore[arg-type]
        pipe.close()
        file.close()
