"""Texts as data: windows of tokens, with the end of the text held out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from horizonml.data.choose import agree, describe, load
from horizonml.data.spec import DataSpec
from horizonml.data.text import unigram_perplexity
from horizonml.errors import DataError


def spec(path: Path, **options: object) -> DataSpec:
    return DataSpec.model_validate({"name": "text", "path": str(path), "length": 8, **options})


@pytest.fixture
def alphabet(tmp_path: Path) -> Path:
    path = tmp_path / "alphabet.txt"
    path.write_text("".join(chr(ord("a") + n % 26) for n in range(200)) + "ü")
    return path


def test_the_embedded_text_is_the_sonnets(tmp_path: Path) -> None:
    given = DataSpec(name="text", length=32, holdout=0.1)
    info = describe(given)
    assert info is not None
    assert (info.task, info.outputs, info.inputs[0].shape) == ("language_model", 61, (32,))
    assert info.target == info.inputs[0]
    data = load(given, info, tmp_path)
    first = data.train.inputs(torch.tensor([0]))
    letters = sorted(set(_sonnets()))
    assert "".join(letters[number] for number in first[0].tolist()) == "From fairest creatures we desire"
    assert len(_sonnets()) * 0.89 / 32 < info.train < len(_sonnets()) * 0.9 / 32


def _sonnets() -> str:
    import gzip
    from importlib import resources

    return gzip.decompress(resources.files("horizonml.data").joinpath("sonnets.txt.gz").read_bytes()).decode()


def test_targets_are_the_next_tokens_and_the_end_is_held_out(alphabet: Path, tmp_path: Path) -> None:
    given = spec(alphabet, holdout=0.25, stride=4)
    info = describe(given)
    assert info is not None
    data = load(given, info, tmp_path)
    text = alphabet.read_text()
    letters = sorted(set(text))
    seen = 0
    for split, count, stride, first in ((data.train, info.train, 4, 0), (data.held_out, info.held_out, 8, 151)):
        indices = torch.arange(count)
        inputs, targets = split.inputs(indices), split.targets(indices)
        assert isinstance(inputs, torch.Tensor)
        assert isinstance(targets, torch.Tensor)
        assert inputs.dtype == targets.dtype == torch.int64
        for row, (one, other) in enumerate(zip(inputs.tolist(), targets.tolist(), strict=True)):
            start = first + row * stride
            assert "".join(letters[n] for n in one) == text[start : start + 8]
            assert "".join(letters[n] for n in other) == text[start + 1 : start + 9]
            seen = max(seen, start + 9)
        assert seen <= (151 if first == 0 else len(text))
        assert seen + stride > (151 if first == 0 else len(text))  # as many windows as fit


def test_a_tokenizer_of_the_users_own(alphabet: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    words = tmp_path / "words.txt"
    words.write_text("the cat sat on the mat and the dog sat on the log " * 20)
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train([str(words)], trainers.WordLevelTrainer(special_tokens=["?"], show_progress=False))
    tokenizer.save(str(tmp_path / "words.json"))
    given = spec(words, tokens=str(tmp_path / "words.json"))
    info = describe(given)
    assert info is not None
    assert info.outputs == tokenizer.get_vocab_size() == 9
    data = load(given, info, tmp_path)
    assert tokenizer.decode(data.train.inputs(torch.tensor([0]))[0].tolist()) == "the cat sat on the mat and the"
    with pytest.raises(DataError, match="neither bytes, characters, nor a tokenizer"):
        describe(spec(words, tokens="letters"))


def test_the_unigram_baseline_is_what_frequencies_alone_can_tell(tmp_path: Path) -> None:
    path = tmp_path / "coins.txt"
    path.write_text("abab" * 1000 + "abab" * 250)
    assert unigram_perplexity(spec(path)) == pytest.approx(2, rel=1e-6)
    info = describe(spec(path))
    assert info is not None
    assert info.unigram == unigram_perplexity(spec(path))
    path.write_text("aaab" * 1000 + "bbba" * 250)
    train = {"a": 3001 / 4002, "b": 1001 / 4002}
    expected = math.exp(-(0.25 * math.log(train["a"]) + 0.75 * math.log(train["b"])))
    assert unigram_perplexity(spec(path)) == pytest.approx(expected, rel=1e-6)


def test_ranks_with_texts_of_other_characters_are_told_apart(alphabet: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(alphabet.read_text().replace("ü", "ö"))
    with pytest.raises(DataError, match="texts of rank 0 and rank 1 differ: only one of them has 'ö'"):
        agree([describe(spec(alphabet)), describe(spec(other))], spec(alphabet))


def test_a_text_that_is_too_short_is_refused(alphabet: Path) -> None:
    with pytest.raises(DataError, match=r"data\.length: the text has 201 tokens"):
        describe(spec(alphabet, length=500))
    with pytest.raises(DataError, match=r"data\.samples: 5000, but the text has"):
        describe(spec(alphabet, samples=5000))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "noise"
    path.write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(DataError, match=r"noise is not a text in UTF-8.*data.tokens: bytes"):
        describe(spec(path))
    info = describe(spec(path, tokens="bytes"))
    assert info is not None
    assert info.outputs == 256
    first = load(spec(path, tokens="bytes"), info, tmp_path).train.inputs(torch.tensor([0]))
    assert bytes(first[0].tolist()) == b"\xff\xfe\x00\xff\xfe\x00\xff\xfe"
    missing = spec(tmp_path / "missing")
    assert describe(missing) is None
    with pytest.raises(DataError, match=r"data.path: .*missing does not exist on any rank"):
        agree([None, None], missing)
    with pytest.raises(DataError, match="is not a regular file; name a text file"):
        describe(spec(tmp_path))
    path.write_bytes(b"")
    with pytest.raises(DataError, match="noise is empty"):
        describe(spec(path))
