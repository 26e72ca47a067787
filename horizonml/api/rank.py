"""Runs one rank of a run that `horizonml.train` has started: `python -m horizonml.api.rank OBJECTS RECORDS`.

The arguments are inherited file descriptors: the job with its objects is read from the first, and the first rank writes
the records of steps and evaluations to the second.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from horizonml.errors import IdentityError
from horizonml.rendezvous.identity import from_rank
from horizonml.runtime.outcome import Outcome
from horizonml.runtime.process import run_and_exit


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
    stream = os.fdopen(records, "w", encoding="utf-8")

    def send(fields: Mapping[str, Any]) -> None:
        """Send a JSON object to the parent process, on a line of its own, for as long as the parent reads them."""
        with suppress(BrokenPipeError):  # the parent is gone, and its watch ends this process
            stream.write(json.dumps(fields) + "\n")
            stream.flush()

    outcome = train_as_rank(job, identity, fresh, None, False, lambda record: send(record.to_json()))
    if outcome is Outcome.ALREADY_COMPLETE:
        send({"kind": NOTHING_DONE})


if __name__ == "__main__":
    run_and_exit(main)
