"""Checks what a user wishes the ranks to compute on, without PyTorch."""

from __future__ import annotations

import os
import re

from horizonml.errors import JobError

DEVICE = "HORIZONML_DEVICE"
"""The environment variable that says what a rank computes on, whatever the job says."""

_WISH = re.compile(r"auto|cpu|mps|cuda(:\d{1,3})?")


def check_wish(wish: str, source: str) -> None:
    """Raise JobError, which names the `source` of the wish, if it is not what the field `device` may say."""
    if not _WISH.fullmatch(wish):
        raise JobError(
            f"{source}: {wish!r} is not one of auto, cpu, cuda, cuda:N (such as cuda:1 for the second GPU) and mps"
        )


def wished(field: str) -> tuple[str, str]:
    """Return what the ranks of this machine are to compute on, and what says so, given the job's field.

    The option `--device` sets the environment variable for the ranks that it starts.
    """
    told = os.environ.get(DEVICE)
    return (told, f"${DEVICE} (or --device)") if told else (field, "device")
