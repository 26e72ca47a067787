import math

import pytest
import torch

from horizonml.data.tensors import TensorSpec
from horizonml.engine.codec import Codec
from horizonml.engine.sync.compressed import powersgd_ratio

SHAPES = [(8, 16, 16), (32, 4, 4), (40,), (3, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("format", "bytes_per_value"), [("fp32", 4), ("bf16", 2), ("int8", 1)])
def test_what_is_encoded_comes_back_but_for_rounding(shape: tuple[int, ...], format: str, bytes_per_value: int) -> None:
    codec = Codec(TensorSpec(shape, torch.float32), format)
    tensor = torch.randn(5, *shape) * torch.logspace(-6, 3, 5).view(5, *[1] * len(shape))
    encoded = codec.encode(tensor)
    assert encoded.nbytes == 5 * codec.bytes_per_sample
    scales = {(8, 16, 16): 8}.get(shape, 1) if format == "int8" else 0
    assert codec.bytes_per_sample == bytes_per_value * math.prod(shape) + 4 * scales
    room = codec.empty(5)
    assert (room.shape, room.dtype) == (encoded.shape, encoded.dtype)
    decoded = codec.decode(encoded)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, torch.float32)
    groups = tensor.view(5, scales or 1, -1)
    largest = groups.abs().amax(2, keepdim=True)
    allowed = {"fp32": 0 * groups, "bf16": groups.abs() / 256, "int8": largest / 254 * 1.001}[format]
    assert ((decoded - tensor).view_as(groups).abs() <= allowed).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_rows_are_encoded_each_on_its_own(shape: tuple[int, ...], format: str) -> None:
    codec = Codec(TensorSpec(shape, torch.float32), format)
    tensor = torch.randn(6, *shape)
    assert torch.equal(codec.encode(tensor)[2:5], codec.encode(tensor[2:5]))
    assert torch.equal(codec.decode(codec.encode(tensor)[2:5]), codec.decode(codec.encode(tensor))[2:5])


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden() -> None:
    codec = Codec(TensorSpec((4, 8, 8), torch.float32), "int8")
    tensor = torch.zeros(2, 4, 8, 8)
    assert torch.equal(codec.decode(codec.encode(tensor)), tensor)
    for value in (math.nan, math.inf):
        tensor[0, 1, 0, 0] = value
        decoded = codec.decode(codec.encode(tensor))
        assert not decoded[0, 1].isfinite().any()
        assert torch.equal(decoded[1], tensor[1])
        assert torch.equal(decoded[0, 2:], tensor[0, 2:])


def test_a_tensor_of_whole_numbers_is_sent_as_it_is() -> None:
    codec = Codec(TensorSpec((7,), torch.int64), "int8")
    tensor = torch.arange(21).view(3, 7)
    assert codec.bytes_per_sample == 56
    assert torch.equal(codec.decode(codec.encode(tensor)), tensor)


def test_powersgd_sends_thin_matrices_where_that_pays() -> None:
    shapes = [(64, 64, 3, 3), (64,), ()]
    assert powersgd_ratio(shapes) == pytest.approx((4 * (64 + 576) + 64 + 1) / (64 * 576 + 64 + 1))
