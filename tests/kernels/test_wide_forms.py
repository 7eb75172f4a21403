# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""A residual, a bias and several dtypes in the kernels of wide and of unaligned rows: each kernel by small tiles on
narrow rows, then what is chosen for wide ones. In the interpreter, or on a GPU where there is one."""

import itertools

import helpers
import planning
import pytest
import table_cases
import torch
import variants
from helpers import BF16, DEVICE, FP16, FP32, HAS_GPU, assert_alike, in_turn, unchanged, why_skip
from variants import Variant, VariantInputs, arranged

if reason := why_skip("cutile"):
    pytest.skip(reason, allow_module_level=True)

from cutile_runs import ShuffledMachine

from tilegym_rmsnorm.backends.cutile.host import norm
from tilegym_rmsnorm.backends.cutile.host.norm import form_of
from tilegym_rmsnorm.backends.cutile.plans import variants as plans
from tilegym_rmsnorm.backends.cutile.plans.partition import Team
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan, plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import Problem
from tilegym_rmsnorm.backends.cutile.plans.rules import is_fused
from tilegym_rmsnorm.backends.cutile.plans.select import choose
from tilegym_rmsnorm.backends.cutile.runtime import tables
from tilegym_rmsnorm.backends.cutile.runtime.machine import Machine, machine_of

pytestmark = pytest.mark.usefixtures("poisoned_empty")

# Teams and slabs on a GPU have several rows too, and their blocks run in another order each time.
ROWS, RUNS = (1001, 50) if HAS_GPU else (13, 2)

HINTS = {"warps": 4, "occupancy": 1, "latency": 1}
THREE = {**HINTS, "width": 32, "members": 3}
PIECES = {**HINTS, "width": 64, "members": 2, "pieces": 2}
CHUNKS = {**HINTS, "width": 64}
LINES = {**HINTS, "width": 16, "pieces": 4}
SLABS = {**CHUNKS, "rows": 4, "strip": 32, "slab": 8}
FORWARDS = {
    "team": plans.ForwardTeam(**THREE),
    "team of pieces": plans.ForwardTeam(**PIECES),
    "team, joint": plans.ForwardTeam(
        **HINTS, width=128, members=3, pieces=2, weight_load="joint", packed=True
    ),
    "team, packed": plans.ForwardTeam(**THREE, packed=True),
    "reread": plans.ForwardReread(**CHUNKS),
    "reread by TMA": plans.ForwardReread(**CHUNKS, tma=True),
    "unaligned": plans.ForwardUnaligned(**LINES, rows=2, vector=8),
    "unaligned, short vectors": plans.ForwardUnaligned(**LINES, vector=2),
    "unaligned team": plans.ForwardUnalignedTeam(**THREE, vector=4),
}
BACKWARDS = {
    "team": plans.BackwardTeam(**THREE),
    "team of pieces": plans.BackwardTeam(**PIECES),
    "team by TMA": plans.BackwardPipelinedTeam(**THREE),
    "team of pieces by TMA": plans.BackwardPipelinedTeam(**PIECES, rstd_ahead=True),
    "team by TMA, packed": plans.BackwardPipelinedTeam(**THREE | {"warps": 8}, rstd_ahead=True, packed=True),
    "split, reread": plans.BackwardSplitReread(**SLABS),
    "split, reread, ahead": plans.BackwardSplitReread(**SLABS | {"latency": 3}, gathers=True),
    "strips": plans.BackwardStrips(**CHUNKS, rows=4),
    "strips by TMA": plans.BackwardStrips(**CHUNKS, rows=4, tma=True),
    "reread": plans.BackwardReread(**CHUNKS),
    "reread by TMA": plans.BackwardReread(**CHUNKS, tma=True),
    "unaligned": plans.BackwardUnaligned(**LINES, rows=2, vector=8),
    "unaligned, short vectors": plans.BackwardUnaligned(**LINES, vector=2),
    "unaligned team": plans.BackwardUnalignedTeam(**THREE, vector=4),
}

RESIDUAL = {"residual_dtype": BF16, "dtype": BF16, "weight_dtype": BF16}
# xhat is rounded to the dtype of residual_out, so in a float32 stream it is not.
STREAM = {"residual_dtype": FP32, "dtype": BF16, "weight_dtype": BF16, "alpha": 0.5, "casting": "llama"}
# In a backward these have one gradient for x and residual, or two of one dtype or of different ones.
KINDS = {
    "residual": Variant(**RESIDUAL),
    "residual, llama": Variant(**RESIDUAL | {"weight_dtype": FP32}, offset=1.0, casting="llama"),
    "residual times alpha": Variant(**RESIDUAL, alpha=0.5),
    "stream": Variant(**STREAM),
    "stream rounded, out_dtype": Variant(**STREAM, residual_out_dtype=BF16, out_dtype=FP32),
    "float32": Variant(FP32, residual_dtype=FP32, alpha=2.0, offset=0.5),
    "float16 beside bfloat16": Variant(
        FP16, weight_dtype=BF16, residual_dtype=BF16, residual_out_dtype=FP16, casting="llama"
    ),
    "no weight": Variant(BF16, weight="none", residual_dtype=BF16, casting="llama"),
}
OF_FORWARD = KINDS | {
    "bias": Variant(BF16, weight_dtype=BF16, bias_dtype=BF16),
    "bias, llama": Variant(BF16, weight_dtype=FP32, bias_dtype=FP32, offset=1.0, casting="llama"),
    "bias, out_dtype": Variant(BF16, weight_dtype=FP16, bias_dtype=FP32, out_dtype=FP32),
    "bias without a weight": Variant(FP32, weight="none", bias_dtype=BF16),
    "residual and bias": Variant(**RESIDUAL, bias_dtype=FP32, offset=1.0, casting="llama"),
    "stream and bias": Variant(**STREAM, bias_dtype=BF16, out_dtype=FP32),
    "no weight, residual and bias": Variant(BF16, weight="none", bias_dtype=FP32, residual_dtype=BF16),
}
CUTS = ["even", "cut off", "odd"]
LAYOUTS = variants.BACKEND_LAYOUTS[2]
WANTED = {
    "all": {},
    "dx alone": {"dw": None},
    "no d_residual": {"d_residual": None},
    "dx alone, no d_residual": {"dw": None, "d_residual": None},
}


def _width(first: plans.Variant, cut: str) -> int:
    """Columns that fill the tiles, that end within the last one and are a multiple of 8, or are odd."""
    whole = first.lanes if isinstance(first, Team) else 4 * first.width
    return whole - {"even": 0, "cut off": 8, "odd": first.width // 2 + 1}[cut]


def _machine(seed: int = 0) -> Machine:
    return machine_of(DEVICE) if HAS_GPU else ShuffledMachine(seed)


def _normalized(variant: Variant, inputs: VariantInputs) -> torch.Tensor:
    """residual_out, in x's layout, or x."""
    if inputs.residual is None:
        return inputs.x
    total = variant.alpha * inputs.x.float() + inputs.residual.float()
    return arranged(total.to(variant.normalized_dtype), variants.LAYOUTS[variant.layout][0])


