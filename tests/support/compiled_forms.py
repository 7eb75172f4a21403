# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls with a residual, a bias or heads, compiled as the launch code calls what the selector picks."""

from compiling import CompilingMachine, meta
from helpers import FP32

from tilegym_rmsnorm.backends.cutile.host.norm import NAMES, Backward, Forward
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    BIAS,
    D_RESIDUAL,
    PLAIN_ROWS,
    RESIDUAL,
    Form,
    Policy,
    Problem,
)
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

FORM = {
    PLAIN_ROWS: Form(),
    RESIDUAL: Form(residual=True),
    D_RESIDUAL: Form(residual=True, d_residual=True),
    BIAS: Form(bias=True),
}
# By each way that rules take in rows that are not aligned, up to the widest of a block.
UNALIGNED = (66, 100, 117, 211, 301, 439, 701, 901, 1001, 1165, 1401, 1900, 2387, 3001, 7097, 8191, 9747)
# Wide rows: aligned, of all remainders of 8 elements, and odd.
WIDE = (8201, 16385, 16388, 16392, 16400, 20480, 24576, 28672, 30001, 53248, 65536, 131072, 140000)


def problem_of(machine, op, n, dtype, form, x_dtype=None, size="large"):
    """machine: what has facts. x_dtype: of x, where it is narrower than dtype, the residual's."""
    if x_dtype not in (None, dtype):
        form = form._replace(narrowest=x_dtype.itemsize)
    weight = NAMES[x_dtype or dtype]
    return Problem(op, n, NAMES[dtype], weight, size, machine.facts, policy=Policy(), form=form)


def compile_call(problem, dtype, x_dtype=None, m=4096, lead=None, keep=None):
    """The launches of a call of a problem on its device, by what the selector picks. keep: as CompilingMachine's."""
    machine = CompilingMachine(problem.device.architecture, keep=keep)
    plan = select(problem, tables_of(problem.device.architecture, problem.device.target, None))
    machine.spills = plan.spills
    n, form, x_dtype = problem.n, problem.form, x_dtype or dtype
    shape = (*lead, n) if lead else (m, n)
    m = meta(*shape, dtype=dtype).numel() // n
    rows, x = meta(*shape, dtype=dtype), meta(*shape, dtype=x_dtype)
    if lead:
        b, t, h = lead
        x = meta(b, t, 3, h, n, dtype=x_dtype)[:, :, 0]
    weight = meta(*((lead[2], n) if form.per_head else (n,)), dtype=x_dtype)
    alpha, out_dtype = 0.5 if form.d_residual else 1.0, dtype if form.residual else None
    spec = Spec(n, 1e-6, 0.0, "once", alpha, x_dtype, out_dtype)
    if problem.op == "forward":
        bias, residual = weight if form.bias else None, rows if form.residual else None
        Forward(machine, plan)(spec, (x, weight, bias, residual))
    else:
        dy = meta(b, h, t, n, dtype=x_dtype).transpose(1, 2) if lead else meta(*shape, dtype=x_dtype)
        of_dw = x_dtype if problem.op == "backward" else None
        wanted = Wanted(x_dtype, dtype if form.d_residual else None, of_dw, of_dw if form.bias else None)
        saved, added = (rows, rows) if form.residual else (x, None)
        rstd = meta(m, dtype=FP32)
        Backward(machine, plan)(spec, (saved, dy, weight, rstd, added), wanted)
    return machine
