# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rows near the ends of float32, without eps or with one that float32 hardly holds. The kernels, interpreted or on a
GPU, are held to float64 wherever float32 can hold what the formula names, and are finite wherever F.rms_norm is; the
cutile backwards in the range that kernels/backward.py names."""

from typing import NamedTuple

import plain_calls
import pytest
import torch
import torch.nn.functional as F
from helpers import BF16, DEVICE, FP32, FP64, why_skip
from narrow_variants import BACKWARDS, FORWARDS
from planning import plan
from test_triton import BACKWARDS as TRITON_BACKWARDS
from test_triton import FORWARDS as TRITON_FORWARDS
from torch import Tensor

from tilegym_rmsnorm import rms_norm_backward, rms_norm_forward
from tilegym_rmsnorm.backends.cutile.plans import variants
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

N = 96
EPS = (0.0, 1e-45, 1e-38, 1e-30, None)
X_SCALES = (0.0, 1e-30, 1e-20, 1e-19, 1.0, 1e10, 1e18)
DY_SCALES = (1.0, 1e-10, 1e-26)
# GRID: what subnormal numbers are multiples of.
LARGEST, STEP, GRID = torch.finfo(FP32).max, 2.0**-24, 2.0**-149
# Of numpy, as Triton's interpreter calls it.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
PAST_THE_RANGE = pytest.mark.xfail(strict=True, reason="past the range that kernels/backward.py names")
BY_KERNELS = pytest.mark.parametrize("backend", ["torch", "triton", "cutile"], indirect=True)


class Rows(NamedTuple):
    """One call, and for each result its float64 value and how far from it float32 may be. x, dy (M, N)."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    eps: float
    rstd: Tensor
    truth: dict[str, Tensor]
    tolerance: dict[str, Tensor]

    @property
    def are_held(self) -> Tensor:
        """(M,): the rows whose sum of squares, mean + eps and dx float32 can hold."""
        mean = self.x.double().square().mean(dim=1)
        largest = self.truth["dx"].abs().amax(dim=1)
        return (mean * N < LARGEST) & (mean + self.eps >= GRID) & (largest < LARGEST)


def make_rows(x_scales, dy_scale: float, eps: float | None, dtype: torch.dtype = FP32) -> Rows:
    """A row for each scale of x, whose elements are 0.5 to 2 times that. Most dy have the sign of x * weight, so that
    the mean of xhat * dy * weight is about 1 times dy's scale. eps=None is F.rms_norm's default."""
    generator = torch.Generator().manual_seed(0)

    def spread(rows: int, positive: float = 0.5) -> Tensor:
        sizes, signs = torch.rand(2, rows, N, generator=generator, dtype=FP64).unbind()
        return (0.5 + 1.5 * sizes).where(signs < positive, -0.5 - 1.5 * sizes)

    scales = torch.tensor(x_scales, dtype=FP64)[:, None]
    x, weight = spread(len(scales)), spread(1)[0]
    dy = spread(len(scales), 0.9) * (x * weight).sign() * dy_scale
    return rows_of(*(t.to(DEVICE, dtype) for t in (x * scales, dy, weight)), eps)


def rows_of(x: Tensor, dy: Tensor, weight: Tensor, eps: float | None) -> Rows:
    """The formula in float64. Squares and their mean may be subnormal: each is then off by up to GRID, or is 0."""
    eps = torch.finfo(FP32).eps if eps is None else torch.tensor(eps, dtype=FP32).item()
    x64, dy64, weight64 = x.double(), dy.double(), weight.double()
    mean = x64.square().mean(dim=1, keepdim=True)
    rstd = (mean + eps).rsqrt()
    xhat, g = x64 * rstd, dy64 * weight64
    truth = {
        "y": xhat * weight64,
        "dx": (g - xhat * (xhat * g).mean(dim=1, keepdim=True)) * rstd,
        "dw": (dy64 * xhat).sum(dim=0),
    }
    error = 8 * STEP + mean.clamp(max=GRID) / (mean + eps)  # of rstd, relative
    dx_scale = (g.abs() + xhat.abs() * (xhat * g).abs().mean(dim=1, keepdim=True)) * rstd
    tolerance = {
        "y": 2 * error * truth["y"].abs(),
        "dx": 4 * error * dx_scale + GRID * xhat.abs() * rstd,
        "dw": (2 * error * (dy64 * xhat).abs()).sum(dim=0) + len(x) * GRID,
    }
    info = torch.finfo(x.dtype)
    for name, value in truth.items():
        tolerance[name] = tolerance[name] + info.eps * value.abs() + info.smallest_normal * info.eps
    return Rows(x, dy, weight, eps, rstd[:, 0].to(FP32), truth, tolerance)