def _problem_of_forward(variant: Variant, inputs: VariantInputs, size: str) -> Problem:
    """Make host/norm.py's problem of this size class for any number of rows."""
    written = variant.out_dtype, variant.normalized_dtype if variant.has_residual else None
    has_residual, has_bias = inputs.residual is not None, inputs.bias is not None
    dtype, form = form_of((inputs.x, inputs.residual), written, has_residual, has_bias, False)
    return _problem("forward", variant, dtype, size, form)


def _problem_of_backward(variant, inputs, x, wanted, size) -> Problem:
    has_two, read = wanted.d_residual is not None, (x, inputs.dy, inputs.d_residual_out)
    has_residual = has_two or inputs.d_residual_out is not None or variant.alpha != 1.0
    has_bias, results = wanted.db is not None, (wanted.dx, wanted.d_residual)
    dtype, form = form_of(read, results, has_residual, has_bias, False, has_two)
    return _problem("dx" if wanted.dw is None else "backward", variant, dtype, size, form)


def _problem(op, variant, dtype, size, form) -> Problem:
    weight = None if variant.weight == "none" else variant.weight_dtype
    options = {"facts": _machine().facts, "casting": variant.casting, "form": form}
    return planning.problem(op, variant.n, dtype, size, weight, **options)


def _plan(problem: Problem, first: plans.Variant | None) -> Plan:
    """Plan with this first kernel, or the rules' choice."""
    architecture = problem.device.architecture
    if first is None:
        assert is_fused(problem), problem
        first = choose(problem, planning.rules_of(architecture)).first
    assert first.serves_form(problem), f"{first.kernel} does not take {problem.form}"
    first.check(problem.n, problem.itemsize, architecture)
    return plan_of(problem, first)


def _skip_what_is_not_served(first: plans.Variant, problem: Problem) -> None:
    if first.packed and problem.itemsize != 2:
        pytest.skip("packed rows are of 2-byte elements")
    if first.uses_tma and problem.form.narrowest and not problem.is_aligned:
        pytest.skip("by TMA rows of several dtypes begin at multiples of 16 bytes")


