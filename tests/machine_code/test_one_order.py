# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Calls of cuTile under `reproducible("batch")`, in the machine code of sm_90: the kernels of any M add each row in one
order, wherever in a block's walk it comes and whatever cuda-tile compiles in of M, and no registers spill."""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest
import torch
import variants
from compiling import CompilingMachine, code_of_call, disassembled, skip_without_disassembler
from helpers import BF16, FP16, FP32
from option_cases import NormCase
from orders import Sum, differing, sums_of_rows
from pipelines import overwritten
from processes import run_script

from tilegym_rmsnorm.backends.cutile import launch
from tilegym_rmsnorm.backends.cutile.host import norm
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.problem import Problem
from tilegym_rmsnorm.backends.cutile.plans.rules import adds_heads_as_rows
from tilegym_rmsnorm.backends.cutile.plans.sizes import rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variants import BackwardRows
from tilegym_rmsnorm.ops.norm.spec import wanted_of
from tilegym_rmsnorm.reproducibility import BATCH

skip_without_disassembler()

HEADS = 6
LITTLE = 8  # bytes of stack a thread
WITHOUT_ROWS = {"sum_partials", "clear_board", "backward_strips"}
LOOPS_BY_TMA = {"backward_pipelined", "backward_pipelined_team", "backward_tiles"}
IN_CHUNKS = {"forward_reread", "backward_reread", "backward_means"}
# At the ends of what a kernel serves and between, and rows that end between 16 bytes, or where no tile does.
WIDTHS = (
    *(3, 7, 16, 64, 72, 100, 128, 211, 256, 300, 384, 512, 516, 693, 768, 1000, 1024, 1165, 1536, 1900, 2048),
    *(2051, 2180, 2560, 2880, 3001, 3072, 4096, 4104, 5000, 5120, 6144, 7168, 8192, 8200, 9216, 10240, 12288),
    *(13790, 14336, 16384, 16388, 18432, 20480, 24576, 28672, 32768, 40000, 53248, 65536, 98304, 131072),
    140000,
)
NO_WEIGHT = {"weight": "none", "weight_dtype": FP32}
# A backward without a weight leaves no rows of dw. Beside a frozen one dx has the order that it has beside a trained
# one.
FORMS = {
    "plain": {},
    "bias": {"bias_dtype": True},
    "residual": {"residual_dtype": True},
    "d_residual": {"residual_dtype": True, "alpha": 0.5},
    "both": {"bias_dtype": True, "residual_dtype": True},
    "float32 residual": {"residual_dtype": FP32},
    "float32 d_residual": {"residual_dtype": FP32, "alpha": 0.5},
    "float32 weight": {"weight_dtype": FP32},
    "llama": {"casting": "llama"},
    "no weight": NO_WEIGHT,
    "weights of heads": {"weight": "heads"},
    "no weight, residual": NO_WEIGHT | {"residual_dtype": True},
    "no weight, d_residual": NO_WEIGHT | {"residual_dtype": True, "alpha": 0.5},
    "no weight, float32 residual": NO_WEIGHT | {"residual_dtype": FP32},
}


def case_of(form: str, n: int, dtype) -> NormCase:
    """A call without its M, which `orders_of` gives it."""
    fields = {name: dtype if value is True else value for name, value in FORMS[form].items()}
    variant = variants.Variant(**({"dtype": dtype, "size": (n,), "weight_dtype": dtype} | fields))
    has_dw = variant.weight != "none"
    needs = True, form.endswith("d_residual"), has_dw, has_dw and variant.bias_dtype is not None
    return NormCase(variant, dtype, variant.has_residual, needs)


def rows_of(case: NormCase) -> list[int]:
    """M, or T of heads: one, 16 divides it or not; and the partial rows of dw are one, which is dw itself, or 16
    divides them; of calls of each size class."""
    many = rows_of_class("large", case.variant.n).start // 16 * 16 + 16
    return [1, 1000, 1040, many, *((2, 3, 16, 1024, many + 1) if helpers.every_config else ())]


def run_calls(case: NormCase, m: int) -> Iterator[None]:
    """Launch a forward, a backward and that of a frozen weight one at a time: of M rows, M times HEADS, or both."""
    rows, heads = (
        case.variant._replace(size=size, layout=layout)
        for size, layout in (((m, case.variant.n), "contiguous"), ((1, m, HEADS, case.variant.n), "heads"))
    )
    if case.variant.weight != "heads":
        yield from run_calls_of(rows, case)
    if case.variant.weight == "heads" or adds_heads_as_rows(case.variant.n):
        yield from run_calls_of(heads, case)


def run_calls_of(variant: variants.Variant, case: NormCase) -> Iterator[None]:
    x, weight, bias, residual, dy, d_residual_out = variants.make(variant, device="meta")
    spec = variants.spec_of(variant)._replace(reproducible=BATCH)
    _, rstd, residual_out = launch.rms_norm_forward(spec, (x, weight, bias, residual))
    dtypes = (None if each is None else each.dtype for each in (x, residual, weight, bias))
    alpha, wanted = wanted_of(case.needs, spec.alpha, tuple(dtypes))
    tensors = x if residual_out is None else residual_out, dy, weight, rstd, d_residual_out
    yield
    for each in dict.fromkeys((wanted, wanted._replace(dw=None))):
        launch.rms_norm_backward(spec._replace(alpha=alpha), tensors, each)
        yield


