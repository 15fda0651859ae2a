"""Each kernel computes what its formula says, alone and in the shapes that its neighbours do not bring about."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.engines.torch import kernels
from outrider.engines.torch.fused_model import LOG2E
from outrider.engines.torch.kernels import skinny_tiling
from outrider.sampling.batched_sampler import torch_top2
from tests.support.triton_interpreter import VOCAB

pytestmark = pytest.mark.kernels
EPS = 1e-6


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def few(
    x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None, norm: Tensor | None, gated: bool, add: bool
) -> None:
    width = out.shape[1]
    kernels.skinny_linear[(-(-width // 4),)](
        x, weight, bias, norm, out, x.shape[1], width, EPS, bias is not None, norm is not None, gated, add, len(x),
        4, 16, 1, False,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("size", [32, 24])  # whole blocks of 16, and a rest
def test_the_product_for_few_tokens(tokens: int, size: int) -> None:
    x, weight, bias, norm = drawn(tokens, size), drawn(10, size), drawn(10), drawn(size)
    out = torch.empty(tokens, 10)
    few(x, weight, out, bias=bias, norm=norm, gated=False, add=False)
    assert torch.allclose(out, normed(x, norm) @ weight.T + bias, atol=1e-4)
    before = drawn(tokens, 10)
    out = before.clone()
    few(x, weight, out, bias=None, norm=None, gated=False, add=True)
    assert torch.allclose(out, before + x @ weight.T, atol=1e-4)
    out = torch.empty(tokens, 5)
    few(x, weight, out, bias=None, norm=norm, gated=True, add=False)
    first, second = (normed(x, norm) @ weight.T).split(5, -1)
    assert torch.allclose(out, torch.nn.functional.silu(first) * second, atol=1e-4)


def test_a_token_is_summed_alike_alone_and_beside_another() -> None:
    x, weight = drawn(2, 40), drawn(8, 40)
    both, alone = torch.empty(2, 8), torch.empty(1, 8)
    few(x, weight, both, bias=None, norm=None, gated=False, add=False)
    few(x[1:].contiguous(), weight, alone, bias=None, norm=None, gated=False, add=False)
    assert torch.equal(both[1:], alone)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    ("width", "size", "gated"),
    [
        (1152, 896, False),
        (896, 896, False),
        (4864, 896, True),
        (896, 4864, False),
        (152_064, 896, False),
        (4608, 3584, False),
        (3584, 3584, False),
        (18_944, 3584, True),
        (3584, 18_944, False),
        (152_064, 3584, False),
    ],
)
def test_tilings_are_powers_of_two_that_waste_little(tokens: int, width: int, size: int, gated: bool) -> None:
    stripe, depth, warps, stages = skinny_tiling(tokens, width, size, gated)
    assert all(n & (n - 1) == 0 for n in (stripe, depth, warps))
    assert -(-size // depth) * depth <= 1.2 * size  # what is read, beyond the end included
    assert -(-width // stripe) * stripe <= 1.01 * width
    assert 1 <= stages <= 3


@pytest.mark.parametrize("width", [VOCAB - 1, 700])
@pytest.mark.parametrize("pieces", [1, 4])
def test_the_lead_is_that_of_the_plain_way(width: int, pieces: int) -> None:
    rows = drawn(7, width + 3)
    rows[1] = rows[1].round()  # ties: the first counts
    rows[2] = 0.0
    rows[3, width // 2] = torch.inf
    rows[4] = -torch.inf
    rows[4, 7] = 1.0
    rows[5] = torch.arange(width + 3)  # the largest beyond the width must not count
    rows = rows[:, :width]
    parts, out = torch.empty(7, 3, pieces), torch.empty(7, 3, dtype=torch.float64)
    kernels.partial_top2[(7, pieces)](rows, parts, width, rows.stride(0), -(-width // pieces), pieces, 256)
    kernels.merge_top2[(7,)](parts, out, pieces)
    assert torch.equal(out, torch_top2(rows))


def test_a_row_with_nan_has_no_finite_best() -> None:
    rows = drawn(1, 40)
    rows[0, 9] = torch.nan
    parts, out = torch.empty(1, 3, 2), torch.empty(1, 3, dtype=torch.float64)
    kernels.partial_top2[(1, 2)](rows, parts, 40, 40, 20, 2, 32)
    kernels.merge_top2[(1,)](parts, out, 2)
    assert not torch.isfinite(out[0, 1])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tile", [16, 64])
def test_attention_is_causal_over_every_chunk_and_tile(splits: int, tile: int) -> None:
    """Chunks shorter than a step of keys, blocks of several tiles, and a sequence that ends within a chunk."""
    heads, kv_heads, dim, capacity, span, step = 4, 2, 32, 160, 64, 32
    counts, starts, bases = [23, 1, 40], [41, 6, 0], [0, 64, 96]
    qkv = drawn(sum(counts), heads + 2 * kv_heads, dim)
    keys, values = drawn(kv_heads, capacity, dim), drawn(capacity, kv_heads, dim).transpose(0, 1).contiguous()
    buffers = torch.tensor([keys.data_ptr(), values.data_ptr(), capacity])
    out = torch.empty(len(qkv), heads, dim)
    partial, maxima, sums = (torch.empty(len(qkv), heads, splits, *rest) for rest in ((dim,), (), ()))
    firsts = [sum(counts[:n]) for n in range(len(counts))]
    entries = [torch.tensor(each, dtype=torch.int32) for each in (firsts, counts, starts, bases)]
    kernels.attend[(len(counts) * kv_heads, splits, -(-max(counts) * 2 // tile))](
        qkv, buffers, out, partial, maxima, sums, *entries, span // splits, LOG2E * dim**-0.5, heads, kv_heads, dim,
        splits, tile, step, False,
    )  # fmt: skip
    if splits > 1:
        token_bases = torch.repeat_interleave(entries[3], entries[1])
        kernels.combine[(len(qkv) * heads,)](partial, maxima, sums, token_bases, out, heads, dim, splits, False)
    for first, count, start, base in zip(firsts, counts, starts, bases, strict=True):
        query = qkv[first : first + count, :heads].transpose(0, 1)
        cached = slice(base, base + start + count)
        mask = torch.arange(start + count) <= start + torch.arange(count)[:, None]
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[None], keys[None, :, cached], values[None, :, cached], mask, enable_gqa=True
        )[0].transpose(0, 1)
        assert torch.allclose(out[first : first + count], expected, atol=1e-5)
