"""Lists the lossy choices in a way of training, and makes them more precise one step at a time.

A setting is a plan and the precision that layers may be computed in. Each of its lossy choices is a `LossyChoice`: the
format of a link, how the members of a stage sum their gradients, or the precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from horizonml.plan.plan import PRECISIONS, Plan
from horizonml.plan.syncs import FORMATS, SYNCS, Sync, offered

LINK, SUMS, PRECISION = "link", "sums", "precision"


class LossyChoice(NamedTuple):
    """Names a lossy choice: of which kind, of which stage of the plan (the sender, for a link), and what it is."""

    kind: str
    stage: int
    value: str

    def __str__(self) -> str:
        match self.kind:
            case "link":
                return f"stage {self.stage} sends {self.value}"
            case "sums":
                return f"stage {self.stage} sums gradients as {self.value}"
        return f"layers are computed in {self.value}"


@dataclass(frozen=True)
class Setting:
    """Holds a way of training, as far as it may be lossy."""

    plan: Plan
    precision: str = "fp32"  # the least that layers may be computed in: "fp32" or "bf16"
    kinds: frozenset[str] = frozenset((LINK, SUMS, PRECISION))  # of choices that may be made more precise

    @property
    def lossy(self) -> list[LossyChoice]:
        """Return all lossy choices that may be made more precise, in the order of stages."""
        stages = self.plan.stages
        links = [LossyChoice(LINK, n, s.send) for n, s in enumerate(stages[:-1]) if s.send != "fp32"]
        sums = [LossyChoice(SUMS, n, s.sync.name) for n, s in enumerate(stages) if s.sync.offered and len(s.ranks) > 1]
        precision = [LossyChoice(PRECISION, 0, self.precision)] if self.precision != "fp32" else []
        return [choice for choice in (*links, *sums, *precision) if choice.kind in self.kinds]

    def exact(self) -> Setting:
        """Return the setting in which nothing is lossy."""
        exact = self
        while exact.lossy:
            exact = exact.raised(exact.lossy[0])
        return exact

    def only(self, choice: LossyChoice) -> Setting:
        """Return the setting in which nothing but `choice` is lossy."""
        return self.exact()._with(choice)

    def raised(self, choice: LossyChoice) -> Setting:
        """Return this setting with the next more precise value for `choice`."""
        match choice.kind:
            case "link":
                formats = list(FORMATS)
                return self._with(choice._replace(value=formats[formats.index(choice.value) - 1]))
            case "sums":
                fallback = Sync.named(choice.value).fallback
                assert fallback is not None, "what is offered has a more exact way"
                return self._with(choice._replace(value=fallback.name))
        return self._with(choice._replace(value="fp32"))

    def cautious(self) -> Setting:
        """Return this setting without what should be tried before it is used: links of 4 bits, lossier sums, bf16."""
        cautious = self
        for choice in self.lossy:
            match choice.kind:
                case "link":
                    tried_first = FORMATS[choice.value].tried_first
                case "sums":
                    tried_first = SYNCS[choice.value].tried_first
                case _:
                    tried_first = True
            if tried_first:
                cautious = cautious.raised(choice)
        return cautious

    def _with(self, choice: LossyChoice) -> Setting:
        """Return this setting with another choice for the same."""
        if choice.kind == PRECISION:
            return replace(self, precision=choice.value)
        stages = list(self.plan.stages)
        stage = stages[choice.stage]
        stages[choice.stage] = (
            replace(stage, send=choice.value) if choice.kind == LINK else replace(stage, sync=Sync.named(choice.value))
        )
        return replace(self, plan=replace(self.plan, stages=tuple(stages)))


@dataclass(frozen=True)
class Tried:
    """Holds what a trial has found: how lossy the training may be, also by later plans of the same run."""

    step: int  # steps that were done before the trial
    steps: int  # of each warm-up; 0 if there was none
    links: Mapping[int, str]  # the format that may be used where the model is cut before a layer
    sums: str  # how members may sum gradients at most, a `Sync`
    precision: str
    texts: tuple[str, ...] = ()  # what was tried, in sentences

    @classmethod
    def of(cls, step: int, steps: int, setting: Setting, texts: tuple[str, ...]) -> Tried:
        """Return the verdict that a setting may be used."""
        stages = setting.plan.stages
        sums = [s.sync for s in stages if len(s.ranks) > 1 and s.sync in (Sync.ALL_REDUCE, *offered())]
        allowed = min(sums, key=_rank, default=Sync.ALL_REDUCE)
        return cls(step, steps, {s.stop: s.send for s in stages[:-1]}, allowed.name, setting.precision, texts)

    def allowed(self, setting: Setting) -> Setting:
        """Return a setting without what has turned out to be too imprecise, or was not a part of the trial.

        A cut at another layer may use what all cuts that were tried may use. Where there was no trial, that is what
        needs none.
        """
        if not self.steps:
            return setting.cautious()
        least = self.least_format
        for choice in setting.lossy:
            stage = setting.plan.stages[choice.stage]
            match choice.kind:
                case "link":
                    value = min(choice.value, self.links.get(stage.stop, least), key=list(FORMATS).index)
                case "sums":
                    value = min(stage.sync, Sync.named(self.sums), key=_rank).name
                case _:
                    value = self.precision
            setting = setting._with(choice._replace(value=value))
        return setting

    @property
    def least_format(self) -> str:
        """Return the least precise format that every link may use."""
        return min(self.links.values(), key=list(FORMATS).index, default="fp32")

    def may_sum(self, sync: Sync) -> bool:
        """Return whether members may sum gradients in this way, which is one that can be more precise."""
        return _rank(sync) <= _rank(Sync.named(self.sums))

    def to_json(self) -> dict[str, object]:
        """Return the verdict as a JSON object."""
        return {**vars(self), "links": {str(layer): send for layer, send in self.links.items()}}

    @classmethod
    def from_json(cls, value: Any) -> Tried:
        """Return what `to_json` was called on. Raises ValueError, TypeError, KeyError or AttributeError for others."""
        links = {int(layer): str(send) for layer, send in value["links"].items()}
        texts = tuple(map(str, value["texts"]))
        precision, sums = str(value["precision"]), Sync.named(str(value["sums"]))
        if not set(links.values()) <= set(FORMATS) or precision not in PRECISIONS:
            raise ValueError("a trial ends with formats that do not exist")
        return cls(int(value["step"]), int(value["steps"]), links, sums.name, precision, texts)


def _rank(sync: Sync) -> int:
    """Return a number that is higher the lossier sums are."""
    return (Sync.ALL_REDUCE, *offered()).index(sync)


def tried_from(value: Any) -> Tried | None:
    """Return what a checkpoint says of a trial, or None if it says nothing that makes sense."""
    try:
        return Tried.from_json(value) if value is not None else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
