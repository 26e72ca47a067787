"""What a language model writes: drawn from its own probabilities, in the characters that it was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

import horizonml
from horizonml.data.dataset import DataInfo
from horizonml.data.text import Bytes, Characters
from horizonml.errors import DataError, HorizonError
from horizonml.job.schema import Job
from tests.checkpoints import checkpoint_of


def job(path: Path, **data: object) -> Job:
    path.write_text("the cat sat on the mat, and the dog sat on the log. " * 20)
    return Job.model_validate(
        {
            "model": {"name": "gpt", "options": {"layers": 1, "heads": 2, "width": 16}},
            "data": {"name": "text", "path": str(path), "length": 12, **data},
        }
    )


def test_the_most_probable_characters_are_those_of_the_model(tmp_path: Path) -> None:
    path, model = checkpoint_of(tmp_path / "run", job(tmp_path / "text.txt"))
    known = sorted(set((tmp_path / "text.txt").read_text()))
    for prompt in ("the ", "the dog sat on the mat"):  # shorter and longer than the model's context
        text = prompt
        for _ in range(15):
            with torch.no_grad():
                logits = model(torch.tensor([[known.index(one) for one in text[-12:]]]))
            text += known[int(logits[0, -1].argmax())]
        assert horizonml.generate(path, prompt, tokens=15, temperature=0) == text[len(prompt) :]


def test_what_is_drawn_depends_on_the_seed_and_has_the_models_probabilities(tmp_path: Path) -> None:
    path, model = checkpoint_of(tmp_path / "run", job(tmp_path / "text.txt"))
    known = sorted(set((tmp_path / "text.txt").read_text()))
    assert horizonml.generate(path, "a", seed=3) == horizonml.generate(path, "a", seed=3)
    assert len({horizonml.generate(path, "a", seed=seed) for seed in range(3)}) == 3
    with torch.no_grad():
        logits = model(torch.tensor([[known.index(one) for one in "the mat"]]))[0, -1].double()
    best = known[int(logits.argmax())]
    # At a temperature at which the probability of the best character is a half, about half of the draws are that.
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float((logits / middle).softmax(0).max()) > 0.5 else (low, middle)
    drawn = [horizonml.generate(path, "the mat", tokens=1, temperature=low, seed=seed) for seed in range(60)]
    assert 15 < drawn.count(best) < 45


def test_another_text_is_measured_with_the_numbers_of_the_training(tmp_path: Path) -> None:
    path, model = checkpoint_of(tmp_path / "run", job(tmp_path / "text.txt"))
    known = sorted(set((tmp_path / "text.txt").read_text()))
    other = "to that end the cat met a dog " * 4
    (tmp_path / "other.txt").write_text(other)
    assert sorted(set(other)) != known
    numbers = torch.tensor([known.index(one) for one in other[-24:]])
    with torch.no_grad():
        logits = model(numbers[None, :12])[0]
    expected = float(cross_entropy(logits, numbers[1:13]))
    found = horizonml.evaluate(path, str(tmp_path / "other.txt"), part="held-out")
    assert found["loss"] == pytest.approx(expected, rel=1e-5)


def test_bytes_are_written_as_text(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job(tmp_path / "text.txt", tokens="bytes"))
    written = horizonml.generate(path, "Où?", tokens=30)
    assert 0 < len(written) <= 30
    assert Bytes().decode(Bytes().encode("Où?").tolist()) == "Où?"


def test_unknown_characters_are_named_with_their_line() -> None:
    with pytest.raises(DataError, match=r"not trained on: 'é', 'x' \(the first in line 3\); replace them"):
        Characters.of("ab\n").encode("ab\na\nébx")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", job(tmp_path / "text.txt"))
    for prompt, options, problem in (
        ("", {}, "prompt: there is nothing to go on from"),
        ("a€", {}, "prompt: the text has characters that the model was not trained on: '€'"),
        ("a", {"tokens": 0}, "tokens: 0 is too small"),
        ("a", {"temperature": -1.0}, r"temperature: -1.0 is no temperature"),
        ("a", {"temperature": float("nan")}, r"temperature: nan is no temperature"),
    ):
        with pytest.raises(HorizonError, match=problem):
            horizonml.generate(path, prompt, **options)


def test_other_models_write_nothing(tmp_path: Path) -> None:
    path, _ = checkpoint_of(tmp_path / "run", Job.model_validate({"data": {"name": "digits"}}))
    with pytest.raises(HorizonError, match="trained on texts, not on digits"):
        horizonml.generate(path, "a")


def test_a_description_keeps_its_characters_and_older_ones_have_none() -> None:
    info = DataInfo(3, 1, (), characters="\n aé", unigram=2.5)
    assert DataInfo.from_json(info.to_json()) == info
    assert DataInfo.from_json(info.to_json()).unigram == 2.5
    older = {key: value for key, value in info.to_json().items() if key not in ("characters", "unigram")}
    assert DataInfo.from_json(older).characters == ""
