"""Loads what many commands of these tests use, in the process that they are forked from.

It also lets a rank die at the moment that `test_any_losses` has drawn for it: in a step, by SIGKILL, when it has waited
for so many messages of that step. And it lets a rank's clock be wrong.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from horizonml.comm.group import Group
from horizonml.engine.session import Session
from horizonml.machine.torchvision import import_torchvision

FATE = "HORIZONML_TEST_FATE"  # STEP:MESSAGES
PACE = "HORIZONML_TEST_PACE"  # seconds by which each step is longer
CLOCK = "HORIZONML_TEST_CLOCK"  # seconds by which the rank's clock is ahead

import_torchvision()
_step, _wait, _time = Session.step, Group.wait, time.time
_left: list[int] = []  # the messages that a doomed rank waits for until it dies


def _fated_step(self: Session, *arguments: Any, **options: Any) -> Any:
    step, _, messages = os.environ.get(FATE, "").partition(":")
    if step and self.state.step + 1 >= int(step):
        _left[:] = [int(messages)]
    time.sleep(float(os.environ.get(PACE, "0")))
    result = _step(self, *arguments, **options)
    if _left:
        os.kill(os.getpid(), signal.SIGKILL)
    return result


def _fated_wait(self: Group, *arguments: Any) -> None:
    if _left:
        _left[0] -= 1
        if _left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    _wait(self, *arguments)


def _wrong_time() -> float:
    return _time() + float(os.environ.get(CLOCK, "0"))


time.time = _wrong_time
Session.step = _fated_step  # type: ignore[method-assign]
Group.wait = _fated_wait  # type: ignore[method-assign]
