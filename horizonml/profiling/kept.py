"""Keeps what was measured on this device for later runs, and tells times apart that other programs have disturbed.

Other programs can only add to a time. So the least of several counts, together with those near it, and what was
measured while a machine was busy is measured again: when it contradicts itself, when a run contradicts it later, and
when the user asks for it.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horizonml.data.sampler import name_seed
from horizonml.files import cache_folder, write_atomically

SINCE = "HORIZONML_MEASURED_SINCE"  # what was measured before this time does not count, in seconds since 1970
NEAR = 1.25  # times the least: up to there, times differ by chance, and beyond by what else the machine did
_MOST_DOUBTS = 2  # after so many measurements that a run contradicted, it is the prediction that does not fit

_log = logging.getLogger(__name__)


def measure_again() -> None:
    """Let this process and those that it starts use nothing that was measured before now."""
    os.environ[SINCE] = f"{time.time():.3f}"


def usual(times: Sequence[float]) -> float:
    """Return the median of the times that lie near the least one."""
    least = min(times)
    return statistics.median(one for one in times if one <= NEAR * least)


def is_settled(times: Sequence[float]) -> bool:
    """Return whether the least of several times came about more than once, or nearly so."""
    least, *others = sorted(times)
    return not others or others[0] <= NEAR * least


def path_of(kind: str, key: Mapping[str, Any]) -> Path:
    """Return the file of a measurement of this kind, which depends on all that is in the key."""
    return cache_folder() / kind / f"{name_seed(0, json.dumps(key, sort_keys=True)):016x}.json"


def read(kind: str, key: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was kept, or nothing if it is not there, damaged, or older than the user wants it to be."""
    path = path_of(kind, key)
    try:
        if path.stat().st_mtime < float(os.environ.get(SINCE) or 0):
            return {}
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def write(kind: str, key: Mapping[str, Any], content: Mapping[str, Any]) -> OSError | None:
    """Keep a measurement; return why that is not possible, or None."""
    path = path_of(kind, key)
    try:
        write_atomically(path, json.dumps({"key": key, **content}, indent=1).encode())
    except OSError as error:
        _log.info("what was measured is not remembered: %s: %s", path, error.strerror or error)
        return error
    return None


def doubt(kind: str, key: Mapping[str, Any], why: str) -> bool:
    """Have a measurement made again the next time that it is needed; return whether it will be.

    One that runs go on to contradict although it was made again is left as it is.
    """
    content = read(kind, key)
    times = content.get("doubts", 0)
    if not content or content.get("doubt") or not isinstance(times, int) or times >= _MOST_DOUBTS:
        return False
    return write(kind, key, {**content, "doubts": times + 1, "doubt": why}) is None
