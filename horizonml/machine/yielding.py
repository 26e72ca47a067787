"""Keeps a device that always joins out of its owner's way: it reads the device and asks the policy."""

from __future__ import annotations

import time

from horizonml.errors import JobError
from horizonml.machine.owner import Usage
from horizonml.machine.policy import Policy, Readings
from horizonml.machine.sensors import on_mains, temperature


class Yielding:
    """Tells whether this device may train now. Ask it every few seconds, whether the device trains or not.

    The processor time of this process and of its children is not counted as that of other programs.
    """

    def __init__(self, when_idle: bool = False, max_temperature: float | None = None, mains: bool = False) -> None:
        """Begin to watch the device. Raises JobError if it cannot measure what a condition needs."""
        try:
            self._policy = Policy(when_idle, max_temperature, mains)
        except ValueError as error:
            raise JobError(f"--max-temperature: {error}") from None
        if max_temperature is not None and temperature() is None:
            raise JobError(
                "--max-temperature: this device has no sensor of its temperature that can be read (neither in "
                "/sys/class/hwmon nor in /sys/class/thermal); leave the option out"
            )
        if mains and on_mains() is None:
            raise JobError("--on-mains: this device does not say whether it is plugged in; leave the option out")
        self._usage = Usage() if when_idle else None

    def reason(self) -> str | None:
        """Return why this device may not train now, as a sentence without its period, or None if it may."""
        return self._policy.may_train(self.read(), time.monotonic())

    def advice(self) -> str | None:
        """Return what would let this device see better whether its owner uses it, as a sentence, or None."""
        if self._usage is None or not self._usage.blind():
            return None
        return (
            "This user may not see whether keyboard and mouse are used, so that a desktop counts as used until it says "
            "that it is idle; `sudo usermod --append --groups input $USER` lets this user see it after the next login."
        )

    def read(self) -> Readings:
        """Return what the policy needs to know of the device."""
        policy, usage = self._policy, self._usage
        return Readings(
            idle_seconds=usage.idle_seconds() if usage is not None else None,
            others_load=usage.others_load() if usage is not None else None,
            temperature=temperature() if policy.max_temperature is not None else None,
            on_mains=on_mains() if policy.on_mains else None,
        )

    def close(self) -> None:
        """Stop watching the device."""
        if self._usage is not None:
            self._usage.close()
