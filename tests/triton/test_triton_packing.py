"""Packing for the Triton kernels: interleaved nibbles, their inverse, and nf4."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_quant.kernels.triton.nf4 import NF4_TABLE, dequantize_nf4, from_bitsandbytes, pack_nf4
from medusa_quant.kernels.triton.weight import deinterleave, interleave, pack, scale_span, stack, unpack
from medusa_quant.quantization import QuantizedWeight, Scheme, quantize_weight


def quantized(
    bits: int, group: int, symmetric: bool, features: int, outputs: int, seed: int = 0
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, features, generator=generator)
    return quantize_weight(weight, Scheme(bits, group, symmetric))[0]


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    group=st.sampled_from([-1, 16, 32, 48, 64, 128, 256]),
    symmetric=st.booleans(),
    features=st.integers(1, 400),
    outputs=st.sampled_from([1, 2, 13, 31, 64]),
    heads=st.integers(1, 3),
)
def test_unpacking_gives_back_every_head(
    bits: int, group: int, symmetric: bool, features: int, outputs: int, heads: int
) -> None:
    weights = [quantized(bits, group, symmetric, features, outputs, seed) for seed in range(heads)]
    restored = unpack(stack([pack(weight) for weight in weights]))
    for weight, back in zip(weights, restored, strict=True):
        assert torch.equal(weight.codes(), back.codes())
        assert weight.tensors().keys() == back.tensors().keys()
        for name, tensor in weight.tensors().items():
            assert torch.equal(tensor, back.tensors()[name]), name
        assert (weight.group_size, weight.in_features) == (back.group_size, back.in_features)


@settings(deadline=None, max_examples=30)
@given(features=st.integers(1, 300), outputs=st.integers(1, 5), pad=st.integers(0, 15))
def test_every_nibble_lies_where_the_layout_says(features: int, outputs: int, pad: int) -> None:
    nibbles = torch.randint(0, 16, (features, outputs), dtype=torch.uint8)
    words = interleave(nibbles, pad)
    assert words.dtype == torch.int32
    assert words.shape == (-(-features // 128) * 16, outputs)
    for k in range(words.shape[0] * 8):
        block, lane, row = k // 128, k % 128 // 16, k % 16
        found = (words[block * 16 + row] >> (4 * lane)) & 15
        expected = nibbles[k].int() if k < features else torch.full((outputs,), pad, dtype=torch.int32)
        assert torch.equal(found, expected), k
    assert torch.equal(deinterleave(words, features), nibbles)


def test_int4_takes_half_a_byte_and_int8_one() -> None:
    assert pack(quantized(4, 128, True, 256, 32)).qweight.nbytes == 256 * 32 // 2
    assert pack(quantized(8, -1, True, 256, 32)).qweight.nbytes == 256 * 32


@pytest.mark.parametrize(("group", "span"), [(-1, 128), (32, 32), (64, 64), (128, 128), (256, 128), (48, 16)])
def test_a_scale_covers_its_span_of_a_block(group: int, span: int) -> None:
    assert scale_span(group) == span


def test_weights_the_kernels_cannot_take_are_refused() -> None:
    weight = quantized(4, 128, True, 256, 8)
    act_order = QuantizedWeight(
        weight.qweight, weight.scales, 256, 4, 128, None, torch.arange(256, dtype=torch.int32) % 2
    )
    with pytest.raises(ValueError, match="act-order"):
        pack(act_order)
    with pytest.raises(ValueError, match="multiple of 16"):
        pack(quantized(4, 20, True, 40, 8))


def test_heads_of_different_shape_are_not_stacked() -> None:
    with pytest.raises(ValueError, match="share shape"):
        stack([pack(quantized(4, 32, True, 64, 8)), pack(quantized(4, 32, True, 64, 9))])
    with pytest.raises(ValueError, match="share shape"):
        stack([pack(quantized(4, 32, True, 64, 8)), pack(quantized(4, 32, False, 64, 8))])


def test_nf4_codes_are_table_entries() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(5)[:, None].expand(80, 3)
    scales = torch.tensor([[1.0, 2.0, 4.0], [0.5, 0.25, 8.0]])
    packed = pack_nf4(codes, scales, block_size=64)
    table = torch.tensor(NF4_TABLE)
    expected = table[codes.long()] * torch.cat([scales[:1].expand(64, 3), scales[1:].expand(16, 3)])
    assert torch.equal(dequantize_nf4(packed)[0], expected)
    with pytest.raises(ValueError, match="nf4"):
        unpack(packed)


def test_nf4_of_bitsandbytes_dequantizes_as_there() -> None:
    functional = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    weight = torch.randn(24, 128, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=False
    )
    ours = dequantize_nf4(from_bitsandbytes(packed, state.absmax, (24, 128), 64))[0]
    torch.testing.assert_close(ours.t(), functional.dequantize_4bit(packed, state), rtol=1e-6, atol=1e-7)


def test_nf4_blocks_that_cross_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="block size"):
        from_bitsandbytes(torch.zeros(50, dtype=torch.uint8), torch.ones(2), (1, 100), 64)
