"""Keeps the output of the ranks of a local run in files, and shows their warnings."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import IO

from horizonml.text import escaped, plain_lines

_MOST_TEXT = 1 << 20  # bytes of a log that are looked at at once


class RankLog:
    """Represents the log of one rank, which may begin with the output of earlier runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[bytes] = path.open("a+b")  # which is also read, as somebody may delete the folder meanwhile
        self._start = self._shown = self.file.tell()

    def text(self) -> str:
        """Return everything that the rank has printed in this run."""
        end = os.fstat(self.file.fileno()).st_size
        content = self._read(max(self._start, end - _MOST_TEXT)).decode(errors="replace")
        return plain_lines(content).strip()

    def new_lines(self) -> list[str]:
        """Return the lines that were completed since the last call."""
        content = self._read(self._shown)
        whole = content[: content.rfind(b"\n") + 1] or (content if len(content) == _MOST_TEXT else b"")
        self._shown += len(whole)
        return [escaped(line) for line in whole.decode(errors="replace").split("\n")[:-1]]

    def _read(self, start: int) -> bytes:
        return os.pread(self.file.fileno(), _MOST_TEXT, start)  # where others write does not change


class Warnings:
    """Shows the warnings of all ranks on standard error, each of them once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def show(self, rank: int, lines: list[str]) -> None:
        """Show those of a rank's lines that are warnings and were not shown before."""
        for line in lines:
            # These are the formats of logging and of the warnings module.
            if re.match(r"WARNING: |warning: |rank \d+: warning: |\S.*:\d+: \w*Warning: ", line):
                text = line.partition("WARNING: ")[2] or line
                if text not in self._seen:
                    self._seen.add(text)
                    clear = "\r\x1b[2K" if sys.stderr.isatty() else ""  # clears the progress bar's line
                    prefix = "" if text.startswith("rank ") else f"rank {rank}: "
                    print(f"{clear}{prefix}{text}", file=sys.stderr, flush=True)
