# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The arrays that cutile's kernels get under a level: like packed ones at a multiple of 16 bytes, however the caller's
lie, and two rows at least of those that end between 16 bytes."""

import itertools
from typing import Any

import pytest
import torch
from helpers import BF16, FP32
from torch import Tensor

from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted
from tilegym_rmsnorm.reproducibility import BATCH, DEVICE

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from tilegym_rmsnorm import reproducible  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host.arrange import bind_arranged  # noqa: E402
from tilegym_rmsnorm.backends.cutile.host.norm import backward_plan  # noqa: E402
from tilegym_rmsnorm.call.layout import packed

N = 64


def placed(shape: tuple[int, ...], layout: str, dtype: torch.dtype = BF16) -> Tensor:
    """Rows of random numbers, laid out so."""
    if layout == "packed":
        return torch.randn(shape).to(dtype)
    if layout == "between 16 bytes":
        return torch.randn(torch.Size(shape).numel() + 1).to(dtype)[1:].view(shape)
    if layout == "transposed":
        return torch.randn(shape[1], shape[0], *shape[2:]).to(dtype).transpose(0, 1)
    stride = {"wide": N + 16, "odd": N + 3}[layout]
    return torch.randn(*shape[:-1], stride).to(dtype)[..., :N]


class Kernel:
    """Stands for kernels: keeps what it gets, and returns each row of x, and sums."""

    def __init__(self) -> None:
        self.got: tuple[Any, ...] = ()

    def __call__(self, spec: Spec, tensors: Any, *wanted: Wanted) -> tuple[Any, ...]:
        self.got = tensors
        x, weight = tensors[0], tensors[2 if wanted else 1]
        if wanted:
            return packed(x), None, weight.clone(), None
        residual_out = None if tensors[3] is None else packed(tensors[3])
        return packed(x), torch.arange(x.numel() // N).float(), residual_out


LAYOUTS = ["packed", "wide", "odd", "between 16 bytes", "transposed"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(5, N), (1, N), (2, 3, 4, N), (1, 1, 1, N), (2, 1, 4, N)])
@pytest.mark.parametrize("heads", [0, 4])
def test_kernels_get_arrays_that_are_like_packed_ones(shape, layout, heads):
    if heads and (len(shape) == 2 or shape[2] != heads) or layout == "transposed" and len(shape) == 2:
        pytest.skip("no such call")
    weight = placed((heads, N) if heads else (N,), "between 16 bytes", FP32)
    x, other, m = placed(shape, layout), placed(shape, layout), torch.Size(shape[:-1]).numel()
    spec, rstd = Spec(N, 0.0, 0.0, "once", residual_dtype=BF16), torch.rand(m)
    for tensors, wanted in (
        ((x, weight, None, other), ()),
        ((x, other, weight, rstd, None), (Wanted(BF16, dw=FP32),)),
    ):
        kernel = Kernel()
        results = bind_arranged(kernel, spec, tensors, *wanted)(tensors)
        expected = (1, m // heads, heads, N) if heads else shape
        got = [each for each in kernel.got if each is not None]
        assert all(each.data_ptr() % 16 == 0 for each in got)
        for each, given in zip((kernel.got[0], kernel.got[1 if wanted else 3]), (x, other), strict=True):
            assert each.shape == expected
            assert all(
                stride % 8 == 0
                for stride, extent in zip(each.stride()[:-1], expected, strict=False)
                if extent > 1
            )
            assert torch.equal(each.reshape(-1, N), given.reshape(-1, N))
            if layout in ("packed", "wide") and each.shape == given.shape:
                assert each is given
        assert results[0].shape == shape and results[0].is_contiguous() and torch.equal(results[0], x)
        if not wanted:
            assert torch.equal(results[1], torch.arange(m).float()) and torch.equal(results[2], other)
        else:
            assert kernel.got[3] is rstd


@pytest.mark.parametrize(("n", "shape"), [(256, (2, 3, 4, 256)), (80, (24, 80)), (1024, (24, 1024))])
def test_heads_beside_one_weight_are_read_where_they_are_if_they_are_added_as_rows(n, shape):
    q = torch.randn(2, 3, 12, n)[:, :, :4]
    rows = got_rows(q, 0)
    assert rows.shape == shape and (rows is q) == (n == 256)
    assert torch.equal(rows.reshape(q.shape), q)
    kernel, tensors = Kernel(), (q, q, torch.rand(n), torch.rand(24), None)
    for level, dw in itertools.product((BATCH, BATCH | DEVICE), (FP32, None)):
        spec = Spec(n, 0.0, 0.0, "once", reproducible=level)
        bind_arranged(kernel, spec, tensors, Wanted(FP32, dw=dw))(tensors)
        # how rows share a sum depends on the shape
        assert kernel.got[0].shape == ((24, n) if level & DEVICE and dw else shape)


@pytest.mark.parametrize("t", [16, 2**19])
def test_heads_whose_packed_strides_kernels_cannot_count_in_become_rows(t):
    q = torch.empty((2, t, 48, 256), dtype=BF16, device="meta")[:, :, :16]
    kernel, tensors = Kernel(), (q, q[0, 0, 0], None, None)
    bind_arranged(kernel, Spec(256, 0.0, 0.0, "once"), tensors)(tensors)
    assert kernel.got[0].shape == ((2, t, 16, 256) if t == 16 else (2 * t * 16, 256))


def got_rows(x: Tensor, heads: int) -> Tensor:
    """Return the rows of x as the kernel of a forward gets them, beside weights of heads, or one weight."""
    weight = torch.rand(heads, x.shape[-1]) if heads else torch.rand(x.shape[-1])
    kernel, tensors = Kernel(), (x, weight, None, None)
    bind_arranged(kernel, Spec(x.shape[-1], 0.0, 0.0, "once"), tensors)(tensors)
    return kernel.got[0]


@pytest.mark.parametrize("heads", [0, 3])
@pytest.mark.parametrize("n", [100, 211])
def test_a_lone_row_that_ends_between_16_bytes_gets_zeros_beside_it(n, heads):
    lead = (1, 1, heads) if heads else (1,)
    x, dy, rstd = torch.randn(*lead, n).to(BF16), torch.randn(*lead, n).to(BF16), torch.rand(heads or 1)
    tensors = x, dy, torch.rand(heads, n) if heads else torch.rand(n), rstd, None
    kernel = Kernel()
    dx, *_ = bind_arranged(kernel, Spec(n, 0.0, 0.0, "once"), tensors, Wanted(BF16, dw=FP32))(tensors)
    for place, given in ((0, x), (1, dy), (3, rstd)):
        first, second = kernel.got[place].view(2, -1)
        assert torch.equal(first, given.flatten()) and not second.any()
    assert torch.equal(dx, x)


@pytest.mark.parametrize("stride", [1, 3, N + 1])
def test_the_stride_of_one_batch_is_like_that_of_a_packed_array(stride):
    x = torch.randn(1, 5, 4, N).to(BF16)
    got = got_rows(x.as_strided(x.shape, (stride, *x.stride()[1:])), heads=4)
    assert got.stride() == x.stride() and torch.equal(got, x)


@pytest.mark.parametrize("heads", [2, 3])
def test_heads_that_end_between_16_bytes(heads):
    """Those of each row together may not: then each row of a packed array begins at 16 bytes."""
    n = 100
    x, apart = torch.randn(1, 5, heads, n).to(BF16), torch.randn(1, 5, heads * n + 4).to(BF16)
    assert got_rows(x, heads) is x
    got = got_rows(apart[..., : heads * n].unflatten(-1, (heads, n)), heads)
    assert got.stride() == x.stride() and torch.equal(got.flatten(2), apart[..., : heads * n])


def test_the_plan_that_is_shown_is_of_the_level_in_effect():
    shown = [backward_plan(5, 4096, BF16, torch.device("cpu"))]
    with reproducible("device"):
        shown.append(backward_plan(5, 4096, BF16, torch.device("cpu")))
    assert [each.problem.policy[2:] for each in shown] == [(False, False), (True, True)]