def held(rows: Rows) -> Rows:
    """Keep rows that `are_held`, with a dw of their own: beside the others it would be NaN."""
    kept = rows.are_held
    return rows_of(rows.x[kept], rows.dy[kept], rows.weight, rows.eps)


def in_range_of_cutile(rows: Rows) -> Rows:
    """Keep rows that cutile's backwards promise: kernels/backward.py names the two ends."""
    gradient = (rows.dy.double() * rows.weight).abs()
    rstd = rows.rstd.double()[:, None]
    terms = torch.stack([rows.dy.double().abs() * rstd, gradient * rstd, gradient * rstd**2])
    kept = (terms.amin(dim=(0, 2)) > 1.2e-38) & (terms.amax(dim=(0, 2)) < LARGEST)
    return rows_of(rows.x[kept], rows.dy[kept], rows.weight, rows.eps)


def check(rows: Rows, **results: Tensor) -> None:
    for name, got in results.items():
        error = (got.double() - rows.truth[name]).abs()
        wrong = ~(error <= rows.tolerance[name])
        places = wrong.nonzero().tolist()
        assert not places, f"{name}: {got[wrong][:4]}, expected {rows.truth[name][wrong][:4]} at {places[:4]}"


def by_pytorch(rows: Rows) -> tuple[Tensor, Tensor]:
    """y and dx of F.rms_norm."""
    x = rows.x.detach().requires_grad_()
    y = F.rms_norm(x, (N,), rows.weight, rows.eps)
    return y.detach(), torch.autograd.grad(y, x, rows.dy)[0]


@BY_KERNELS
@pytest.mark.parametrize("eps", EPS)
def test_forward(backend, eps):
    rows = make_rows(X_SCALES, 1.0, eps)
    y, _ = rms_norm_forward(rows.x, rows.weight, eps, backend=backend)
    assert (y.isfinite() | ~by_pytorch(rows)[0].isfinite()).all()
    rows = held(rows)
    assert len(rows.x) >= 5
    y, rstd = rms_norm_forward(rows.x, rows.weight, eps, backend=backend)
    check(rows, y=y)
    assert rstd.isfinite().all()


@BY_KERNELS
@pytest.mark.parametrize("dy_scale", DY_SCALES)
@pytest.mark.parametrize("eps", EPS)
def test_backward(backend, eps, dy_scale):
    rows = make_rows(X_SCALES, dy_scale, eps)
    if backend == "cutile":
        rows = in_range_of_cutile(rows)
    dx, _ = rms_norm_backward(rows.x, rows.dy, rows.weight, rows.rstd, backend=backend)
    assert (dx.isfinite() | ~by_pytorch(rows)[1].isfinite()).all()
    rows = held(rows)
    assert len(rows.x) >= (2 if backend == "cutile" else 5)
    dx, dw = rms_norm_backward(rows.x, rows.dy, rows.weight, rows.rstd, backend=backend)
    check(rows, dx=dx, dw=dw)


@BY_KERNELS
def test_rows_whose_squares_overflow_become_zero(backend):
    """F.rms_norm does so too: 1 / sqrt(inf) is 0. The row beside them is what it is alone."""
    rows = make_rows((1e20, 1.0, 1e30), 1.0, None)
    y, rstd = rms_norm_forward(rows.x, rows.weight, backend=backend)
    dx, dw = rms_norm_backward(rows.x, rows.dy, rows.weight, rstd, backend=backend)
    for result in (y, dx):
        assert torch.equal(result[::2], torch.zeros_like(result[::2]))
    assert torch.equal(by_pytorch(rows)[0][::2], y[::2])
    rows = held(rows)
    check(rows, y=y[1:2], dx=dx[1:2], dw=dw)


