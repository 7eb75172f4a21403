# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": residual, bias, heads in place, per-head weights and mixed dtypes, in every plan of its kernels.

Results are compared with float64, of the residual_out that the kernel returned, which is checked first. Without a GPU
the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import BF16, DEVICE, FP16, FP32, why_skip
from test_triton import BACKWARDS, FORWARDS

from tilegym_rmsnorm.spec import Spec, Wanted

pytestmark = [
    pytest.mark.skipif(why_skip("triton") is not None, reason=str(why_skip("triton"))),
    pytest.mark.usefixtures("guarded_empty"),
]
EPS = 1e-3
GUARD = 64  # elements on either side of an output


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: the shape of x, the dtypes of what it has, and how the arrays of rows lie in memory."""

    shape: tuple[int, ...] = (13, 100)
    x: torch.dtype = BF16
    weight: torch.dtype | None = FP32
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    residual_out: torch.dtype | None = None
    dy: torch.dtype = BF16
    y: torch.dtype = BF16
    alpha: float = 1.0
    offset: float = 0.0
    casting: str = "once"
    per_head: bool = False
    layouts: tuple[str, str, str] = ("contiguous",) * 3  # of x; of residual and d_residual_out; of dy
    dx: torch.dtype | None = BF16
    d_residual: torch.dtype | None = None
    dw: torch.dtype | None = FP32
    db: torch.dtype | None = None


HEADS = ("slice", "contiguous", "transposed")
CASES = {
    "bias": Case(bias=FP16, db=BF16, offset=1.0),
    "bias without a weight": Case(shape=(13, 96), weight=None, dw=None, bias=FP32, db=FP32, dy=FP32),
    "residual": Case(residual=BF16, residual_out=BF16, layouts=("padded", "shifted", "padded")),
    "residual of another dtype, alpha": Case(
        x=FP16,
        residual=BF16,
        residual_out=FP32,
        alpha=0.22,
        dx=FP16,
        d_residual=BF16,
        weight=BF16,
        casting="llama",
    ),
    "all at once": Case(
        shape=(2, 3, 5, 100),
        residual=FP32,
        residual_out=FP16,
        alpha=-1.5,
        bias=FP32,
        db=BF16,
        y=FP32,
        dy=FP16,
        dx=BF16,
        d_residual=FP32,
        weight=FP16,
        casting="llama",
        offset=-0.25,
        per_head=True,
        layouts=("slice", "transposed", "slice"),
    ),
    "mixed dtypes": Case(x=FP32, weight=FP16, y=BF16, dy=FP16, dx=FP32, dw=FP32, casting="llama"),
    "heads in place": Case(shape=(2, 3, 5, 96), layouts=HEADS),
    "heads and residual": Case(
        shape=(2, 5, 3, 100), residual=BF16, residual_out=BF16, layouts=("transposed", "slice", "padded")
    ),
    "per-head": Case(shape=(3, 4, 2, 100), weight=BF16, dw=FP32, offset=1.0, per_head=True, layouts=HEADS),
    "per-head and bias": Case(
        shape=(1, 7, 3, 96), per_head=True, bias=FP32, db=FP32, layouts=("slice", "slice", "shifted")
    ),
    "one head, one token": Case(
        shape=(5, 1, 1, 100), per_head=True, bias=BF16, db=BF16, layouts=("loose",) * 3
    ),
    "one batch, one head": Case(
        shape=(1, 6, 1, 100), residual=BF16, residual_out=BF16, layouts=("loose",) * 3
    ),
    "one row": Case(
        shape=(1, 100), bias=FP32, db=FP32, residual=BF16, residual_out=BF16, layouts=("loose",) * 3
    ),
    "a frozen weight": Case(dw=None, bias=FP32, db=FP32, residual=BF16, residual_out=BF16),
    "a frozen x": Case(dx=None, bias=FP32, db=FP32),
    "only the residual's gradient": Case(
        residual=FP32, residual_out=FP32, alpha=2.0, dx=None, d_residual=FP32, dw=None
    ),
}


def laid_out(rows: torch.Tensor, layout: str) -> torch.Tensor:
    """Equal elements, between NaNs, elsewhere in memory."""
    if layout == "contiguous":
        return rows.contiguous()
    if layout == "shifted":  # storage offset 1
        storage = rows.new_full((rows.numel() + 1,), torch.nan)
        place = storage[1:].view(rows.shape)
    elif layout == "padded":
        place = rows.new_full((*rows.shape[:-1], rows.shape[-1] + 4), torch.nan)[..., : rows.shape[-1]]
    elif layout == "slice":  # as q of (B, T, 3, H, N)
        batch, tokens, heads, n = rows.shape
        place = rows.new_full((batch, tokens, 3, heads, n), torch.nan)[:, :, 1]
    elif layout == "transposed":  # of (B, H, T, N), as attention's backward leaves dy
        batch, tokens, heads, n = rows.shape
        place = rows.new_full((batch, heads, tokens, n), torch.nan).transpose(1, 2)
    else:  # "loose": dimensions of extent 1 have a stride that means nothing
        *extents, n = rows.shape
        strides = [
            stride if extent > 1 else 7 for extent, stride in zip(extents, rows.stride(), strict=False)
        ]
        place = torch.full((rows.numel() + 1,), torch.nan, dtype=rows.dtype, device=DEVICE).as_strided(
            rows.shape, (*strides, 1)
        )
    return place.copy_(rows)


class Call:
    """Fresh tensors of a case: rows that differ in scale, weights of both signs."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def normal(*shape, scale=0.0):
            rows = torch.randn(shape, generator=generator, device=DEVICE)
            return rows * torch.exp2(scale * torch.rand((*shape[:-1], 1), generator=generator, device=DEVICE))

        self.case = case
        n = case.shape[-1]
        vector = (case.shape[-2], n) if case.per_head else (n,)
        x_layout, residual_layout, dy_layout = case.layouts
        self.x = laid_out(normal(*case.shape, scale=6.0).to(case.x), x_layout)
        self.dy = laid_out(normal(*case.shape, scale=4.0).to(case.dy), dy_layout)
        self.weight = None if case.weight is None else (normal(*vector) + 0.5).to(case.weight)
        self.bias = None if case.bias is None else normal(*vector).to(case.bias)
        self.residual = self.d_residual_out = None
        if case.residual is not None:
            self.residual = laid_out(normal(*case.shape, scale=6.0).to(case.residual), residual_layout)
            d_residual_out = normal(*case.shape, scale=4.0).to(case.residual_out)
            self.d_residual_out = laid_out(d_residual_out, residual_layout)
        self.spec = Spec(n, EPS, case.offset, case.casting, case.alpha, case.y, case.residual_out)
        self.wanted = Wanted(case.dx, case.d_residual, case.dw, case.db)
        self.inputs = [self.x, self.dy, self.weight, self.bias, self.residual, self.d_residual_out]
        self.before = [None if each is None else each.clone() for each in self.inputs]

    def forward(self, config):
        from tilegym_rmsnorm.backends.triton import launch

        return launch.launch_forward(config, self.spec, (self.x, self.weight, self.bias, self.residual))

    def backward(self, config, normalized, rstd):
        from tilegym_rmsnorm.backends.triton import launch

        tensors = (normalized, self.dy, self.weight, rstd, self.d_residual_out)
        return launch.launch_backward(config, self.spec, tensors, self.wanted)

    def check_inputs(self):
        for each, before in zip(self.inputs, self.before, strict=True):
            assert each is None or torch.equal(each, before)

    def scale(self):
        """What xhat is multiplied by, in float64."""
        ones = torch.ones(self.case.shape[-1], dtype=torch.float64, device=DEVICE)
        return ones if self.weight is None else self.weight.double() + self.case.offset


