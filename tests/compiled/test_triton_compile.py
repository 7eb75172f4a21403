# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Triton kernels, compiled for several GPUs on any machine, by `triton_compile.py`."""

import dataclasses
import importlib
import importlib.util
import re
from collections import defaultdict

import helpers
import pytest
import torch
from helpers import BF16, FP32
from option_cases import NORM_OPTIONS, ROPE_OPTIONS, norm_cases, rope_cases
from rope_cases import RopeCase, make

from tilegym_rmsnorm.backends.triton import config
from tilegym_rmsnorm.backends.versions import package_version, parse_version

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TRITON = parse_version(package_version("triton") or "3.7")[:2]
# The most that rows of 16384 with a residual or a bias spill where it is more than config.py says, in bytes: Triton 3.5
# (torch 2.9) with both on sm_90, 3.8 (torch 2.14) with a bias on sm_100; float32 both.
MORE_SPILL = {(3, 5): 224, (3, 8): 160}
# Every branch of the selector, with and without a masked last tile
COMPILED_WIDTHS = (1, 64, 100, 640, 1024, 2880, 4096, 5120, 8192, 12288, 16384, 16385, 18432)
FEW_WIDTHS = (100, 4096, 8192, 16384, 18432)


# Bytes per thread that float32 rows of 16384 do spill on sm_100 with Triton 3.9 (not on sm_80 or sm_90, not with 3.6):
# 20 KiB to L1 per row. Strips, the other plan, would read x and dy from memory again, 128 KiB per row.
REREAD_SPILL = 40
# The most that rows of 16384 with a residual or a bias spill, with Triton 3.7: 104 bytes on sm_100, 96 on sm_90, of
# float32 rows with a bias.
REREAD_VARIANT_SPILL = 104


def _allowed_spill(capability, call, kernel):
    if kernel["name"] == "backward_dx_reread" and call["dtype"] == "float32" and capability == 100:
        return REREAD_SPILL
    # At 32 of 255 registers ptxas may park one address, by choice and not for want of registers.
    return 8 if kernel["registers"] <= 32 else 0


@pytest.mark.parametrize(
    ("capability", "widths"),
    [(80, FEW_WIDTHS), (90, COMPILED_WIDTHS), (100, FEW_WIDTHS)],
    ids=["sm_80", "sm_90", "sm_100"],
)
def test_compiled_kernels_spill_nothing_and_are_resident(capability, widths, compiled_by):
    """The narrowest and the widest rows run in each dtype, without --every-config those between in one in turn."""
    pairs = (
        ("bfloat16", "bfloat16", "llama"),
        ("bfloat16", "float32", "once"),
        ("float32", "float32", "once"),
    )
    calls = [
        {"N": n, "dtype": dtype, "weight_dtype": weight_dtype, "casting": casting}
        for i, n in enumerate(widths)
        for j, (dtype, weight_dtype, casting) in enumerate(pairs)
        if helpers.every_config or n in (widths[0], widths[-1]) or i % len(pairs) == j
    ]
    for call, kernels in zip(calls, compiled_by(capability, calls), strict=True):
        names = " ".join(kernel["name"] for kernel in kernels)
        assert "forward_" in names and "backward_dx" in names
        for kernel in kernels:
            assert kernel["stack"] <= _allowed_spill(capability, call, kernel), (call, kernel)
            # What the grid of the backward counts on; elements loaded one by one keep more addresses
            if kernel["name"].startswith("backward_dx") and call["N"] % 8 == 0:
                assert kernel["registers"] * 32 * config.WARPS_PER_SM <= 65536, (call, kernel)


@pytest.mark.skipif(TRITON < (3, 6), reason="Triton 3.5 takes 39 registers for 5120 columns")
@pytest.mark.parametrize("options", [{}, {"residual_dtype": "bfloat16", "residual_out_dtype": "bfloat16"}])
def test_registers_of_a_forward_leave_room_for_its_programs(options, compiled_by):
    """With a few more an SM holds one program less, which takes up to 26 % longer."""
    widths = (2560, 2880, 4096, 5120, 6144, 7168, 8192)
    calls = [{"N": n, "dtype": "bfloat16", "weight_dtype": "bfloat16", **options} for n in widths]
    for call, kernels in zip(calls, compiled_by(90, calls), strict=True):
        (forward,) = [each for each in kernels if each["name"] == "forward_rows"]
        least = 40 if config.forward_config(call["N"]).tile.tiles == 1 else 32
        assert forward["registers"] <= least and forward["stack"] == 0, (call, forward)