needs = {
    name: pytest.mark.skipif(why_skip(name) is not None, reason=str(why_skip(name)))
    for name in ("triton", "cutile")
}
PACKED = {"width": 32, "warps": 8, "occupancy": 1, "latency": 1, "packed": True}
CUTILE_BACKWARDS = BACKWARDS | {
    "packed rows": variants.BackwardRows(width=128, warps=4, occupancy=1, latency=1, packed=True),
    "packed rows by TMA": variants.BackwardPipelined(**PACKED, pieces=3),
    "packed teams": variants.BackwardPipelinedTeam(**PACKED, members=3, rstd_ahead=True),
}
# x and dy: near both ends of what the cutile backwards hold, and past them
TINY, HUGE = ((1e-18, 1e-16, 1e-12), 1.0), ((1.0, 1e8, 1e10), 1e-16)
PAST = [((3e-20, 1e-19), 4.0), ((1e10, 1e15, 1e18), 1e-26)]


@needs["triton"]
@pytest.mark.parametrize("name", TRITON_FORWARDS)
@pytest.mark.parametrize("eps", [0.0, 1e-38])
def test_forward_by_each_kernel_of_triton(name, eps):
    from tilegym_rmsnorm.backends.triton import host_norm

    rows = held(make_rows(X_SCALES, 1.0, eps))
    spec, tensors = Spec(rows.x.shape[1], eps, 0.0, "once"), (rows.x, rows.weight, None, None)
    y, rstd, _ = host_norm.launch_forward(TRITON_FORWARDS[name], spec, tensors)
    check(rows, y=y)
    assert rstd.isfinite().all()


@needs["triton"]
@pytest.mark.parametrize("name", TRITON_BACKWARDS)
@pytest.mark.parametrize(("x_scales", "dy_scale"), [TINY, HUGE, *PAST])
def test_backward_by_each_kernel_of_triton(name, x_scales, dy_scale):
    from tilegym_rmsnorm.backends.triton import host_norm

    rows = held(make_rows(x_scales, dy_scale, 0.0))
    spec, tensors = Spec(rows.x.shape[1], 0.0, 0.0, "once"), (rows.x, rows.dy, rows.weight, rows.rstd, None)
    wanted = Wanted(rows.x.dtype, dw=rows.weight.dtype)
    dx, _, dw, _ = host_norm.launch_backward(TRITON_BACKWARDS[name], spec, tensors, wanted)
    check(rows, dx=dx, dw=dw)


@needs["cutile"]
@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("eps", [0.0, 1e-38])
def test_forward_by_each_kernel_of_cutile(name, eps):
    from tilegym_rmsnorm.backends.cutile.host.norm import Forward
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    rows, machine = held(make_rows(X_SCALES, 1.0, eps)), machine_of(DEVICE)
    run = Forward(machine, plan(FORWARDS[name], "forward", N, FP32, facts=machine.facts))
    y, rstd = plain_calls.forward(run, rows.x, rows.weight, eps, 0.0)
    check(rows, y=y)
    assert rstd.isfinite().all()


@needs["cutile"]
@pytest.mark.parametrize("name", CUTILE_BACKWARDS)
@pytest.mark.parametrize(
    ("x_scales", "dy_scale"), [TINY, HUGE, *(pytest.param(*each, marks=PAST_THE_RANGE) for each in PAST)]
)
def test_backward_by_each_kernel_of_cutile(name, x_scales, dy_scale):
    """Packed kernels are for 16 bits; bfloat16 has float32's range."""
    from tilegym_rmsnorm.backends.cutile.host.norm import Backward
    from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of

    variant, machine = CUTILE_BACKWARDS[name], machine_of(DEVICE)
    op, dtype = "dx" if name == "dx, reread" else "backward", BF16 if "packed" in name else FP32
    rows = held(make_rows(x_scales, dy_scale, 0.0, dtype))
    run = Backward(machine, plan(variant, op, N, dtype, facts=machine.facts))
    dx, dw = plain_calls.backward(run, rows.x, rows.dy, rows.weight, rows.rstd, 0.0)
    check(rows, dx=dx, **({"dw": dw} if op == "backward" else {}))
