"""Sums gradients with NCCL where each member of a stage has its own GPU in the same machine, without leaving the GPUs.

NCCL is tried before it is used, and all members agree on the result; where it fails for any of them, gloo sums, as
everywhere else. A member that is lost would leave NCCL waiting forever, so the process waits with a deadline of its own
and breaks the sums off.
"""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import PrefixStore

from horizonml.comm.work import Work
from horizonml.engine.sync.allreduce import AllReduce
from horizonml.engine.sync.base import Members
from horizonml.errors import PeerLost

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 5e-5  # between two looks at whether a sum is complete
_TRIAL_SECONDS = 60.0


def has_gpus_of_its_own(members: Members) -> bool:
    """Return whether each member of a stage has an NVIDIA GPU of its own, all of them in one machine."""
    devices = [members.group.devices.get(rank, "") for rank in members.ranks]
    gpus = all(device.startswith("cuda") for device in devices) and len({*devices}) == len(devices)
    return gpus and members.group.on_one_host(members.ranks)


class NcclAllReduce(AllReduce):
    """Sums the buckets where they are, while the backward pass goes on."""

    def __init__(self, module: nn.Module, members: Members) -> None:
        """Join the sums of a stage. Raises PeerLost."""
        self._nccl = _connect(members)
        super().__init__(module, members)

    def _make_tree(self, total: int) -> None:
        return None if self._nccl is not None else super()._make_tree(total)  # type: ignore[return-value]

    def _sum(self, flat: Tensor, views: Any) -> Work:
        if self._nccl is None:
            return super()._sum(flat, views)
        return _Sum(self._nccl, self._nccl.allreduce([flat]), self._members)

    def close(self) -> None:
        """See `GradientSync`."""
        super().close()
        self._nccl = None


class _Sum:
    """Stands for a sum that is under way."""

    def __init__(self, nccl: Any, work: Any, members: Members, seconds: float | None = None) -> None:
        self._nccl, self._work, self._group = nccl, work, members.group
        self._seconds = members.group.timeout if seconds is None else seconds

    def wait(self) -> None:
        until = time.monotonic() + self._seconds
        while not self._work.is_completed():
            if self._group.is_over or time.monotonic() > until:
                self._nccl.abort()
                raise PeerLost("a peer did not take part in a sum by NCCL in time", timed_out=True)
            time.sleep(_LOOK_SECONDS)
        self._work.wait()  # lets the stream that computes wait, and raises what went wrong


def _connect(members: Members) -> Any | None:
    """Return a process group of NCCL that has summed once, or None if that fails for any member. Raises PeerLost."""
    made, problem = None, ""
    try:
        made = _make(members)
        tensor = torch.ones(1, device=members.staging.device)
        _Sum(made, made.allreduce([tensor]), members, _TRIAL_SECONDS).wait()
        problem = "" if float(tensor) == len(members.ranks) else "it computes a wrong sum"
    except (RuntimeError, ImportError, AttributeError, PeerLost) as error:
        problem = str(error).strip().partition("\n")[0]
    works = members.group.all_gather(torch.tensor([float(not problem)]), members.ranks)
    if all(float(one) for one in works):
        return made
    _log.warning("gloo sums instead of NCCL%s", f": {problem}" if problem else "; it fails for another rank")
    if made is not None:
        made.abort()
    return None


def _make(members: Members) -> Any:
    from torch.distributed import ProcessGroupNCCL  # only in builds for GPUs

    # Or NCCL's own watchdog would end the process when a peer is lost.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=members.group.timeout)
    store = PrefixStore(f"nccl-{members.number}", members.group.store)
    return ProcessGroupNCCL(store, members.place, len(members.ranks), options)
