"""How a rank's training can end."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Why a training returned. The value is what the rank's records say."""

    COMPLETE = "complete"
    ALREADY_COMPLETE = "already complete"  # nothing was left to train
    STOPPED = "stopped"  # as this process was asked to
    STOPPED_WAITING = "stopped waiting"  # likewise, before the ranks had met
    RE_FORM = "re-form"  # the ranks are to meet again: another one stops, or a new one wants to take part
    RE_PLAN = "re-plan"  # there is a better plan to go on with