@pytest.mark.parametrize(
    ("n", "options"),
    [
        (72, {"residual_out_dtype": "float32", "alpha": 0.5}),
        (1024, {"residual_out_dtype": "bfloat16", "row_stride": 1025, "casting": "llama"}),
    ],
)
def test_a_forward_that_needs_more_registers_gets_them(n, options, compiled_by):
    call = {"N": n, "dtype": "bfloat16", "weight_dtype": "bfloat16", "residual_dtype": "bfloat16", **options}
    (kernels,) = compiled_by(90, [call])
    (forward,) = [each for each in kernels if each["name"] == "forward_rows"]
    assert forward["stack"] == 0, forward


RESIDUAL = {"residual_dtype": "bfloat16", "residual_out_dtype": "bfloat16"}
MIXED = {"residual_dtype": "float32", "residual_out_dtype": "float32", "alpha": 0.5}
# What a call may have beside x and a weight, and the widths it is compiled for
VARIANTS = {
    "residual": (RESIDUAL, FEW_WIDTHS),
    "residual of another dtype, alpha": (MIXED, FEW_WIDTHS),
    "bias": ({"bias_dtype": "bfloat16"}, FEW_WIDTHS),
    "residual and bias": ({**RESIDUAL, "bias_dtype": "float32"}, FEW_WIDTHS),
    "heads": ({"heads": (2, 5, 8)}, (64, 80, 96, 100, 128, 256)),
    "heads of their own": (
        {"heads": (2, 5, 8), "is_per_head": True, "bias_dtype": "bfloat16"},
        (64, 96, 128, 256),
    ),
    "all": ({"heads": (2, 5, 8), "is_per_head": True, "bias_dtype": "float32", **MIXED}, (100, 128)),
}


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_spill_nothing_that_counts(name, capability, compiled_by):
    """Rows that are read again do, by config.py. Without --every-config on one architecture, and each width of one
    dtype and the other in turn, the widest of both."""
    if not helpers.every_config and capability != 90:
        pytest.skip("with --every-config")
    variant, widths = VARIANTS[name]
    calls = [
        {"N": n, "dtype": dtype, "weight_dtype": "float32", **variant}
        for i, n in enumerate(widths)
        for dtype in ("bfloat16", "float32")
        if helpers.every_config or n == widths[-1] or (dtype == "float32") == i % 2
    ]
    for call, kernels in zip(calls, compiled_by(capability, calls), strict=True):
        for kernel in kernels:
            if kernel["name"] == "backward_dx_reread":
                allowed = MORE_SPILL.get(TRITON, REREAD_VARIANT_SPILL)
            else:
                # 8 bytes: an address that ptxas parks where sm_120 has 128 registers, as `_allowed_spill` says, and
                # before Triton 3.7 in float32 rows of 18432 with a residual of another dtype
                allowed = 8 if capability == 120 or TRITON < (3, 7) else 0
            assert kernel["stack"] <= max(allowed, _allowed_spill(capability, call, kernel)), (call, kernel)


ROPE = RopeCase(BF16, heads=(32, 8), n=128, rotary_dim=128, weight_dtype=BF16, layout="packed")
HEADS_OF_THEIR_OWN = {"weight": ("heads", "heads")}
# What a call of qk_norm_rope may be, of bfloat16 and of float32
ROPES = {
    "halves": {},
    "80": {"n": 80, "rotary_dim": 80},
    "6": {"n": 6, "rotary_dim": 6},
    "quarter": {"n": 256, "rotary_dim": 64},
    "half": {"rotary_dim": 64, "tables": "half"},
    "interleaved": {"interleaved": True},
    "interleaved quarter": {"n": 256, "rotary_dim": 64, "interleaved": True, "tables": "half"},
    "positions": {"positions": "one", "casting": "llama", "rounding": "each"},
    "norm": {
        "n": 256,
        "rotary_dim": 64,
        "tables": "half",
        "positions": "one",
        "position_dtype": torch.int32,
        "rounding": "norm",
    },
    "per-head": HEADS_OF_THEIR_OWN,
    "all": {"n": 80, "rotary_dim": 40, "interleaved": True, "positions": "one", **HEADS_OF_THEIR_OWN},
    "q alone": {"heads": (16, 0), "weight": ("none", "none")},
    "widest": {"n": 8192, "rotary_dim": 8192, "interleaved": True},
}


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_rope_kernels_spill_nothing_that_counts(capability, compiled_by):
    """One architecture runs without --every-config, in one dtype and the other in turn."""
    if not helpers.every_config and capability != 90:
        pytest.skip("with --every-config")
    calls = [
        ROPE._replace(dtype=dtype, **form)
        for i, form in enumerate(ROPES.values())
        for j, dtype in enumerate((FP32, BF16))
        if helpers.every_config or i % 2 == j
    ]
    for call, kernels in zip(calls, compiled_by(capability, calls), strict=True):
        found = {kernel["name"]: kernel for kernel in kernels}
        assert {"rope_forward", "rope_backward"} <= set(found)
        for kernel in kernels:
            # 16 bytes: addresses that ptxas parks by choice, at 128 registers and below
            assert kernel["stack"] <= 16, (call, kernel)
        registers = found["rope_backward"]["registers"]
        assert registers * 32 * config.WARPS_PER_SM <= 65536, (call, registers)


