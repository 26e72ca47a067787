"""Copies a rank's state in memory, so that it can be restored."""

from __future__ import annotations

import copy

import torch

from horizonml.state.train_state import TrainState


class StateCopy:
    """Holds a copy of all that a rank trains, and of how far it has come."""

    def __init__(self, state: TrainState) -> None:
        """Copy a state that is whole and valid."""
        assert state.valid
        assert not state.parts
        self._state, self._tensors, self._optimizer = state, *state.contents(copy=True)
        self._step, self._metrics, self._best = state.step, dict(state.metrics), dict(state.best)
        self._scales = copy.deepcopy(state.scales)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state; its layers, and the tensors that hold them, are the same as before."""
        state = self._state
        held, _ = state.contents()
        for name, value in self._tensors.items():
            held[name].copy_(value)
        state.replace_optimizer(
            {name: {key: v.clone() for key, v in kept.items()} for name, kept in self._optimizer.items()}
        )
        state.step, state.metrics, state.best = self._step, dict(self._metrics), dict(self._best)
        state.scales, state.prepared, state.valid = copy.deepcopy(self._scales), None, True
