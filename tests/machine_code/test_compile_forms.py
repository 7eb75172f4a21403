# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Selections for calls with a residual, a bias or heads, compiled as the launch code calls them: no registers spill,
and no warp waits for some.

Rare mixes of options take the most registers. By the rules of usual calls each mix of a norm spilled on Hopper and on
sm_100, and each step on all three architectures: without --every-config it is compiled for one of those, in turn."""

import itertools
import types

import helpers
import pytest
import rope_cases
import torch
import variants
from compiled_forms import FORM, UNALIGNED, WIDE, compile_call, problem_of
from compiling import CompilingMachine, assert_sound, sampled, skip_without_compiler
from helpers import BF16, FP16, FP32, in_turn
from option_cases import NormCase, run_norm
from planning import H100, H200, device
from rope_cases import RopeCase
from variants import Variant

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.host import rope
from tilegym_rmsnorm.backends.cutile.host.launcher import bind
from tilegym_rmsnorm.backends.cutile.plans.problem import (
    BIAS,
    D_RESIDUAL,
    FORMS,
    PLAIN_ROWS,
    RESIDUAL,
    SAME,
    Form,
)
from tilegym_rmsnorm.backends.cutile.plans.rules import is_fused
from tilegym_rmsnorm.backends.cutile.plans.select import choose
from tilegym_rmsnorm.backends.cutile.plans.sizes import rows_of_class
from tilegym_rmsnorm.backends.cutile.runtime.tables import shipped_records, tables_of

skip_without_compiler()

DTYPES = {"bfloat16": BF16, "float16": FP16, "float32": FP32}
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


def served_by(record):
    """The calls of a record of a form on sm_90 that it serves: of its widest aligned row and one where the last tile is
    cut off, by each GPU that it is for."""
    widths = dict.fromkeys((record.last // 16 * 16, (record.first + record.last) // 32 * 16))
    kinds = itertools.product(set(record.forms) - {PLAIN_ROWS}, record.ops, record.dtypes, record.sizes)
    for (form, op, name, size), n, gpu in itertools.product(kinds, widths, record.gpus or (None,)):
        machine, dtype = types.SimpleNamespace(facts=device(target=TARGETS[gpu])), DTYPES[name]
        problem = problem_of(machine, op, n, dtype, FORM[form], dtype, size)
        chosen = choose(problem, tables_of(90, TARGETS[gpu], None)).first
        if rows_of_class(size, n) and chosen == record.variant(n):
            yield chosen, problem, dtype


def test_records_of_forms_compile_on_hopper():
    """A float32 residual beside x of 16 bits, and beside float32. A sample; all by --every-config."""
    records = [each for each in shipped_records(90) if {*each.forms} != {PLAIN_ROWS} and SAME in each.weights]
    found = [[*served_by(record)] for record in records]
    assert all(found), "a record does not serve what it is for"
    for _, problem, dtype in sampled(itertools.chain(*found), step=1 if helpers.every_config else 2):
        assert_sound(compile_call(problem, dtype, dtype))
        if dtype is FP32:
            narrow = problem._replace(form=problem.form._replace(narrowest=2), weight="bfloat16")
            assert_sound(compile_call(narrow, dtype, BF16))


def wide_forms(architecture, target=None):
    """Yield choices for wide rows with a residual or a bias, of each op: 18 cases a width."""
    machine = types.SimpleNamespace(facts=device(architecture, target=target))
    dtypes = ((BF16, BF16), (FP32, FP32), (FP32, BF16))  # of the residual, and of x
    for n, form, (dtype, x_dtype) in itertools.product(WIDE, (RESIDUAL, D_RESIDUAL, BIAS), dtypes):
        for op in ("forward",) if form == BIAS else ("forward", "backward", "dx"):
            if (op, form) != ("forward", D_RESIDUAL):
                problem = problem_of(machine, op, n, dtype, FORM[form], x_dtype)
                yield choose(problem, tables_of(architecture, target, None)), problem, dtype, x_dtype


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_wide_rows_with_a_residual_or_a_bias_compile(architecture):
    """On Hopper every 23rd, and one of each kernel that is not among those; elsewhere a half of a sample, in turn: all
    by --every-config, and sm_86 with it alone. dx by chunks takes 8 bytes of stack beside x of 16 bits."""
    helpers.skip_without_every_config(architecture == 86)
    cases = list(wide_forms(architecture, H200 if architecture == 90 else None))
    some = sampled(cases)
    if not helpers.every_config and architecture == 90:
        kernels = {choice.first.kernel for choice, *_ in cases[::23]}
        some = cases[::23] + [case for case in some if case[0].first.kernel not in kernels]
    elif not helpers.every_config:
        some = some[ARCHITECTURES.index(architecture) // 2 % 2 :: 2]
    for _, problem, dtype, x_dtype in some:
        assert_sound(compile_call(problem, dtype, x_dtype), most_stack=8)


def forms_of_calls():
    """Pairs of an op and a form that it may have."""
    forms = [Form(*each) for each in itertools.product((False, True), (False, True))]
    forms += [form._replace(d_residual=True) for form in forms if form.residual]
    pairs = itertools.product(("forward", "backward", "dx"), forms)
    return [
        (op, form)
        for op, form in pairs
        if not (form.d_residual and op == "forward" or form.bias and op == "dx")
    ]


@pytest.mark.parametrize("n", UNALIGNED)
def test_unaligned_rows_compile_in_every_form(n):
    """Some narrow rows take 8 bytes of stack on Hopper. Without --every-config each width in one form, each form at one
    width or two, and one of the dtypes, in turn."""
    machine, turn, calls = (
        types.SimpleNamespace(facts=device(target=H200)),
        UNALIGNED.index(n),
        forms_of_calls(),
    )
    for op, form in calls if helpers.every_config else [calls[5 * turn % len(calls)]]:
        cases = []
        for dtype, x_dtype in ((BF16, BF16), (FP32, FP32), (FP32, BF16)):
            problem = problem_of(machine, op, n, dtype, form, x_dtype)
            if is_fused(problem) and (form.residual or dtype is x_dtype):
                cases.append((problem, dtype, x_dtype))
        some = cases if helpers.every_config else cases[turn % max(1, len(cases)) :][:1]
        for case in some:
            assert_sound(compile_call(*case), most_stack=8)


def test_every_form_has_a_rule():
    """So that what the tests above sweep is all of them."""
    found = {form for record in shipped_records(90) if not record.gpus for form in record.forms} - {
        PLAIN_ROWS
    }
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
    helpers.skip_without_every_config(architecture == 86)
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


MIXED_ON = (80, 90, 100)

HALVES = {"residual_dtype": FP16, "residual_out_dtype": FP16, "alpha": 0.5, "casting": "llama"}
NORMS = {
    "heads of 100": Variant(FP16, (2, 9, 4, 100), weight_dtype=FP16, bias_dtype=FP16, **HALVES),
    "weights of heads": Variant(FP16, (2, 9, 4, 128), "heads", FP16, **HALVES),
    "weights and biases of heads": Variant(
        FP16, (2, 9, 4, 64), "heads", FP16, FP16, layout="offset", **HALVES
    ),
    "wide weights and biases of heads": Variant(FP16, (2, 9, 4, 1024), "heads", FP32, FP16, **HALVES),
    "begun anywhere": Variant(FP16, (2, 9, 4, 1024), weight_dtype=FP16, layout="offset", **HALVES),
}
STEP = RopeCase(FP16, length=1, heads=(4, 2), n=64, rotary_dim=64, weight_dtype=FP16)
STEPS = {
    "of two heads": STEP,
    "weight of k alone": STEP._replace(
        weight=("none", "heads"),
        k_weight_dtype=BF16,
        positions="each",
        position_dtype=torch.int32,
        rounding="norm",
        dy_layout="offset",
    ),
    "interleaved": STEP._replace(
        interleaved=True, weight=("heads", "vector"), positions="one", casting="llama", wanted=(True, False)
    ),
    "a half, interleaved": STEP._replace(n=96, interleaved=True, weight=("heads", "heads")),
}


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(
    ("mix", "architecture"), in_turn(NORMS, MIXED_ON if helpers.every_config else (90, 100), of=2)
)
def test_heads_beside_a_residual_spill_nothing(mix, architecture, monkeypatch):
    machine, variant = CompilingMachine(architecture), NORMS[mix]
    monkeypatch.setattr(launch, "machine_of", lambda device: machine)
    inputs = variants.make(variant, device="meta")
    case = NormCase(variant, FP16, has_d_residual_out=True, needs=(True, True, True, True))
    run_norm(case, inputs, launch.rms_norm_forward, launch.rms_norm_backward)
    assert {"forward_tiles", "backward_tiles"} <= {each.name for each in machine.results}
    assert_sound(machine)


@pytest.mark.parametrize(("mix", "architecture"), in_turn(STEPS, MIXED_ON, of=3))
def test_one_step_of_few_heads_spills_nothing(mix, architecture):
    machine, call = CompilingMachine(architecture), rope_cases.make(STEPS[mix], "meta")
    bind(rope.FORWARD, machine, call.spec, call.tensors)(call.tensors)
    bind(rope.BACKWARD, machine, call.spec, call.backward_tensors, call.wanted)(call.backward_tensors)
    assert {"forward_rope", "backward_rope"} <= {each.name for each in machine.results}
    assert_sound(machine)