def ulp(values, dtype):
    info = torch.finfo(dtype)
    return values.abs().clamp(min=info.smallest_normal) * info.eps


def assert_close(got, truth, magnitude, dtype, shape, *, steps=8, extra=0.0):
    """Within half a unit in the last place and `steps` roundings of float32 of the terms' magnitude, and `extra`."""
    assert got.dtype == dtype and got.shape == shape and got.is_contiguous()
    tolerance = ulp(truth, dtype) / 2 + steps * torch.finfo(FP32).eps * magnitude + extra
    wrong = ~((got.double() - truth).abs() <= tolerance)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}: {got[wrong][:5]}, not {truth[wrong][:5]}"


def rounded(xhat, dtype, casting):
    """xhat as it is multiplied, and how far another rounding of it can be."""
    if casting == "once":
        return xhat, torch.zeros_like(xhat)
    return xhat.to(dtype).double(), ulp(xhat, dtype)


def assert_rounds(errors, effect, case):
    """casting="llama" rounded xhat, or the errors were about the effect of that. Only where a float32 result shows it:
    single elements may be rounded to the other neighbour, by another rstd."""
    if case.casting == "llama" and case.y == FP32 and torch.finfo(case.residual_out or case.x).bits == 16:
        assert 0 < errors.norm() < 0.2 * effect.norm()


