"""Lists the ways in which a rank's training can end."""

from __future__ import annotations

from enum import StrEnum

from horizonml.errors import CheckpointError


class Outcome(StrEnum):
    """Tells why a training returned; the value is written to the rank's records."""

    COMPLETE = "complete"
    ALREADY_COMPLETE = "already complete"  # nothing was left to train
    COMPLETE_WITHOUT = "complete without this rank"  # the others had trained to the end when it came
    STOPPED = "stopped"  # this process was asked to stop
    STOPPED_WAITING = "stopped waiting"  # likewise, before the ranks had met
    RE_FORM = "re-form"  # the ranks must meet again, because another one stops or a new one wants to join
    RE_PLAN = "re-plan"  # there is a better plan to go on with


class LeavesUnsaved(CheckpointError):
    """Reports that a rank which was asked to stop could not save; it still hands its layers over before it ends."""
