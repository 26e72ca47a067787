"""What records are made of: the base of all records, the types of their fields, and how fields are shown elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

Time = Annotated[float, Field(ge=0, lt=1e12)]  # Unix time
Amount = Annotated[float, Field(ge=0, le=1e15)]  # seconds, bytes or others, whose sums are numbers, too
Count = Annotated[int, Field(ge=0, le=10**15)]
Links = Mapping[Any, tuple[Count, Count]]  # bytes sent and received, by direction: a `Way`


@dataclass(frozen=True)
class Record:
    """Is one line of a rank's file."""

    kind: ClassVar[str]

    if TYPE_CHECKING:

        @property
        def time(self) -> float:
            """Return when it was recorded, in Unix time; 0 if it does not say."""
            return 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return {"kind": self.kind, **vars(self)}


STEP_SECONDS = (0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class MetricSpec:
    """Describes one metric. In Prometheus its name begins with `horizonml_`, and a counter's ends with `_total`."""

    type: Literal["gauge", "counter", "summary", "histogram"]
    name: str
    meaning: str
    labels: tuple[str, ...] = ()  # besides the rank
    values: tuple[str, ...] | None = None  # the values of its only other label; each of them counts from 0
    from_zero: bool = False  # whether it is shown before anything has happened
    buckets: tuple[float, ...] = ()  # of a histogram: their upper bounds


def gauge(name: str, meaning: str, *labels: str, from_zero: bool = False) -> MetricSpec:
    """Return a gauge, which has no value before it is set."""
    return MetricSpec("gauge", name, meaning, labels, from_zero=from_zero)


def counter(name: str, meaning: str, from_zero: bool = True) -> MetricSpec:
    """Return a counter without further labels."""
    return MetricSpec("counter", name, meaning, from_zero=from_zero)


@dataclass(frozen=True)
class PanelSpec:
    """Describes the panel that shows a metric for each rank on the dashboard of step time."""

    title: str
    question: str  # that the panel answers, with a question mark; sentences may follow
    unit: str  # of Grafana
    without: str = ""  # what the panel says if there is no data, and need not be


@dataclass(frozen=True)
class Shown:
    """Says how a field of a record is shown: each None or empty text stands for not at all."""

    scalar: str = ""  # the name in TensorBoard and MLflow
    metric: MetricSpec | None = None  # which counts the values, or holds the newest
    label: str = ""  # the value of the metric's own label
    column: str = ""  # the row's name in tables of reports, for the median over steps
    panel: PanelSpec | None = None


@dataclass(frozen=True)
class Point:
    """Holds the scalars of one record, as TensorBoard and MLflow get them."""

    step: int  # the number of steps that are done
    time: float  # Unix time
    values: Mapping[str, float]  # by name
    begins: bool = False  # whether a group begins here, so that later steps of the group before it do not count