def sum_over_rows(terms, shape):
    return terms.sum(dim=tuple(range(terms.ndim - len(shape))))


@pytest.fixture
def guarded_empty(monkeypatch):
    """What the launch allocates holds NaN, and lies between elements that nobody may write."""
    taken = []
    empty = torch.empty

    def guarded(shape, **kwargs):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        count = math.prod(shape)
        storage = empty(count + 2 * GUARD, **kwargs).fill_(math.nan)
        storage[:GUARD] = storage[GUARD + count :] = 77
        taken.append((storage, count))
        return storage[GUARD : GUARD + count].view(shape)

    monkeypatch.setattr(torch, "empty", guarded)
    yield
    assert taken
    for storage, count in taken:
        assert (storage[:GUARD] == 77).all() and (storage[GUARD + count :] == 77).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name, case):
    call, case = Call(CASES[case]), CASES[case]
    y, rstd, residual_out = call.forward(FORWARDS[name])
    again = call.forward(FORWARDS[name])
    call.check_inputs()

    normalized = call.x.double()
    if case.residual is None:
        assert residual_out is None
    else:
        branch, residual = case.alpha * call.x.double(), call.residual.double()
        magnitude = branch.abs() + residual.abs()
        assert_close(residual_out, branch + residual, magnitude, case.residual_out, case.shape, steps=2)
        normalized = residual_out.double()
        assert torch.equal(residual_out, again[2])
    truth = 1 / (normalized.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
    assert_close(rstd, truth.flatten(), truth.flatten(), FP32, (math.prod(case.shape[:-1]),))
    xhat, jump = rounded(normalized * truth, case.residual_out or case.x, case.casting)
    scale = call.scale()
    bias = 0.0 if call.bias is None else call.bias.double()
    magnitude = (xhat * scale).abs() + abs(bias)
    assert_close(y, xhat * scale + bias, magnitude, case.y, case.shape, extra=jump * scale.abs())
    assert_rounds(y.double() - xhat * scale - bias, (xhat - normalized * truth) * scale, case)
    assert torch.equal(y, again[0]) and torch.equal(rstd, again[1])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", BACKWARDS)
def test_backward(name, case):
    call, case = Call(CASES[case], seed=1), CASES[case]
    dtype = case.residual_out or case.x
    normalized = laid_out(call.x.to(dtype), case.layouts[0])
    x, dy, scale = normalized.double(), call.dy.double(), call.scale()
    rstd = 1 / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
    gradients = call.backward(BACKWARDS[name], normalized, rstd.float().flatten())
    again = call.backward(BACKWARDS[name], normalized, rstd.float().flatten())
    call.check_inputs()

    xhat, g = x * rstd, dy * scale
    d = (g - xhat * (xhat * g).mean(dim=-1, keepdim=True)) * rstd
    magnitude = (g.abs() + xhat.abs() * (xhat * g).abs().mean(dim=-1, keepdim=True)) * rstd
    if call.d_residual_out is not None:
        d, magnitude = d + call.d_residual_out.double(), magnitude + call.d_residual_out.double().abs()
    multiplied, jump = rounded(xhat, dtype, case.casting)
    vector = scale.shape
    sums, sizes = sum_over_rows(dy * multiplied, vector), sum_over_rows((dy * multiplied).abs(), vector)
    extra = sum_over_rows(dy.abs() * jump, vector) / 2  # how many of the roundings of xhat may differ
    expected = {
        "dx": (case.alpha * d, abs(case.alpha) * magnitude, case.dx, case.shape, 0.0),
        "d_residual": (d, magnitude, case.d_residual, case.shape, 0.0),
        "dw": (sums, sizes, case.dw, vector, extra),
        "db": (sum_over_rows(dy, vector), sum_over_rows(dy.abs(), vector), case.db, vector, 0.0),
    }
    for got, other, (truth, size, wanted, shape, extra) in zip(
        gradients, again, expected.values(), strict=True
    ):
        if wanted is None:
            assert got is None
        else:
            assert_close(got, truth, size, wanted, shape, extra=extra)
            assert torch.equal(got, other)
    if case.dw is not None and case.weight is not None:
        effect = sum_over_rows(dy * (multiplied - xhat), vector)
        assert_rounds(gradients[2].double() - sums, effect, dataclasses.replace(case, y=case.dw))
