"""Implements `horizonml.generate`: what a trained language model writes."""

from __future__ import annotations

import torch
from torch import Tensor

from horizonml.api.evaluation import CheckpointLike, outputs_of, trained
from horizonml.api.jobs import ModelLike
from horizonml.data.tokens import Tokens, tokens_for
from horizonml.errors import DataError, JobError, ModelError
from horizonml.exports.trained import Trained
from horizonml.tasks.task import main_tensor


def generate(
    checkpoint: CheckpointLike,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    model: ModelLike = None,
) -> str:
    """Return the text with which a trained language model goes on from a prompt, without the prompt.

    Parameters:
        checkpoint: A run, the folder of a run, or the folder of a checkpoint.
        prompt: How the text begins.
        tokens: How many tokens are written: characters, bytes, or a tokenizer's, as the job has it.
        temperature: How much the model dares: each token is drawn by probabilities to the power of 1 / temperature. At
            0, it is always the most probable one.
        seed: Decides what is drawn; the same seed gives the same text.
        model: The model, if it was given to `train` as an object and `checkpoint` is a folder.

    Raises HorizonError.
    """
    if tokens < 1:
        raise JobError(f"tokens: {tokens} is too small; ask for one token at least")
    if not temperature >= 0:
        raise JobError(f"temperature: {temperature} is no temperature; give 0 or more")
    found = trained(checkpoint, model)
    vocabulary = vocabulary_of(found)
    try:
        start = vocabulary.encode(prompt)
    except DataError as error:
        raise DataError(f"prompt: {error}") from None
    if not len(start):
        raise DataError("prompt: there is nothing to go on from; give a word or a character")
    return vocabulary.decode(_written(found, start.long(), tokens, temperature, seed))


def vocabulary_of(found: Trained) -> Tokens:
    """Return the tokens that a language model was trained on. Raises DataError if the model was trained on no text."""
    data = found.job.data
    if data.name != "text":
        raise DataError(f"{found.path}: a text is written by models that were trained on texts, not on {data.name}")
    if data.tokens == "characters" and not found.info.characters:
        raise DataError(f"{found.path}: a checkpoint of this age does not tell which characters there are; train again")
    return tokens_for(data.tokens, found.info.characters)


def _written(found: Trained, start: Tensor, count: int, temperature: float, seed: int) -> list[int]:
    """Return the numbers of `count` tokens that follow those in `start`."""
    (context,), generator = found.info.inputs[0].shape, torch.Generator().manual_seed(seed)
    numbers = start.tolist()
    for _ in range(count):
        seen = numbers[-context:]
        # The model gets the shape that it was trained on; nothing depends on what comes later.
        row = torch.tensor([seen + [0] * (context - len(seen))])
        logits = main_tensor(outputs_of(found, row), "logits")[0, len(seen) - 1].double()
        if not bool(logits.isfinite().all()):
            raise ModelError(f"{found.path}: the model's outputs are not finite, so there is nothing to draw from")
        if temperature == 0:
            numbers.append(int(logits.argmax()))
            continue
        shares = ((logits - logits.max()) / temperature).softmax(0)
        numbers.append(int(torch.multinomial(shares, 1, generator=generator)))
    return list(numbers[len(start) :])
