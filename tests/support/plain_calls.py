# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Run a launcher of the cutile backend on rows of one dtype and a weight, without a residual, a bias or heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

if TYPE_CHECKING:  # tests of other backends run where cuda-tile is missing
    from tilegym_rmsnorm.backends.cutile.host.launcher import Launcher


def forward(
    run: Launcher, x: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return y and rstd."""
    problem = run.plan.problem
    spec = Spec(problem.n, eps, offset, problem.casting)
    y, rstd, _ = run(spec, (x, weight, None, None))
    return y, rstd


def backward(
    run: Launcher, x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
) -> tuple[Tensor, Tensor | None]:
    """Return dx and dw: None where the plan is of dx alone."""
    problem = run.plan.problem
    spec = Spec(problem.n, 0.0, offset, problem.casting)
    has_dw = problem.op == "backward" and weight is not None
    dx, _, dw, _ = run(
        spec, (x, dy, weight, rstd, None), Wanted(x.dtype, dw=weight.dtype if has_dw else None)
    )
    return dx, dw