def _check_forward(variant: Variant, first: plans.Variant | None = None, size: str = "large") -> None:
    inputs, spec = variants.make(variant), variants.spec_of(variant)
    problem = _problem_of_forward(variant, inputs, size)
    if first is not None:
        _skip_what_is_not_served(first, problem)
    plan, seeds = _plan(problem, first), itertools.count()

    def run() -> tuple[torch.Tensor, ...]:
        found = norm.Forward(_machine(next(seeds)), plan)(spec, inputs[:4])
        assert (found[2] is None) != variant.has_residual
        return tuple(each for each in found if each is not None)

    with unchanged(inputs):
        y, rstd, *residual_out = run()
        for _ in range(RUNS - 1):
            assert all(map(torch.equal, run(), (y, rstd, *residual_out)))
    assert y.is_contiguous()
    normalized = inputs.x
    if variant.has_residual:
        (normalized,) = residual_out
        assert normalized.is_contiguous()
        variants.check_residual_out(variant, inputs, normalized)
    variants.check(variant, inputs, normalized, y=y, rstd=rstd)
    if variant.casting == "llama" and variant.weight != "none" and normalized.itemsize == 2:
        assert variants.llama_share(variant, inputs, normalized, y) > 0.9


def _check_backward(
    variant: Variant,
    first: plans.Variant | None = None,
    size: str = "large",
    has_d_residual_out: bool = True,
    **wanted,
) -> None:
    """wanted: fields of Wanted that are not those of all gradients but db, which is not wanted unless given."""
    inputs, spec = variants.make(variant), variants.spec_of(variant)
    if not has_d_residual_out:
        inputs = inputs._replace(d_residual_out=None)
    asked = variants.wanted_of(variant)._replace(**{"db": None} | wanted)
    x = _normalized(variant, inputs)
    problem = _problem_of_backward(variant, inputs, x, asked, size)
    if first is not None:
        if problem.op not in first.serves:
            pytest.skip(f"{first.kernel} does not serve {problem.op}")
        _skip_what_is_not_served(first, problem)
    plan, seeds = _plan(problem, first), itertools.count()
    rstd = (x.double().square().mean(-1) + variant.eps).rsqrt().float()
    tensors = x, inputs.dy, inputs.weight, rstd, inputs.d_residual_out
    results = ("dx", asked.dx), ("d_residual", asked.d_residual), ("dw", asked.dw), ("db", asked.db)
    names = tuple(name for name, dtype in results if dtype is not None)

    def run() -> tuple[torch.Tensor, ...]:
        found = norm.Backward(_machine(next(seeds)), plan)(spec, tensors, asked)
        assert [each is not None for each in found] == [dtype is not None for _, dtype in results]
        assert all(each is None or each.is_contiguous() for each in found)
        return tuple(each for each in found if each is not None)

    with unchanged(inputs):
        assert_alike(variants.expected(variant, inputs, x), names, run, RUNS)


ROWS_OF = list(itertools.product(CUTS, LAYOUTS))


def by_each_kernel(kernels, kinds):
    """Combinations of a kernel, a kind, and a width and layout: of a kernel and a kind one, in turn, or two by TMA,
    which does not serve all; or with --every-config all."""
    of_tma = {name: first.uses_tma for name, first in kernels.items()}
    return [
        case
        for is_tma in (False, True)
        for case in in_turn(
            [name for name in kernels if of_tma[name] is is_tma],
            kinds,
            ROWS_OF,
            of=len(ROWS_OF) // (1 + is_tma),
        )
    ]


@pytest.mark.parametrize(("kernel", "kind", "rows"), by_each_kernel(FORWARDS, OF_FORWARD), ids=str)
def test_forwards(kernel, kind, rows):
    first, (cut, layout) = FORWARDS[kernel], rows
    size = (ROWS, _width(first, cut))
    _check_forward(OF_FORWARD[kind]._replace(size=size, layout=layout), first)


@pytest.mark.parametrize(("kernel", "kind", "rows"), by_each_kernel(BACKWARDS, KINDS), ids=str)
def test_backwards(kernel, kind, rows):
    """All gradients; dx alone of kernels that leave no dw."""
    first, (cut, layout) = BACKWARDS[kernel], rows
    wanted = {} if "backward" in first.serves else {"dw": None}
    size = (ROWS, _width(first, cut))
    _check_backward(KINDS[kind]._replace(size=size, layout=layout), first, **wanted)


