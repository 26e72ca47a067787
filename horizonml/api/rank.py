"""Runs one rank of a run that `horizonml.train` has started: `python -m horizonml.api.rank OBJECTS RECORDS`.

The arguments are inherited file descriptors: the job with its objects is read from the first, and the first rank writes
the records of steps and evaluations to the second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import IO, Any

from horizonml.errors import IdentityError
from horizonml.rendezvous.identity import from_rank
from horizonml.runtime.outcome import Outcome
from horizonml.runtime.process import run_and_exit
from horizonml.telemetry.record import EvaluationRecord, StepRecord


def main() -> None:
    """Train as the rank that the environment names."""
    objects, records = map(int, sys.argv[1:])
    from horizonml.api.training import NOTHING_DONE, Objects, unpack
    from horizonml.machine.code import hand_down
    from horizonml.runtime.launch import train_as_rank

    identity = from_rank(os.environ)
    if identity is None:
        raise IdentityError("RANK and WORLD_SIZE are not set: call horizonml.train, which starts its ranks itself")
    job, fresh = unpack(objects)
    hand_down(Objects(objects))
    sender = Sender(os.fdopen(records, "w", encoding="utf-8"))
    outcome = train_as_rank(job, identity, fresh, None, False, sender)
    if outcome is Outcome.ALREADY_COMPLETE:
        sender.send({"kind": NOTHING_DONE})


class Sender:
    """Sends records to the parent process, a JSON object on each line, for as long as the parent reads them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream: IO[str] | None = stream

    def __call__(self, record: StepRecord | EvaluationRecord) -> None:
        """Send a record."""
        self.send(record.to_json())

    def send(self, record: Mapping[str, Any]) -> None:
        """Send the fields of a record."""
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps(record) + "\n")
            self._stream.flush()
        except BrokenPipeError:  # the parent is gone, and its watch ends this process
            self._stream = None


if __name__ == "__main__":
    run_and_exit(main)