@pytest.mark.parametrize(("vendor", "hip"), [("nvidia", None), ("amd", "7.0")])
def test_the_compiler_knows_all_options_of_rope(vendor, hip, monkeypatch):
    """Triton refuses to launch with another. Each vendor's compiler has its own."""
    from tilegym_rmsnorm.backends.triton import host, launch, reduce, rope

    compiler = importlib.import_module(f"triton.backends.{vendor}.compiler")
    options = {"nvidia": "CUDAOptions", "amd": "HIPOptions"}[vendor]
    known = {field.name for field in dataclasses.fields(getattr(compiler, options))}
    seen = set()

    class Kernel(defaultdict):
        arg_names = ()

    for module, name in ((rope, "rope"), (reduce, "sum_partials")):
        monkeypatch.setattr(module, name, Kernel(lambda: lambda **named: seen.update(named)))
    monkeypatch.setattr(host, "sm_count", lambda device: 132)
    monkeypatch.setattr(torch.version, "hip", hip)
    call = make(ROPE, "meta")
    launch.qk_norm_rope_forward(call.spec, call.tensors)
    launch.qk_norm_rope_backward(call.spec, call.backward_tensors, call.wanted)
    assert {"num_warps"} < seen <= known


@pytest.mark.parametrize("positions", [None, "one"])
def test_shape_strides_and_tables_of_rope_compile_nothing(positions, compiled_by):
    first = ROPE._replace(positions=positions)  # the tables have T rows, or T + 3
    calls = [first]
    calls += [first._replace(batch=b, length=t) for b, t in ((1, 5), (16, 1), (3, 4096), (2, 13), (2, 4094))]
    calls += [first._replace(eps=0.0), first._replace(offset=1.0)]
    compiled = compiled_by(90, calls)
    assert compiled[0] and not any(compiled[1:])


def cases_of_options(op):
    """Each two options together, and strides that do not fit into 32 bits beside others that do. Without --every-config
    one width of each kernel, and a few layouts, which the compiler knows as sizes and alignments of integers."""
    if op == "qk_norm_rope":
        if helpers.every_config:
            return rope_cases(**{name: (*ROPE_OPTIONS[name], "far") for name in ("layout", "dy_layout")})
        # Of n and rotary_dim powers of two, and neither: whole rows and a rest, aligned and not
        few = {"n": (6, 64, 99), "rotary_dim": (6, 64, 80)}
        return rope_cases(
            **few, layout=("packed", "offset", "far"), dy_layout=("transposed", "offset", "far")
        )
    if helpers.every_config:
        widths = (1, 64, 100, 640, 4096, 12288, 16385, 18432)
        return norm_cases(n=widths, layout=(*NORM_OPTIONS["layout"], "far"))
    return norm_cases(n=(64, 12288, 18436), layout=("slices", "heads", "offset", "far"))


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
@pytest.mark.parametrize("op", ["rms_norm", "qk_norm_rope"])
def test_each_two_options_compile(op, capability, compiled_by):
    """Triton's interpreter runs what its compiler refuses, such as a name of two types. Without --every-config on one
    architecture."""
    if not helpers.every_config and capability != 90:
        pytest.skip("with --every-config")
    compiled = compiled_by(capability, cases_of_options(op))
    names = {kernel["name"] for kernels in compiled for kernel in kernels}
    expected = {"rope_forward", "rope_backward"}
    if op == "rms_norm":
        expected = {"forward_rows", "forward_reread", "backward_dx", "backward_dx_reread", "backward_c"}
    assert names == expected | {"sum_partials"}


