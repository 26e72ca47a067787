"""Stops a run whose ranks are processes of this machine, as Ctrl-C does: after the step, with a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from horizonml.errors import HorizonError
from horizonml.telemetry.lifeline import living_ranks


class StopHere:
    """Asks the ranks of a run to stop, if all of them are here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> str:
        """Ask all ranks to stop, and return what happens now. Raises HorizonError if that cannot be done from here."""
        processes = living_ranks(self._folder)
        if processes is None:
            raise HorizonError("no run is training there whose ranks are all processes of this machine and this user")
        try:
            for process in processes.values():
                os.kill(process, signal.SIGTERM)
        except ProcessLookupError:
            return "The run is ending already."
        except PermissionError:
            raise HorizonError("the ranks belong to another user of this machine, who can stop them") from None
        return "The run stops after its step, and saves a checkpoint from which the same command continues."

    def is_possible(self) -> bool:
        """Return whether the ranks can be asked."""
        return living_ranks(self._folder) is not None