@pytest.mark.parametrize(
    ("kernel", "kind", "has_d_residual_out", "wanted"),
    in_turn(BACKWARDS, ["residual", "residual times alpha", "stream"], [True, False], WANTED, of=4),
)
def test_some_gradients(kernel, kind, has_d_residual_out, wanted):
    """A residual_out that leads nowhere has no d_residual_out. Without --every-config a quarter, in turn."""
    first = BACKWARDS[kernel]
    op = "dx" if "dw" in WANTED[wanted] else "backward"
    if op not in first.serves:
        pytest.skip(f"{first.kernel} does not serve {op}")
    variant = KINDS[kind]._replace(size=(ROWS, _width(first, "cut off")))
    _check_backward(variant, first, has_d_residual_out=has_d_residual_out, **WANTED[wanted])


@pytest.mark.parametrize("m", [1, 4, 5])
@pytest.mark.parametrize("kind", ["residual", "stream"])
@pytest.mark.parametrize(
    ("op", "kernel"), [("forward", k) for k in FORWARDS] + [("backward", k) for k in BACKWARDS]
)
def test_few_rows(op, kernel, kind, m):
    """A single partial row is dw itself."""
    first = (FORWARDS if op == "forward" else BACKWARDS)[kernel]
    variant = KINDS[kind]._replace(size=(m, _width(first, "odd" if first.reads_packed else "cut off")))
    if op == "forward":
        _check_forward(variant, first)
    else:
        _check_backward(variant, first, **({} if op in first.serves else {"dw": None}))


# Aligned, not a multiple of 16, and not aligned, on both sides of where registers end.
WIDTHS = [8201, 16392, 20480, 33001, 40960]
SIZES = ["few", "large"]
CHOSEN = ["residual", "residual times alpha", "stream rounded, out_dtype", "float32", "no weight"]


@pytest.mark.parametrize(
    ("kind", "n", "size"), in_turn([*CHOSEN, "bias", "residual and bias"], WIDTHS, SIZES, of=2)
)
def test_what_rules_choose_for_forwards(kind, n, size):
    """Each width of a kind has one size class without --every-config."""
    _check_forward(OF_FORWARD[kind]._replace(size=(5, n)), size=size)


@pytest.mark.parametrize("op", ["backward", "dx"])
@pytest.mark.parametrize(("kind", "n", "size"), in_turn(CHOSEN, WIDTHS, SIZES, of=2))
def test_what_rules_choose_for_backwards(kind, n, size, op):
    """Each width of a kind has one size class without --every-config."""
    if op == "backward" and KINDS[kind].weight == "none":
        pytest.skip("without a weight there is no dw")
    _check_backward(KINDS[kind]._replace(size=(5, n)), size=size, **({"dw": None} if op == "dx" else {}))


# Rules that serve one form alone, which others do not fall back on: no other test reaches their tiles.
KIND_OF_FORM = {"residual": "residual", "d_residual": "residual times alpha", "bias": "bias"}
OF_ONE_FORM = [
    pytest.param(op, form, record, n, id=f"{op}-{form}-{n}-{record.kernel}")
    for record in tables.shipped_records(90)
    if not record.lends and not record.gpus
    for op, form in itertools.product(record.ops if helpers.every_config else record.ops[:1], record.forms)
    if form in KIND_OF_FORM
    for n in table_cases.widths_of(record, "large")[-1:]
]


@pytest.mark.parametrize(("op", "form", "record", "n"), OF_ONE_FORM)
def test_rules_of_one_form(op, form, record, n):
    first, variant = record.variant(n), OF_FORWARD[KIND_OF_FORM[form]]._replace(size=(5, n))
    if op == "forward":
        _check_forward(variant, first)
    else:
        _check_backward(variant, first, db=variant.bias_dtype, **({"dw": None} if op == "dx" else {}))


# At 8200 columns by a storage offset, which the plan does not see, and at 8201 by the width.
WIDE_CALLS = [(16392, "contiguous"), (20480, "contiguous"), (8200, "offset"), (8201, "contiguous")]


@pytest.mark.usefixtures("no_composing")
@pytest.mark.parametrize(("n", "layout"), WIDE_CALLS)
@pytest.mark.parametrize("kind", OF_FORWARD)
def test_public_calls_compose_nothing(kind, n, layout):
    """db beyond 8192 columns is a sum of PyTorch's beside the kernel, not around it."""
    variant = OF_FORWARD[kind]._replace(size=(2, n), layout=layout)
    inputs = variants.make(variant)
    variants.check_all(variant, inputs, variants.run(variant, inputs, "cutile"))
