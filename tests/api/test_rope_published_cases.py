# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The cases that other libraries publish for norm and rotary embedding of q and k, within their own tolerances.

- flashinfer-ai/flashinfer, tests/norm/test_fused_qk_rmsnorm_rope.py: the three sizes of WAN, eight grids of patches
  interleaved and three not; a position is a frame, a row and a column. Its norm is over all heads together, and its
  weights have an element for each of all heads. Here both are run, that norm and one for each head. Not run: FP8, the
  rotation without a norm, and v, which qk_norm_rope does not have.
- NVIDIA/TransformerEngine, tests/pytorch/test_qk_norm.py: RMSNorm with qk_norm_before_rope=True, half of each head
  rotated by random angles, so that the halves of the tables differ. Not run: the norm after the rotation, L2 and
  LayerNorm.

Of sequences with 1920 patches or more height and width are cut, since each takes over a second on a CPU; batches,
frames and heads are theirs.
"""

import pytest
import rope_calls
import torch
from helpers import BF16, DEVICE, FP16, FP32
from rope_cases import rotated, tables_of

from tilegym_rmsnorm import qk_norm_rope
from tilegym_rmsnorm.ops.rope.spec import RopeSpec

D, BASE, FLASHINFER_MOST = 128, 1e4, 0.1  # the largest difference that flashinfer's tests allow
WAN_HEADS = {"1.3B": 12, "5B": 24, "14B": 40}  # flashinfer itself refuses 40
INTERLEAVED = [  # batch, frames, height, width; cut are those of 12 x 32 and of 48 x 32
    *((1, 5, 3, 8), (1, 5, 12, 8), (1, 5, 8, 12), (2, 5, 3, 8)),
    *((1, 5, 6, 4), (4, 5, 3, 8), (1, 5, 12, 16), (1, 10, 3, 8)),
]
HALVES = [(1, 5, 12, 8), (1, 5, 6, 4), (2, 5, 3, 8)]
PUBLISHED = [
    *((24, grid, True) for grid in INTERLEAVED),
    *((24, grid, False) for grid in HALVES),
    *((heads, (1, 5, 6, 4), True) for heads in WAN_HEADS.values()),
]
SAMPLE = [(12, (1, 5, 3, 2), True), (12, (2, 2, 3, 2), False)]  # for interpreters


def patch_tables(frames, height, width, d, dtype):
    """cos and sin of a column for each pair: of the frame, then of the row, then of the column of a patch."""
    of_space = 2 * (d // 6)
    places = torch.cartesian_prod(*(torch.arange(each) for each in (frames, height, width))).double()
    angles = []
    for place, size in zip(places.unbind(1), (d - 2 * of_space, of_space, of_space), strict=True):
        angles.append(place[:, None] * BASE ** (-torch.arange(0, size, 2).double() / size))
    columns = torch.cat(angles, 1).to(DEVICE)
    return columns.cos().to(dtype), columns.sin().to(dtype)


def patches(heads, grid, d=D, dtype=BF16):
    """q and k, slices of one projection, their weights of all heads, and the tables."""
    batch, *sizes = grid
    cos, sin = patch_tables(*sizes, d, dtype)
    packed = torch.randn(batch, len(cos), 3 * heads, d, device=DEVICE).to(dtype)
    weights = [(1 + 0.1 * torch.randn(heads * d, device=DEVICE)).to(dtype) for _ in range(2)]
    return packed[:, :, :heads], packed[:, :, heads : 2 * heads], *weights, cos, sin


def in_float64(x, weight, cos, sin, interleaved, is_one_norm):
    wide = x.double()
    squares = wide.square().mean((-2, -1) if is_one_norm else -1, keepdim=True)
    n = wide * torch.rsqrt(squares + 1e-6) * weight.double().view(x.shape[-2:])
    spec = RopeSpec(x.shape[-1], 1e-6, 0.0, x.shape[-1], interleaved, "once", "end")
    return rotated(n, tables_of(spec, (x, None, None, None, cos, sin, None)))


def as_one_head(x, interleaved):
    """Heads (..., H, D) as one of H * D elements, with the pairs of all heads where this convention looks for them."""
    halves = x if interleaved else x.unflatten(-1, (2, -1)).transpose(-3, -2)
    return halves.flatten(x.ndim - 2)[..., None, :]


def by_one_norm(q, k, q_weight, k_weight, cos, sin, interleaved, **options):
    """flashinfer's fused_qk_rmsnorm_rope: the norm of a row of all heads, and each head rotated."""
    heads, d = q.shape[-2:]
    weights = (as_one_head(each.view(heads, d), interleaved)[0] for each in (q_weight, k_weight))
    tables = (each.repeat(1, heads) for each in (cos, sin))
    rows = (as_one_head(each, interleaved) for each in (q, k))
    outputs = qk_norm_rope(*rows, *weights, *tables, eps=1e-6, interleaved=interleaved, **options)
    if interleaved:
        return tuple(each.view(q.shape) for each in outputs)
    return tuple(
        each.view(*q.shape[:-2], 2, heads, -1).transpose(-3, -2).reshape(q.shape) for each in outputs
    )


def by_norms_of_heads(q, k, q_weight, k_weight, cos, sin, interleaved, **options):
    weights = (each.view(q.shape[-2:]) for each in (q_weight, k_weight))
    return qk_norm_rope(q, k, *weights, cos, sin, eps=1e-6, interleaved=interleaved, **options)