def orders_of(
    case: NormCase, architecture: int, folder, monkeypatch
) -> tuple[dict[str, set[Sum]], list[str]]:
    """Return the sums of rows of each kernel, by its name, for any M; and what spills registers for no reason that a
    record says. That of a lone row costs nothing."""
    found: dict[str, set[Sum]] = {}
    machine, plan_for = CompilingMachine(architecture, keep=folder), norm.plan_for

    def planned(problem: Problem) -> Plan:
        plan = plan_for(problem)
        machine.spills = plan.spills
        return plan

    monkeypatch.setattr(launch, "machine_of", lambda device: machine)
    monkeypatch.setattr(norm, "plan_for", planned)
    for m in rows_of(case):
        for cubin in itertools.chain.from_iterable(folder.glob("*.cubin") for _ in run_calls(case, m)):
            name = cubin.stem
            if name not in WITHOUT_ROWS:
                code = disassembled(cubin)
                assert m < 1000 or name not in LOOPS_BY_TMA or not overwritten(code), (name, case)
                sums = sums_of_rows(code, name in IN_CHUNKS)
                # of strips for dw, whose neighbours are columns
                of_strips = {each for each in sums if name == "backward_split" and 1 not in each.shuffles}
                found.setdefault(name, set()).update(sums - of_strips)
            cubin.unlink()
        if m == 1:
            machine.results.clear()
    spilling = {each for each in machine.results if each.stack > LITTLE and not each.spills}
    return found, sorted(f"{each.variant}: {each.stack}" for each in spilling)


def assert_in_one_order(case: NormCase, folder, monkeypatch) -> None:
    found, spills = orders_of(case, 90, folder, monkeypatch)
    assert {name.partition("_")[0] for name in found} == {"forward", "backward"}
    for op in ("forward", "backward"):
        assert not differing(set().union(*(found[each] for each in found if each.startswith(op)))), (
            case,
            found,
        )
    assert not [each for each in spills if each.startswith("backward")], case


@pytest.mark.parametrize(
    ("form", "n", "dtype"),
    [
        ("plain", 64, BF16),
        ("llama", 100, FP16),
        ("residual", 256, BF16),
        ("plain", 1000, FP16),
        ("float32 weight", 3072, BF16),
        ("weights of heads", 128, BF16),
        ("residual", 516, BF16),
        ("plain", 1024, BF16),
        ("residual", 2180, BF16),
        ("no weight", 3001, BF16),
        ("float32 weight", 4096, BF16),
        ("d_residual", 4096, BF16),
        ("both", 7168, FP32),
        ("residual", 16384, BF16),
        ("float32 residual", 20480, BF16),
        ("float32 d_residual", 28672, BF16),
        ("d_residual", 28672, BF16),
    ],
)
def test_a_row_is_added_in_one_order(form, n, dtype, tmp_path, monkeypatch):
    """One call of each way in which rows are held, and of those that had two orders by ct.sum alone."""
    assert_in_one_order(case_of(form, n, dtype), tmp_path, monkeypatch)


IN_FULL = ("plain", "no weight")


def cases() -> list[tuple[str, torch.dtype, int]]:
    """All widths of plain rows, with a weight and without, and of each other form a third of them."""
    found = [(form, dtype, n) for form in IN_FULL for dtype in (BF16, FP32) for n in WIDTHS]
    for place, form in enumerate(FORMS):
        dtypes = [FP16] if form in IN_FULL else [BF16, FP16] if form == "float32 weight" else [BF16, FP32]
        dtypes = [BF16] if "float32 residual" in form else dtypes
        widths = [n for n in WIDTHS[place % 3 :: 3] if form != "weights of heads" or n <= 2048]
        found += [(form, dtype, n) for dtype in dtypes for n in widths]
    return found


@pytest.mark.parametrize(("form", "dtype", "n"), cases())
def test_every_row_is_added_in_one_order(form, dtype, n, tmp_path, monkeypatch):
    helpers.skip_without_every_config()
    assert_in_one_order(case_of(form, n, dtype), tmp_path, monkeypatch)


def test_two_orders_are_seen():
    """By ct.sum alone rows of such kernels had other bits at other places, on an H200."""
    ran = run_script(Path(__file__).with_name("orders_of_ct_sum.py"), PYTHONPATH=os.pathsep.join(sys.path))
    assert ran.stdout.split() == ["1", "1"], ran.stderr[-3000:]


def test_a_kernel_without_sums_of_rows_does_not_pass(tmp_path):
    """Sums for dw are none: sum_partials has no others."""
    variant = BackwardRows(width=64, warps=4, occupancy=2, latency=1)
    code = code_of_call(tmp_path, "backward", variant, 64, BF16, BF16)["sum_partials"]
    with pytest.raises(ValueError):
        sums_of_rows(code)
