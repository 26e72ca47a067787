"""How a rank's training ends, or why it is interrupted."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How training ended. The values stand in the records of a run."""

    COMPLETE = "complete"
    ALREADY_COMPLETE = "already complete"  # before it began
    STOPPED = "stopped"  # as a signal asked
    STOPPED_WAITING = "stopped waiting"  # as a signal asked, while the other ranks were not there yet
    REFORM = "re-form"  # another rank stops or joins, so the group is to form again
    REPLAN = "re-plan"  # another plan is predicted to be faster
    FAILED = "failed"

    @property
    def trained_to_the_end(self) -> bool:
        """Return whether nothing is left to train."""
        return self in (Outcome.COMPLETE, Outcome.ALREADY_COMPLETE)