def check_patches(tensors, interleaved, is_one_norm, backend):
    call = by_one_norm if is_one_norm else by_norms_of_heads
    outputs = call(*tensors, interleaved, backend=backend)
    q, k, q_weight, k_weight, cos, sin = tensors
    for y, x, weight in zip(outputs, (q, k), (q_weight, k_weight), strict=True):
        want = in_float64(x, weight, cos, sin, interleaved, is_one_norm)
        assert y.shape == x.shape and y.dtype == x.dtype
        assert (y.double() - want).abs().max() < FLASHINFER_MOST


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(42)


by_kernels = pytest.mark.parametrize("backend", ["cutile", "triton"], indirect=True)
EVERY_NORM = pytest.mark.parametrize("is_one_norm", [True, False], ids=["all heads", "each head"])


@EVERY_NORM
@pytest.mark.parametrize(("heads", "grid", "interleaved"), PUBLISHED)
def test_flashinfer(heads, grid, interleaved, is_one_norm):
    check_patches(patches(heads, grid), interleaved, is_one_norm, "torch")


@by_kernels
@EVERY_NORM
@pytest.mark.parametrize(("heads", "grid", "interleaved"), SAMPLE)
def test_flashinfer_by_kernels(heads, grid, interleaved, is_one_norm, backend):
    check_patches(patches(heads, grid), interleaved, is_one_norm, backend)


@pytest.mark.parametrize(("d", "dtype"), [(96, BF16), (D, FP16)], ids=str)
def test_flashinfer_what_it_refuses(d, dtype):
    """Its tests expect an error for 96 elements, and for float16."""
    check_patches(patches(24, (1, 5, 6, 4), d, dtype), True, True, "torch")


def test_flashinfer_tokens_of_two_dimensions():
    """[tokens, columns] of two sequences has the bits of [batch, length, columns]."""
    *tensors, cos, sin = patches(24, (2, 5, 6, 4))
    outputs = by_norms_of_heads(*tensors, cos, sin, True)
    q, k, *weights = tensors
    rows = by_norms_of_heads(
        q.flatten(0, 1), k.flatten(0, 1), *weights, cos.repeat(2, 1), sin.repeat(2, 1), True
    )
    for one, other in zip(outputs, rows, strict=True):
        assert torch.equal(one.flatten(0, 1), other)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_flashinfer_cos_sin_cache(is_neox, rotary_dim):
    """docs/coming-from.md says which arguments its cache, positions and is_neox are."""
    tokens, d = 9, 64
    q, k = (torch.randn(tokens, heads, d, device=DEVICE).to(BF16) for heads in (8, 2))
    weights = [(1 + 0.1 * torch.randn(d, device=DEVICE)).to(BF16) for _ in range(2)]
    cache = torch.randn(32, rotary_dim, device=DEVICE)  # R / 2 columns of cos, then as many of sin
    positions = torch.randint(0, 32, (tokens,), device=DEVICE, dtype=torch.int32)
    options = {"rotary_dim": cache.shape[-1], "interleaved": not is_neox, "position_ids": positions}
    options["rope_rounding"] = "norm"
    outputs = qk_norm_rope(q, k, *weights, *cache.chunk(2, -1), eps=1e-6, **options)
    want = rope_calls.expected(q[None], k[None], *weights, *cache.chunk(2, -1), **options)
    for one, other in zip(outputs, want, strict=True):
        torch.testing.assert_close(one.double(), other[0], rtol=1e-2, atol=1e-2)


def check_transformer_engine(length, eps, dtype, interleaved_qkv, backend):
    """(S, B, ...) of a packed projection: 8 heads of 32 elements, of which 16 are rotated.

    TransformerEngine asks that nothing is NaN or infinite, and that a norm changes the output by more than 1e-6. Its
    comparisons elsewhere have the tolerances of torch.testing, which bound the difference from float64 here.
    """
    batch, heads, d, rotary_dim = 2, 8, 32, 16
    packed = torch.randn(length, batch, *((heads, 3) if interleaved_qkv else (3, heads)), d, device=DEVICE)
    q, k, _ = packed.to(dtype).unbind(3 if interleaved_qkv else 2)
    q, k = q.transpose(0, 1), k.transpose(0, 1)
    weights = [(1 + 0.1 * torch.randn(d, device=DEVICE)).to(dtype) for _ in range(2)]
    angles = torch.randn(length, 1, 1, rotary_dim, device=DEVICE).to(dtype)
    tables = [each.to(dtype)[:, 0, 0] for each in (angles.cos(), angles.sin())]
    outputs = qk_norm_rope(q, k, *weights, *tables, eps=eps, rotary_dim=rotary_dim, backend=backend)
    want = rope_calls.expected(q, k, *weights, *tables, eps=eps, rotary_dim=rotary_dim)
    rtol, atol = {FP32: (1.3e-6, 1e-5), BF16: (1.6e-2, 1e-5)}[dtype]
    for y, x, exact in zip(outputs, (q, k), want, strict=True):
        assert y.shape == x.shape and y.isfinite().all() and not torch.allclose(y, x, atol=1e-6)
        torch.testing.assert_close(y.double(), exact, rtol=rtol, atol=atol)


@pytest.mark.parametrize("interleaved_qkv", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("length", [64, 128])
def test_transformer_engine(length, eps, dtype, interleaved_qkv):
    check_transformer_engine(length, eps, dtype, interleaved_qkv, "torch")


@by_kernels
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_transformer_engine_by_kernels(dtype, backend):
    check_transformer_engine(64, 1e-5, dtype, True, backend)
