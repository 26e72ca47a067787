"""Prepares a model for fine-tuning as its job says: from which weights it begins, and what of it is trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from horizonml.errors import ModelError
from horizonml.models.freezing import freeze
from horizonml.models.lora import check_trained, is_frozen
from horizonml.models.patterns import select, selected
from horizonml.models.pretrained import Pretrained, plain_name, pretrained
from horizonml.models.spec import ModelSpec

_log = logging.getLogger(__name__)


def begin_from(spec: ModelSpec, model: nn.Module, ties: Sequence[Sequence[str]]) -> Pretrained | None:
    """Return the pretrained weights of a job, opened and matched to its model, or None. Raises ModelError."""
    return pretrained(spec.weights, spec.name, model, ties) if spec.weights is not None else None


def trained_note(model: nn.Module, ties: Sequence[Sequence[str]]) -> str:
    """Return, in words, how many of a model's parameters are trained; `ties` are names of one and the same."""
    again = {name for names in ties for name in names[1:]}
    counted = [parameter for name, parameter in model.named_parameters() if name not in again]
    trained = sum(parameter.numel() for parameter in counted if parameter.requires_grad)
    every = sum(parameter.numel() for parameter in counted)
    return f"{trained:,} of {every:,} parameters are trained, and the others are frozen"


def frozen_tensors(
    spec: ModelSpec, model: nn.Module, ties: Sequence[Sequence[str]], source: Pretrained | None
) -> frozenset[str]:
    """Freeze what a job does not train; return the tensors that training does not change. Raises ModelError."""
    names = [name for name, _ in model.named_parameters()]
    lora = spec.lora
    if lora is not None:
        check_trained(lora, names)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_frozen(lora, name))  # peft has frozen what is trained in full, too
        field, way_out = "model.lora", "add {} to model.lora.train"
        frozen = freeze(model, lambda name: is_frozen(lora, name), ties)
    elif spec.freeze:
        select(spec.freeze, names, "model.freeze", "parameter")
        field, way_out = "model.freeze", "exclude it with '!{}'"
        frozen = freeze(model, lambda name: selected(spec.freeze, name), ties)
    else:
        return frozenset()
    if source is None:
        _log.warning("%s freezes parameters at their random initial values, because model.weights is not set", field)
        return frozen
    anew = [name for name in names if name in frozen and name not in source.keys]
    if anew:
        layer = plain_name(anew[0]).rpartition(".")[0] or anew[0]
        raise ModelError(
            f"{field}: {plain_name(anew[0])} is frozen, but has no pretrained value, because the file lacks it or has "
            f"another shape; {way_out.format(layer)}"
        )
    return frozen
