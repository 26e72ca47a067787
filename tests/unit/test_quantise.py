"""Four bits per value: how far values are off, and what stays exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from horizonml.engine.quantise import TILE, decode, encode, encoded_bytes

SEEDS = st.none() | st.integers(0, 2**63 - 1)


def tiles(values: Tensor) -> list[Tensor]:
    return [part for row in values for part in row.split(TILE) if len(part)]


def there_and_back(values: Tensor, rotate: bool = False, seed: int | None = None) -> Tensor:
    return decode(encode(values, rotate, seed), values.shape[-1], rotate)


@given(
    rows=st.integers(0, 4),
    n=st.integers(0, 300),
    exponent=st.floats(-30, 30),
    outlier=st.floats(1, 1e6),
    unsigned=st.booleans(),
    rotate=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=60, deadline=None)
def test_errors_are_bounded_by_what_a_tile_holds(
    rows: int, n: int, exponent: float, outlier: float, unsigned: bool, rotate: bool, seed: int | None
) -> None:
    values = torch.randn(rows, n, generator=torch.Generator().manual_seed(rows + 7 * n)) * 10**exponent
    values[:, ::50] *= outlier
    values = values.abs() if unsigned else values
    encoded = encode(values, rotate, seed)
    assert (encoded.shape, encoded.dtype) == ((rows, encoded_bytes(n)), torch.uint8)
    decoded = decode(encoded, n, rotate)
    assert decoded.shape == values.shape
    step = 2 if seed is None else 1  # the nearest step is half a step away at most, another one less than a whole one
    for whole, found in zip(tiles(values), tiles(decoded), strict=True):
        largest = float(whole.abs().max())
        if bool((whole >= 0).all()):
            assert float((found - whole).abs().max()) <= 1.01 * largest / 15 / step
        elif rotate and len(whole) == TILE:  # a step of the largest rotated value, in each of the rotated values
            assert float((found - whole).norm()) <= 1.01 * float(whole.norm()) / 7 / step * math.sqrt(TILE)
        else:
            assert float((found - whole).abs().max()) <= 1.01 * largest / 7 / step


def test_normal_values_keep_nine_tenths() -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    for rotate in (False, True):
        assert len(encode(values, rotate)) * 8 == 4.25 * len(values)
        error = (there_and_back(values, rotate) - values).norm() / values.norm()
        assert float(error) == pytest.approx(0.108, abs=0.003)


def test_tiles_without_negative_values_are_not_rotated() -> None:
    values = torch.randn(1 << 14, generator=torch.Generator().manual_seed(1)).relu()
    assert torch.equal(encode(values, rotate=True), encode(values))
    beside = torch.cat([-torch.ones(TILE), values])
    assert torch.equal(encode(beside, rotate=True)[-TILE // 2 :], encode(beside)[-TILE // 2 :])
    assert float((there_and_back(values, True) - values).norm() / values.norm()) < 0.06


@given(n=st.integers(1, 200), rotate=st.booleans(), seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_zeros_stay_zeros(n: int, rotate: bool, seed: int | None) -> None:
    values = torch.zeros(3, n)
    values[1] = -1.0
    decoded = there_and_back(values, rotate, seed)
    assert torch.equal(decoded[0], values[0])
    assert torch.equal(decoded[2], values[2])


@given(
    n=st.integers(1, 200),
    where=st.integers(0, 199),
    value=st.sampled_from([math.inf, -math.inf, math.nan]),
    rotate=st.booleans(),
    unsigned=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=30, deadline=None)
def test_what_is_not_finite_stays_so_and_spoils_its_tile_only(
    n: int, where: int, value: float, rotate: bool, unsigned: bool, seed: int | None
) -> None:
    values = torch.rand(n) if unsigned else torch.randn(n)
    values[where % n] = value
    own = where % n // TILE
    for tile, found in enumerate(tiles(there_and_back(values.unsqueeze(0), rotate, seed))):
        assert bool(found.isfinite().any()) == (tile != own)


def test_values_at_the_ends_of_the_range_do_not_become_others() -> None:
    tiny, large, huge = (torch.full((TILE,), value) for value in (1e-40, 1e38, 3.4e38))
    assert torch.equal(there_and_back(-tiny), torch.zeros(TILE))
    assert float((there_and_back(-large) / -large - 1).abs().max()) < 0.02
    for rotate in (False, True):
        assert not there_and_back(-huge, rotate).isfinite().any()


@given(rows=st.integers(1, 5), n=st.integers(1, 200), rotate=st.booleans())
@settings(max_examples=30, deadline=None)
def test_rows_are_encoded_each_on_its_own(rows: int, n: int, rotate: bool) -> None:
    values = torch.randn(rows, n, generator=torch.Generator().manual_seed(n)).t().contiguous().t()
    encoded = encode(values, rotate)
    for row in range(rows):
        assert torch.equal(encoded[row], encode(values[row], rotate))
        assert torch.equal(decode(encoded[row : row + 1], n, rotate)[0], decode(encoded, n, rotate)[row])


def test_stochastic_rounding_is_right_in_the_mean_and_repeatable() -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(1))  # whose tail is not a whole tile
    assert torch.equal(encode(values, True, 5), encode(values, True, 5))
    assert not torch.equal(encode(values, True, 5), encode(values, True, 6))
    many = 2000
    mean = sum((there_and_back(values, True, seed) for seed in range(many)), torch.zeros(200)) / many
    assert float((mean - values).norm() / values.norm()) < 0.01
    assert float((there_and_back(values, True) - values).norm() / values.norm()) > 0.05
