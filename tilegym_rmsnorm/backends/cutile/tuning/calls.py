# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The calls of a bucket's op and form that a search times and checks: what they are given, how a variant runs them as
launch.py does for users, and what they should come to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile.host import norm
from tilegym_rmsnorm.backends.cutile.host.launcher import Launcher
from tilegym_rmsnorm.backends.cutile.plans.plan import plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, Bucket, form_named
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine
from tilegym_rmsnorm.measure import accuracy
from tilegym_rmsnorm.ops.norm.reference import compute_rms_norm_rstd_torch, residual_sum
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

EPS = 1e-6
ALPHA = 0.5  # where a call has one: its products are exact, so that a fused multiply-add rounds alike

Outputs = dict[str, Tensor]


class Inputs(NamedTuple):
    """Inputs of a call: rows (M, N), weight and bias (N,), rstd (M,). A backward's x is what was normalized."""

    x: Tensor
    dy: Tensor
    weight: Tensor
    rstd: Tensor
    residual: Tensor | None = None  # of a backward d_residual_out
    bias: Tensor | None = None
    alpha: float = 1.0


Run = Callable[[Inputs], Outputs]


def weight_dtype_of(bucket: Bucket) -> torch.dtype:
    return torch.float32 if bucket.weight == FLOAT32 else getattr(torch, bucket.dtype)


def rows_moved(bucket: Bucket) -> tuple[int, int]:
    """Count a call's arrays of rows: read, and written."""
    form = form_named(bucket.form)
    added, second = int(form.residual), int(form.d_residual)
    return (1 + added, 1 + added) if bucket.op == "forward" else (2 + added, 1 + second)


def timed_inputs(m: int, bucket: Bucket, sets: int, device: torch.device) -> Iterator[Inputs]:
    """Make sets that share no tensor, as in the benchmark and in layers: or else they come from L2. With an alpha where
    there is d_residual, which without one would be dx itself."""
    form = form_named(bucket.form)
    new = functools.partial(torch.randn, sets, m, bucket.n, dtype=getattr(torch, bucket.dtype), device=device)
    x, dy, residual = new(), new(), new() if form.residual else None
    alpha = ALPHA if form.d_residual else 1.0
    for i in range(sets):
        weight = torch.ones(bucket.n, dtype=weight_dtype_of(bucket), device=device)
        bias = torch.ones_like(weight) if form.bias else None
        rstd = torch.ones(m, device=device)
        yield Inputs(x[i], dy[i], weight, rstd, None if residual is None else residual[i], bias, alpha)


def checked_inputs(m: int, bucket: Bucket, device: torch.device, seed: int) -> Inputs:
    """Make inputs that expose wrong kernels: rows of different scale, an outlier column. Odd seeds have a float32
    weight, whose gradient hides nothing (all have where the bucket's is float32), and in a forward with a residual an
    alpha. A backward with an alpha writes d_residual: all of that form have one, no others."""
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, bucket.dtype)
    n, has = bucket.n, form_named(bucket.form)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    x = normal(m, n) * normal(m, 1).exp()
    x[:, n // 3] *= 8
    x, dy, weight = x.to(dtype), normal(m, n).to(dtype), (normal(n) * 0.5 + 1.5).to(dtype)
    residual = (normal(m, n) * normal(m, 1).exp()).to(dtype) if has.residual else None
    bias = normal(n).to(dtype) if has.bias else None
    if seed % 2 or bucket.weight == FLOAT32:
        weight, bias = weight.float(), None if bias is None else bias.float()
    has_alpha = has.d_residual or (bucket.op == "forward" and has.residual and seed % 2)
    rstd = compute_rms_norm_rstd_torch(x, EPS)
    return Inputs(x, dy, weight, rstd, residual, bias, ALPHA if has_alpha else 1.0)


def runner(machine: Machine, bucket: Bucket, variant: Variant) -> Run:
    """Return a function that runs a bucket's op by a variant, and names the results."""
    plan = plan_of(bucket.problem(machine.facts), variant)
    if bucket.op == "forward":
        return functools.partial(_forward, norm.Forward(machine, plan))
    return functools.partial(_backward, norm.Backward(machine, plan))


def _forward(run: Launcher, inputs: Inputs) -> Outputs:
    x, _, weight, _, residual, bias, alpha = inputs
    residual_dtype = None if residual is None else x.dtype
    spec = Spec(run.plan.problem.n, EPS, 0.0, "once", alpha, x.dtype, residual_dtype)
    y, rstd, residual_out = run(spec, (x, weight, bias, residual))
    return _present(y=y, rstd=rstd, residual_out=residual_out)


def _backward(run: Launcher, inputs: Inputs) -> Outputs:
    x, dy, weight, rstd, d_residual_out, bias, alpha = inputs
    has_dw = run.plan.problem.op == "backward"
    wanted = Wanted(
        x.dtype,
        x.dtype if run.plan.problem.form.d_residual else None,
        weight.dtype if has_dw else None,
        bias.dtype if has_dw and bias is not None else None,
    )
    spec = Spec(run.plan.problem.n, EPS, 0.0, "once", alpha)
    dx, d_residual, dw, db = run(spec, (x, dy, weight, rstd, d_residual_out), wanted)
    return _present(dx=dx, d_residual=d_residual, dw=dw, db=db)


def _present(**results: Tensor | None) -> Outputs:
    return {name: result for name, result in results.items() if result is not None}


def why_wrong(inputs: Inputs, outputs: Outputs) -> str | None:
    """Why results are not what they should be, None if they are: the residual's sum, rounded once, to the bit; all else
    against float64."""
    x, dy, weight, _, residual, bias, alpha = inputs
    outputs = dict(outputs)
    if residual is not None and "y" in outputs:
        x, residual = residual_sum(x, residual, alpha, x.dtype), None
        if not torch.equal(outputs.pop("residual_out"), x):
            return "residual_out has other bits than the sum, rounded once"
    errors, allowed = accuracy.errors_of(
        {"": outputs}, x, dy, weight, EPS, bias=bias, d_residual_out=residual, alpha=alpha
    )
    return accuracy.why_wrong(errors[""], allowed)
