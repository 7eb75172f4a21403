# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Kernels of test_pipelines.py with another weight than x's dtype, none, and casting "llama": each is machine code of
its own. One block of 18432 bfloat16 columns was right with a bfloat16 weight, and with a float32 weight asked for the
next x while its workers still read this one."""

import itertools
import types

import helpers
import plain_calls
import pytest
import torch
from compiled_forms import FORM, WIDE, compile_call, problem_of
from compiling import CompilingMachine, code_of_call, disassembled, meta, skip_without_disassembler
from helpers import BF16, FP16, FP32
from pipelines import overwritten
from planning import H200, device, plan
from test_pipelines import to_read, variants_by_tma, whole_grid

from tilegym_rmsnorm.backends.cutile.launch import Backward
from tilegym_rmsnorm.backends.cutile.plans.problem import D_RESIDUAL, RESIDUAL, Bucket
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardRows,
    BackwardTiles,
)
from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates

skip_without_disassembler()

CALLS = {
    "another weight": {"round_xhat": False, "m": 4096},
    "no weight": {"round_xhat": False, "m": 4096},
    "llama": {"round_xhat": True, "m": 4096},
    "llama, another weight": {"round_xhat": True, "m": 4097},
}


def weight_dtype_of(call: str, dtype: torch.dtype) -> torch.dtype | None:
    if call == "no weight":
        return None
    if call == "llama":
        return dtype
    return FP32


@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("call", CALLS)
def test_no_other_call_overwrites_tiles_in_use(call, dtype, op, tmp_path):
    """Read, without --every-config, rows and teams that `to_read` keeps, one of each kind, of bfloat16 beside a float32
    weight. test_no_backward_beside_a_float32_weight_overwrites_tiles_in_use has those of each latency."""
    if call == "no weight" and op == "backward":
        pytest.skip("without a weight there is no dw")
    if dtype is FP32 and call in ("another weight", "llama, another weight"):
        pytest.skip("there is no other weight beside float32")
    if not helpers.every_config and (call != "another weight" or op == "forward" or dtype is FP16):
        pytest.skip("read with --every-config")
    weight_dtype = weight_dtype_of(call, dtype)
    checked = 0
    for variant, n in to_read(variants_by_tma(op, dtype)):
        if not helpers.every_config and not isinstance(variant, (BackwardPipelined, BackwardPipelinedTeam)):
            continue
        kernels = code_of_call(tmp_path, op, variant, n, dtype, weight_dtype, **CALLS[call])
        for name, code in kernels.items():
            assert not overwritten(code), (name, variant, n)
            checked += any("UTMALDG" in line for line in code)
    assert checked


@pytest.mark.parametrize(("dtype", "x_dtype"), [(BF16, BF16), (FP32, FP32), (FP32, BF16)])
def test_no_gradient_of_a_wide_residual_overwrites_tiles_in_use(dtype, x_dtype, tmp_path):
    """One width without --every-config. x_dtype: of x, where the residual's is wider."""
    machine, checked = types.SimpleNamespace(facts=device(target=H200)), 0
    for n in WIDE if helpers.every_config else (28672,):
        for op, form in itertools.product(("backward", "dx"), (RESIDUAL, D_RESIDUAL)):
            compile_call(
                problem_of(machine, op, n, dtype, FORM[form], x_dtype), dtype, x_dtype, keep=tmp_path
            )
            for cubin in tmp_path.glob("*.cubin"):
                code = disassembled(cubin)
                cubin.unlink()
                assert not overwritten(code), (cubin.stem, op, form, n)
                checked += any("UTMALDG" in line for line in code)
    assert checked


@pytest.mark.parametrize("weight_dtype", [BF16, FP16, FP32])
def test_nothing_packed_that_tune_tries_overwrites_tiles_in_use(weight_dtype, tmp_path):
    """Read, without --every-config, what `to_read` keeps of 18432 columns, which no other test reads but for what the
    tables have, and of teams; float16 with it alone."""
    if weight_dtype is FP16 and not helpers.every_config:
        pytest.skip("read with --every-config")
    dtype = BF16 if weight_dtype is FP32 else weight_dtype
    name = str(dtype).removeprefix("torch.")
    widths = (5120, 6144, 8192, 10240, 12288, 16384, 18432, 24576, 32768, 65536)
    found = {
        (op, whole_grid(variant), n)
        for n in (widths if helpers.every_config else (18432, 32768))
        for op in (("backward", "dx") if helpers.every_config else ("backward",))
        for variant in candidates(Bucket(op, n, name, "large"), 90, most=10000)
        if isinstance(variant, (BackwardPipelined, BackwardPipelinedTeam)) and variant.packed
    }
    assert {type(variant) for _, variant, _ in found} == {BackwardPipelined, BackwardPipelinedTeam}
    for op in sorted({op for op, *_ in found}):
        of_op = sorted(((variant, n) for each, variant, n in found if each == op), key=str)
        for variant, n in to_read(of_op, "latency", "warps"):
            for code in code_of_call(tmp_path, op, variant, n, dtype, weight_dtype).values():
                assert not overwritten(code), (op, variant, n)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
def test_no_rows_of_a_warp_that_tune_tries_are_overwritten_in_use(dtype, weight_dtype, tmp_path):
    """Read, without --every-config, those of 1024 columns by latency 4 alone, one for each number of warps and of rows
    where all is bfloat16, and one for one number of warps beside float32."""
    name = str(dtype).removeprefix("torch.")
    found = {
        (variant, n)
        for n in ((384, 512, 768, 1024) if helpers.every_config else (1024,))
        for variant in candidates(Bucket("backward", n, name, "large"), 90, most=10000)
        if isinstance(variant, BackwardTiles) and variant.pieces > 1 and variant.width <= 256 and variant.tma
        if helpers.every_config or variant.latency == 4
    }
    assert {variant.warps for variant, _ in found} == {4, 8}
    cases = to_read(sorted(found, key=str), "warps", *(("rows",) if weight_dtype is BF16 else ()))
    if weight_dtype is FP32 and not helpers.every_config:
        cases = cases[dtype is FP32 :: 2]
    for variant, n in cases:
        for code in code_of_call(tmp_path, "backward", variant, n, dtype, weight_dtype).values():
            assert not overwritten(code), (variant, n)


@pytest.mark.parametrize("n", [5120, 5119])
@pytest.mark.parametrize("kernel", [BackwardRows, BackwardPipelined])
def test_views_unlike_packed_rows_are_copied_for_tma_alone(kernel, n):
    """float32 rows of 5 * 1024 columns with a dy whose rows begin anywhere have one slot of shared memory where two are
    needed, rows of 5119 where x alone is aligned. By gathers views are read where they are. What is compiled says
    which: what divides strides is part of it."""
    variant = kernel(width=1024, warps=8, occupancy=1, latency=4, pieces=5)
    machine = CompilingMachine(90, compiles=False)
    run = Backward(machine, plan(variant, "backward", n, FP32, facts=machine.facts))
    plain, view = meta(9, n, dtype=FP32), meta(9, 5121 if n == 5120 else 5120, dtype=FP32)[:, :n]
    for x, dy in ((plain, plain), (plain, view), (view, plain), (view, view)):
        plain_calls.backward(run, x, dy, meta(n, dtype=FP32), meta(9, dtype=FP32), 0.0)
    assert len(machine.symbols[kernel.kernel]) == (1 if kernel is BackwardPipelined else 4)
