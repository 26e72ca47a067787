"""Loads what many commands of these tests use, in the process that they are forked from."""

from __future__ import annotations

from horizonml.machine.torchvision import import_torchvision

import_torchvision()
