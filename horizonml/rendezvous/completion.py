"""Tells ranks that come too late that their job is complete, so that they do not wait for ranks that come no more."""

from __future__ import annotations

from horizonml.rendezvous.answers import Complete
from horizonml.rendezvous.fingerprint import Fingerprint
from horizonml.rendezvous.members import Members, waiting

_REMEMBER_SECONDS = 300.0  # processes that have been on their way for longer than this are taken for a new attempt


class Completion:
    """Knows the job that was completed last. Times are seconds of any clock."""

    def __init__(self, members: Members) -> None:
        """Judge these members, and take those out that come too late."""
        self._members = members
        self._job: tuple[str, str] | None = None
        self._at = 0.0

    def note(self, fingerprint: Fingerprint, now: float) -> None:
        """Take note that a rank has trained its job to the end; the others have, too, or are about to say so."""
        self._job, self._at = (fingerprint.job, fingerprint.digest), now

    def forget(self) -> None:
        """Take note that a new group begins."""
        self._job = None

    def of_latecomers(self, now: float) -> list[Complete]:
        """Return the verdict on those who wait for the job that is complete.

        A process that started before the job ended wanted to take part in it. One that started later belongs to a new
        attempt, even if the job is the same one.
        """
        if self._job is None or now - self._at > _REMEMBER_SECONDS:
            return []
        late = [
            number
            for number, member in waiting(self._members).items()
            if (member.fingerprint.job, member.fingerprint.digest) == self._job
            and member.joined - member.fingerprint.up < self._at
        ]
        for number in late:
            del self._members[number]
        return [Complete(late)] if late else []
