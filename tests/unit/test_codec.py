import itertools
import math

import pytest
import torch

from horizonml.data.dataset import TensorSpec
from horizonml.engine.link import BoundaryCodec, Codec
from horizonml.models.boundary import Boundary
from horizonml.plan.plan import FORMATS
from horizonml.plan.syncs import Sync

LOSSY = ["bf16", "int8", "int4"]
SHAPES: list[tuple[int, ...]] = [(8, 16, 16), (32, 4, 4), (40,), (3, 1, 1)]


@pytest.mark.parametrize(("format", "bytes_per_value"), [("fp32", 4), ("bf16", 2), ("int8", 1), ("int4", 0.5)])
def test_what_is_encoded_comes_back_but_for_rounding(format: str, bytes_per_value: float) -> None:
    for shape in SHAPES:
        codec = Codec(TensorSpec(shape, torch.float32), format)
        tensor = torch.randn(5, *shape) * torch.logspace(-6, 3, 5).view(5, *[1] * len(shape))
        encoded, room = codec.encode(tensor), codec.empty(5)
        assert (room.shape, room.dtype) == (encoded.shape, encoded.dtype)
        assert encoded.nbytes == 5 * codec.bytes_per_sample
        scales = {(8, 16, 16): 8}.get(shape, 1) if format == "int8" else 0
        scale_bytes = 2 * math.ceil(math.prod(shape) / 64) if format == "int4" else 4 * scales
        assert codec.bytes_per_sample == math.ceil(bytes_per_value * math.prod(shape)) + scale_bytes
        decoded = codec.decode(encoded)
        assert (decoded.shape, decoded.dtype) == (tensor.shape, torch.float32)
        groups = tensor.view(5, scales or 1, -1)
        if format == "int4":
            assert ((decoded - tensor).view(5, -1).norm(dim=1) < 0.16 * tensor.view(5, -1).norm(dim=1)).all()
            continue
        largest = groups.abs().amax(2, keepdim=True)
        allowed = {"fp32": 0 * groups, "bf16": groups.abs() / 256, "int8": largest / 254 * 1.001}[format]
        assert ((decoded - tensor).view_as(groups).abs() <= allowed).all()


def test_rows_are_encoded_each_on_its_own() -> None:
    for format, shape in itertools.product(LOSSY, SHAPES):
        codec, tensor = Codec(TensorSpec(shape, torch.float32), format), torch.randn(6, *shape)
        assert torch.equal(codec.encode(tensor)[2:5], codec.encode(tensor[2:5])), shape
        assert torch.equal(codec.decode(codec.encode(tensor)[2:5]), codec.decode(codec.encode(tensor))[2:5]), shape


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


def test_any_number_of_rows_is_encoded() -> None:
    for format, shape, rows in itertools.product(FORMATS, [(8, 16, 16), (), (65,), (0,)], [0, 1]):
        codec, tensor = Codec(TensorSpec(shape, torch.float32), format), torch.randn(rows, *shape)
        encoded = codec.encode(tensor)
        assert (encoded.shape, encoded.dtype) == (codec.empty(rows).shape, codec.empty(rows).dtype), (shape, rows)
        assert codec.decode(encoded).shape == tensor.shape, (shape, rows)


def test_tensors_that_are_not_contiguous_are_encoded_as_others() -> None:
    for format in LOSSY:
        codec, tensor = Codec(TensorSpec((4, 6, 20), torch.float32), format), torch.randn(4, 6, 3, 20)
        turned = tensor.permute(2, 0, 1, 3)
        assert torch.equal(codec.encode(turned), codec.encode(turned.contiguous()))


@pytest.mark.parametrize("format", ["fp32", "int8", "int4"])
def test_several_tensors_travel_as_rows_of_bytes(format: str) -> None:
    specs = (TensorSpec((5,), torch.int64), TensorSpec((3, 7), torch.float32), TensorSpec((), torch.bool))
    codec = BoundaryCodec(Boundary((*specs, TensorSpec((130,), torch.float32))), format)
    for rows in (0, 3):
        values = (
            torch.arange(5 * rows).view(rows, 5),
            torch.randn(rows, 3, 7),
            torch.arange(rows) % 2 == 0,
            torch.randn(rows, 130),
        )
        encoded = codec.encode(values)
        assert encoded.shape == (rows, codec.bytes_per_sample) == codec.empty(rows).shape
        decoded = codec.decode(encoded)
        for before, after in zip(values, decoded, strict=True):
            assert (before.shape, before.dtype) == (after.shape, after.dtype)
            assert torch.equal(before, after) or (before.is_floating_point() and format != "fp32")
            assert float((before.double() - after.double()).norm()) <= 0.2 * float(before.double().norm())
        for row in range(rows):  # which may be sent to different ranks
            for all_rows, alone in zip(decoded, codec.decode(encoded[row : row + 1]), strict=True):
                assert torch.equal(all_rows[row], alone[0])


def test_a_single_tensor_travels_as_its_codec_encodes_it() -> None:
    spec, tensor = TensorSpec((3, 7), torch.float32), torch.randn(4, 3, 7)
    one, boundary = Codec(spec, "int8"), BoundaryCodec(Boundary((spec,)), "int8")
    assert torch.equal(boundary.encode((tensor,)), one.encode(tensor))
    (decoded,) = boundary.decode(one.encode(tensor))
    assert torch.equal(decoded, one.decode(one.encode(tensor)))


def test_powersgd_sends_thin_matrices_where_that_pays() -> None:
    shapes = [(64, 64, 3, 3), (64,), ()]
    assert Sync.POWERSGD.bytes_of(shapes) == 4 * (4 * (64 + 576) + 64 + 1)
    assert Sync.FP16.bytes_of(shapes) == 2 * (64 * 576 + 64 + 1)
