# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the selector picks for calls with a residual, a bias or heads, compiled as the launch code calls it: no
registers spill, and no warp waits for some."""

import itertools
import types

import helpers
import pytest
from helpers import BF16, FP16, FP32
from planning import H100, H200, device

from tilegym_rmsnorm.backends.cutile.plans.problem import (
    BIAS,
    D_RESIDUAL,
    FORMS,
    PLAIN_ROWS,
    RESIDUAL,
    Form,
    Policy,
    Problem,
)
from tilegym_rmsnorm.backends.cutile.plans.select import choose, select
from tilegym_rmsnorm.backends.cutile.plans.tables import shipped_records, tables_of
from tilegym_rmsnorm.call.spec import Spec, Wanted

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from compiling import CompilingMachine, assert_sound, meta, sampled, skip_without_compiler  # noqa: E402

from tilegym_rmsnorm.backends.cutile.launch import NAMES, Backward, Forward  # noqa: E402

skip_without_compiler()

DTYPES = {"bfloat16": BF16, "float16": FP16, "float32": FP32}
FORM = {
    PLAIN_ROWS: Form(),
    RESIDUAL: Form(residual=True),
    D_RESIDUAL: Form(residual=True, d_residual=True),
    BIAS: Form(bias=True),
}
TARGETS = {None: None, H100.gpu: H100, H200.gpu: H200}
ARCHITECTURES = (80, 86, 90, 100, 120)
# H, or SEQUENCE_OF_TILE where one weight serves all, and D
HEADS = (
    (32, 64),
    (28, 80),
    (8, 96),
    (32, 128),
    (28, 160),
    (40, 192),
    (8, 256),
    (32, 512),
    (64, 64),
    (64, 128),
)


def problem_of(machine, op, n, dtype, form, x_dtype=None, size="large"):
    """machine: what has facts. x_dtype: of x, where it is narrower than dtype, the residual's."""
    if x_dtype not in (None, dtype):
        form = form._replace(narrowest=x_dtype.itemsize)
    weight = NAMES[x_dtype or dtype]
    return Problem(op, n, NAMES[dtype], weight, size, machine.facts, policy=Policy(), form=form)


def compile_call(problem, dtype, x_dtype=None, m=4096, lead=None):
    """The launches of a call of a problem on its device, by what the selector picks."""
    machine = CompilingMachine(problem.device.architecture)
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


def records_of_forms():
    """Every rule and entry of a form on sm_90 with each dtype and op of it, of its widest aligned row and one where the
    last tile is cut off, the variant that it stands for, and the GPU that an entry is of."""
    for record in shipped_records(90):
        for form in set(record.forms) - {PLAIN_ROWS}:
            for op in record.ops:
                for n in dict.fromkeys((record.last // 16 * 16, (record.first + record.last) // 32 * 16)):
                    for name, gpu in itertools.product(record.dtypes, record.gpus or (None,)):
                        if variant := record.variant(n):
                            yield variant, op, n, form, DTYPES[name], record.sizes[-1], TARGETS[gpu]


def test_records_of_forms_compile_on_hopper():
    """A float32 residual beside x of 16 bits, and beside float32. A sample; all by --every-config."""
    for variant, op, n, form, dtype, size, target in sampled(records_of_forms()):
        machine = types.SimpleNamespace(facts=device(target=target))
        for x_dtype in {dtype, BF16 if dtype is FP32 else dtype}:
            problem = problem_of(machine, op, n, dtype, FORM[form], x_dtype, size)
            chosen = choose(problem, tables_of(90, target, None))
            assert chosen.first == variant, "the record does not serve what it is for"
            assert_sound(compile_call(problem, dtype, x_dtype))


WIDE = (16400, 16392, 16385, 20480, 24576, 28672, 30001, 32768, 53248, 65536, 131072, 140000)


def wide_forms(architecture, target=None):
    """What the selector picks for wide rows with a residual or a bias, of each op."""
    machine = types.SimpleNamespace(facts=device(architecture, target=target))
    for n, form, dtype in itertools.product(WIDE, (RESIDUAL, D_RESIDUAL, BIAS), (BF16, FP32)):
        for op in ("forward",) if form == BIAS else ("forward", "backward", "dx"):
            if (op, form) != ("forward", D_RESIDUAL):
                problem = problem_of(machine, op, n, dtype, FORM[form])
                yield choose(problem, tables_of(architecture, target, None)), problem, dtype


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_wide_rows_with_a_residual_or_a_bias_compile(architecture):
    """On Hopper every eighth, elsewhere a sample; all by --every-config, and sm_86 with it alone."""
    if architecture == 86 and not helpers.every_config:
        pytest.skip("compiled with --every-config")
    cases = list(wide_forms(architecture, H200 if architecture == 90 else None))
    for choice, problem, dtype in (
        cases[::8] if architecture == 90 and not helpers.every_config else sampled(cases)
    ):
        assert_sound(compile_call(problem, dtype))
        assert not choice.spills or architecture == 90


def test_every_form_has_a_rule():
    """So that what the tests above sweep is all of them."""
    found = {form for _, _, _, form, *_, target in records_of_forms() if target is None}
    assert found == set(FORMS) - {PLAIN_ROWS} == set(FORM) - {PLAIN_ROWS}


def heads_of_architectures():
    forms = (Form(), Form(residual=True), Form(bias=True), Form(per_head=True, bias=True))
    for architecture in ARCHITECTURES:
        machine = CompilingMachine(architecture)
        for heads, n in HEADS:
            for form in forms:
                for dtype in (BF16, FP32):
                    for op in ("forward", "backward"):
                        problem = problem_of(machine, op, n, dtype, form._replace(heads=heads))
                        yield choose(problem, tables_of(architecture, None, None)), problem, dtype


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_reasoned_for_heads_compiles(architecture):
    """A sample, of one dtype but for Hopper; all by --every-config, and sm_86, which has the rules of sm_80, with it
    alone."""
    if architecture == 86 and not helpers.every_config:
        pytest.skip("compiled with --every-config")
    dtypes = (
        (BF16, FP32)
        if architecture == 90 or helpers.every_config
        else (FP32 if architecture == 100 else BF16,)
    )
    of_this = (
        each
        for each in heads_of_architectures()
        if each[1].device.architecture == architecture and each[2] in dtypes
    )
    for _, problem, dtype in sampled(of_this):
        assert_sound(compile_call(problem, dtype, lead=(2, 64, problem.form.heads)))