HEADS = {"N": 128, "dtype": "bfloat16", "weight_dtype": "float32"}


@pytest.mark.parametrize("is_per_head", [False, True])
def test_shape_and_strides_of_heads_compile_nothing(is_per_head, compiled_by):
    """Nor do strides of extents of 1, which mean nothing."""
    first = HEADS | {"heads": (2, 5, 8), "is_per_head": is_per_head, **RESIDUAL}
    calls = [first]
    calls += [first | {"heads": heads} for heads in ((1, 5, 8), (16, 1, 8), (1, 1, 8), (3, 4096, 8))]
    calls += [first | {"strides": strides} for strides in ((4096, 512, 128), (16, 64, 32768))]
    calls += [first | {"heads": (1, 1, 8), "strides": (1, 3, 128)}]
    calls += [first | {"eps": 0.0}, first | {"offset": 1.0}]
    if not is_per_head:  # dw and db are of H * N columns
        calls += [first | {"heads": heads} for heads in ((2, 8, 5), (2, 16, 1), (7, 1, 1))]
        calls += [first | {"heads": (7, 5, 1), "strides": (2048, 128, 1)}]
    compiled = compiled_by(90, calls)
    assert compiled[0] and not any(compiled[1:])
    *_, again, other = compiled_by(90, [first | {"alpha": alpha} for alpha in (0.22, 0.5, 2.0)])
    assert not again and not other


@pytest.mark.parametrize("n", [64, 16384, 18432], ids=["held", "reread", "strips"])
def test_batch_size_eps_offset_and_stride_compile_nothing(n, compiled_by):
    first = {"N": n, "dtype": "bfloat16", "weight_dtype": "float32", "M": 37}
    calls = [first]
    calls += [first | {"M": m} for m in (1, 2, 15, 16, 17, 64, 264, 1000)]
    calls += [
        first | {"row_stride": n + 16},
        first | {"row_stride": 2 * n},
        first | {"M": 1, "row_stride": n + 1},
    ]
    calls += [first | {"eps": 0.0}, first | {"eps": 1.0}, first | {"offset": 1.0}, first | {"offset": -0.25}]
    compiled = compiled_by(90, calls)
    assert compiled[0] and not any(compiled[1:])


@pytest.mark.parametrize("bias_dtype", [None, "bfloat16"])
def test_a_sum_that_is_added_is_a_kernel_of_its_own(bias_dtype, compiled_by):
    """Other calls compile what they compiled."""
    call = {"N": 1000, "dtype": "bfloat16", "weight_dtype": "bfloat16", "bias_dtype": bias_dtype}
    first, added, again = compiled_by(90, [call, {**call, "adds": True}, call])
    assert "sum_partials" in {each["name"] for each in first}
    assert [each["name"] for each in added] == ["sum_partials"] and not again


@pytest.mark.xfail(
    TRITON < (3, 6),
    reason="tl.sqrt_rn of Triton 3.5 is sqrt.rn.ftz: docs/limits.md says the range",
    strict=True,
)
def test_no_triton_kernel_flushes_subnormal_numbers(tmp_path, compiled_by):
    """test_extremes.py shows it on a GPU alone: Triton's interpreter flushes nothing."""
    widths = (64, 16384, 18432)  # every kernel
    calls = [{"N": n, "dtype": "float32", "weight_dtype": "float32"} for n in widths]
    calls.append(ROPE._replace(dtype=FP32))
    compiled_by(90, calls, str(tmp_path))
    kernels = [path.read_text() for path in tmp_path.rglob("*.ptx")]
    found = {re.search(r"\.entry (\w+)", ptx)[1]: ptx for ptx in kernels}
    assert {"forward_rows", "forward_reread", "backward_dx", "backward_dx_reread", "backward_c"} <= set(found)
    assert {"rope_forward", "rope_backward"} <= set(found)
    lines = {line for ptx in kernels for line in ptx.splitlines()}
    # rsqrt has no other form; rstd_of scales what it would flush
    assert not {line for line in lines if ".ftz" in line and "rsqrt.approx" not in line}
