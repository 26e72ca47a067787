"""Names what local steps add to the state, and which parts of it all members of a stage then have in common.

Between two synchronisations each member has parameters and optimizer state of its own. Right after one, all members of
a stage hold the same parameters, buffers, moving averages and momentum of the outer optimizer; the state of the inner
optimizer stays each member's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from horizonml.plan.plan import Plan
from horizonml.state.average import AVERAGE

MOMENTUM = "outer_momentum"
"""The key of the outer optimizer's momentum among a parameter's optimizer state."""


@dataclass(frozen=True)
class PreparedOuter:
    """Holds what a synchronisation has found, while this rank cannot know whether the others have taken it over.

    Every rank has received all of it: if another rank goes on from it, so must this one.
    """

    step: int  # after which members synchronised
    tensors: dict[str, Tensor]  # new values by the names that they have in the state


def is_inner(key: str) -> bool:
    """Return whether a tensor of the state belongs to the optimizer of a single member."""
    kind, _, rest = key.partition("/")
    return kind == "optimizer" and rest.rpartition("/")[2] not in (MOMENTUM, AVERAGE)


def in_common(tensors: Mapping[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Return those tensors that all members of a stage hold alike at a step boundary that is saved or compared."""
    if plan.local is None:
        return dict(tensors)
    return {key: tensor for key, tensor in tensors.items() if not is_inner(key)}
