"""Shows the ranks of a job in a cluster as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from horizonml.cli.tables import layout

if TYPE_CHECKING:
    from horizonml.kube.status import RankStatus

_HEADINGS = ("rank", "node", "phase", "stage", "epoch", "step", "samples/s", "loss", "time*")


def _cells(entry: RankStatus) -> list[str]:
    """Return a row of the table, as text."""
    split = [entry.compute, entry.transfer, entry.wait]
    return [
        str(entry.rank),
        entry.node or "-",
        entry.phase,
        entry.stage or "-",
        f"{entry.epoch}/{entry.epochs}" if entry.epoch is not None else "-",
        f"{entry.step}/{entry.steps}" if entry.step is not None else "-",
        _or_dash(entry.samples_per_second, "{:,.0f}"),
        _or_dash(entry.loss, "{:.4f}"),
        "/".join(f"{100 * part:.0f}" for part in split if part is not None) + "%" if None not in split else "-",
    ]


def rank_table(rows: Sequence[RankStatus], width: int | None) -> str:
    """Return the state of all ranks as a table of at most `width` columns."""
    table = layout(_HEADINGS, [_cells(entry) for entry in rows], text=(1, 2), width=width)
    return f"{table}\n* % of compute/transfer/wait"


def _or_dash(value: float | None, text: str) -> str:
    return "-" if value is None else text.format(value)
