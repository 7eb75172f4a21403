# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Which kernels Triton compiles under levels (reproducibility.py): the compiler chooses the order of a row's sums, so a
row has the same bits wherever it lies if one kernel serves them all. Interpreters have no such choice."""

import importlib.util
import re

import pytest
from helpers import BF16, FP32, every_config
from rope_cases import RopeCase

from tilegym_rmsnorm.reproducibility import BATCH, DEVICE, VLLM

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

WIDTHS = (1, 64, 72, 100, 640, 4096, 8192, 12288, 16384, 18432)  # each kernel, tiles and alignments
RESIDUAL = {"residual_dtype": "bfloat16", "residual_out_dtype": "bfloat16"}
FORMS = {
    "plain": {},
    "llama": {"casting": "llama", "weight_dtype": "float32"},
    "residual": RESIDUAL,
    "bias": {"bias_dtype": "bfloat16", "dtype": "float32"},
    "heads": {"is_per_head": True, "bias_dtype": "float32", "heads": (2, 5, 8)},
    "vllm": {"reproducible": BATCH | VLLM, "weight_dtype": "float32"},
}


def rows_of(first):
    """Calls with the same rows elsewhere: strided, unaligned, one row, and of dimensions that are not evenly spaced."""
    n = first["N"]
    calls = [first | {"begin": begin} for begin in (1, 4, 8)]
    if first.get("is_per_head"):
        calls += [first | {"heads": heads} for heads in ((1, 1, 8), (16, 1, 8), (1, 300, 8), (3, 4096, 8))]
        calls += [first | {"strides": (40 * m, 8 * m, m)} for m in (n, n + 1, n + 4, n + 8, 2 * n, n + 16)]
        return calls
    calls += [first | {"M": m} for m in (1, 2, 255, 256, 257)]
    calls += [first | {"row_stride": n + gap} for gap in (1, 4, 8, 16, n)]
    calls += [first | {"M": 1, "row_stride": n + 1, "begin": 1}]
    calls += [first | {"heads": heads} for heads in ((2, 5, 8), (1, 1, 8), (7, 1, 1), (16, 1, 8), (3, 40, 1))]
    return [*calls, first | {"heads": (2, 5, 8), "strides": (64 * n + 8, 8 * n + 1, n), "begin": 1}]


@pytest.mark.parametrize("name", FORMS)
def test_one_kernel_serves_rows_wherever_they_lie(name, compiled_by):
    """And one with and without dw, whose sum may be of db alone. Without --every-config of three widths, other ones in
    turn."""
    start = list(FORMS).index(name)
    few = [WIDTHS[(start + step) % len(WIDTHS)] for step in (0, 3, 7)]
    for n in WIDTHS if every_config else few:
        first = {
            "N": n,
            "dtype": "bfloat16",
            "weight_dtype": "bfloat16",
            "reproducible": BATCH,
            **FORMS[name],
        }
        *compiled, of_frozen = compiled_by(90, [first, *rows_of(first), first | {"is_frozen": True}])
        assert compiled[0]
        others = [each["name"] for each in sum(compiled[1:], [])]
        assert not others, (n, others)
        assert {each["name"] for each in of_frozen} <= {"sum_partials"}, n


def test_without_a_level_more_than_one_kernel_does(compiled_by):
    """So the test above says something."""
    first = {"N": 100, "dtype": "bfloat16", "weight_dtype": "bfloat16"}
    compiled = compiled_by(90, [first, *rows_of(first)])
    assert {"forward_rows", "backward_dx"} <= {each["name"] for each in sum(compiled[1:], [])}


ROPE = RopeCase(BF16, heads=(8, 2), n=128, rotary_dim=64, layout="packed")
ROPES = {
    "plain": {},
    "interleaved": {"interleaved": True, "n": 80, "rotary_dim": 20},
    "half tables": {"tables": "half", "n": 66, "rotary_dim": 34, "weight": ("heads", "vector")},
    "positions": {"positions": "one", "dtype": FP32},
}


@pytest.mark.parametrize("name", ROPES)
def test_one_kernel_of_rope_serves_heads_wherever_they_lie(name, compiled_by):
    first = ROPE._replace(**ROPES[name])
    calls = [first._replace(batch=b, length=t) for b, t in ((1, 1), (16, 1), (3, 257), (2, 13))]
    calls += [
        first._replace(layout=layout, dy_layout=layout) for layout in ("offset", "gaps", "contiguous", "far")
    ]
    calls += [first._replace(table_layout=layout) for layout in ("offset", "gaps")]
    if name == "plain":
        calls += [first._replace(length=1, table_layout="offset"), first._replace(has_rows_of_batch=True)]
    calls = [call._asdict() | {"reproducible": BATCH} for call in (first, *calls)]
    compiled = compiled_by(90, calls)
    assert compiled[0] and not any(compiled[1:]), [bool(each) for each in compiled]


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_levels_spill_nothing(capability, compiled_by):
    calls = [
        {"N": n, "dtype": dtype, "weight_dtype": "bfloat16", "reproducible": level, **form}
        for n in (1, 100, 4096, 18432)
        for dtype in ("bfloat16", "float32")
        for level, form in ((BATCH | VLLM, {}), (BATCH | DEVICE, RESIDUAL))
    ]
    compiled = compiled_by(capability, calls if every_config or capability == 90 else calls[-4:])
    kernels = sum(compiled, [])
    assert "forward_vllm" in {each["name"] for each in kernels}
    assert not [each for each in kernels if each["stack"] > 8]  # 8 bytes: as in test_triton_compile.py


ARITHMETIC = re.compile(r"\b((?:fma|add|mul|div|sqrt|selp)[.\w]*\.f32|shfl[.\w]*) ")


def _sum_of(folder, kernel):
    """How threads share what tl.sum adds, and the operations of floats from the first product to 1 / sqrt."""
    (path,) = [path for path in folder.rglob("*.ptx") if f".entry {kernel}(" in path.read_text()]
    ptx, ttgir = path.read_text(), path.with_suffix(".ttgir").read_text()
    name = re.search(r"arith.select .*, tensor<1024xf32, (#\w+)>", ttgir)[
        1
    ]  # a sum of all elements takes any order
    layout = re.search(rf"^{name} = (.*)", ttgir, re.MULTILINE)[1]
    found = ARITHMETIC.findall(ptx)
    start = next(i for i, each in enumerate(found) if each.startswith(("mul", "fma")))
    end = next(i for i, each in enumerate(found) if each.startswith("sqrt"))
    return layout, found[start : end + 2]


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float32", "float32"),
        ("float32", "bfloat16"),
        ("bfloat16", None),
    ],
)
@pytest.mark.parametrize("n", [1, 100, 128, 1032, 4096, 5120, 7168, 18432])
def test_the_compiler_makes_of_it_what_it_makes_of_vllms_kernel(
    n, dtype, weight_dtype, tmp_path, compiled_by
):
    """Without a weight vLLM has one of ones."""
    ours = {"N": n, "dtype": dtype, "weight_dtype": weight_dtype, "reproducible": BATCH | VLLM}
    theirs = {"vllm": n, "dtype": dtype, "weight_dtype": weight_dtype or dtype}
    compiled_by(90, [theirs, ours], str(tmp_path))
    expected, found = (_sum_of(tmp_path, kernel) for kernel in ("vllm_rms_norm", "forward_vllm"))
    assert any(each.startswith("shfl") for each in expected[1]) and expected[1][-1].startswith("div")
    assert found == expected
