# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Selections on this GPU for calls with a residual, a bias, heads and several dtypes that fill it: right against
float64, and the same bits in many runs on outputs that begin as NaN."""

import pytest
import torch
import variants
from helpers import BF16, FP16, FP32, HAS_GPU, assert_alike, why_skip
from variants import Variant

pytestmark = pytest.mark.usefixtures("poisoned_empty", "no_composing")

if HAS_GPU and (reason := why_skip("cutile")):
    pytest.skip(reason, allow_module_level=True)

from tilegym_rmsnorm.backends.cutile import launch  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.rules import WIDEST_BIAS_ROW  # noqa: E402
from tilegym_rmsnorm.backends.cutile.plans.sizes import FEW_ROWS, size_class  # noqa: E402

# Elements of x: as many as a call has at most that is not large (all SMs have several rows), and as a large one has.
ELEMENTS = {"most": 2**22, "large": 2**24}
RUNS = {"most": 60, "large": 20}
UNALIGNED = (100, 211, 358, 693, 1165, 1900, 3001, 9747)
WIDE = (14304, 16392, 20481, 21192, 30001, 30728, 53248, 65535)
WIDTHS = (
    *(64, 96, 272, 512, 1000, 1024, 2048, 2560, 2880, 3584, 4096, 5120, 6144, 7168),
    *(8192, 12288, 14336, 16384, *UNALIGNED, *WIDE),
)
HEADS = (
    (2, 256, 32, 64),
    (2, 256, 28, 80),
    (3, 201, 5, 96),
    (2, 512, 8, 128),
    (1, 300, 40, 160),
    (2, 128, 32, 256),
    (2, 3, 1000, 64),  # a sequence behind few heads
    (2, 2000, 1, 128),  # and by itself
)
KINDS = {
    "residual": Variant(BF16, weight_dtype=BF16, residual_dtype=BF16),
    "residual, llama, float32 weight": Variant(
        BF16, weight_dtype=FP32, residual_dtype=BF16, casting="llama", offset=1.0
    ),
    "stream": Variant(BF16, weight_dtype=BF16, residual_dtype=FP32, alpha=0.5),
    "two gradients": Variant(BF16, weight_dtype=BF16, residual_dtype=BF16, alpha=0.5),
    "float32": Variant(FP32, weight_dtype=FP32, residual_dtype=FP32),
    "bias": Variant(BF16, weight_dtype=BF16, bias_dtype=BF16),
    "residual and bias": Variant(FP16, weight_dtype=FP16, residual_dtype=FP16, bias_dtype=FP32),
    "out_dtype": Variant(BF16, weight_dtype=FP16, out_dtype=FP32),
}
OF_HEADS = {
    "heads": Variant(BF16, weight_dtype=BF16, layout="heads"),
    "heads, float32": Variant(FP32, weight_dtype=FP32, layout="heads"),
    "heads and residual": Variant(BF16, weight_dtype=FP32, residual_dtype=BF16, layout="mixed"),
    "per-head": Variant(BF16, weight_dtype=BF16, weight="heads", layout="heads"),
    "per-head, all": Variant(
        BF16,
        weight_dtype=FP32,
        weight="heads",
        bias_dtype=FP32,
        residual_dtype=FP32,
        alpha=0.5,
        layout="slices",
    ),
}


def _assert_right_and_alike(variant, runs):
    inputs, spec, wanted = variants.make(variant), variants.spec_of(variant), variants.wanted_of(variant)
    y, rstd, residual_out = launch.rms_norm_forward(spec, inputs[:4])
    normalized = inputs.x if residual_out is None else residual_out
    if residual_out is not None:
        variants.check_residual_out(variant, inputs, residual_out)
    expected = variants.expected(variant, inputs, residual_out)
    of_forward, tensors = ("y", "rstd"), (normalized, inputs.dy, inputs.weight, rstd, inputs.d_residual_out)
    results = ("dx", wanted.dx), ("d_residual", wanted.d_residual), ("dw", wanted.dw), ("db", wanted.db)
    of_backward = tuple(name for name, dtype in results if dtype is not None)

    def backward():
        found = launch.rms_norm_backward(spec, tensors, wanted)
        return tuple(each for each in found if each is not None)

    def forward():
        return launch.rms_norm_forward(spec, inputs[:4])[:2]

    assert_alike({name: expected[name] for name in of_forward}, of_forward, forward, runs)
    assert_alike({name: expected[name] for name in of_backward}, of_backward, backward, runs)
    if residual_out is not None:
        assert all(
            torch.equal(launch.rms_norm_forward(spec, inputs[:4])[2], residual_out) for _ in range(runs // 10)
        )


@pytest.mark.parametrize("size", ELEMENTS)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind, n, size):
    if n > WIDEST_BIAS_ROW and KINDS[kind].bias_dtype is not None:
        pytest.skip("composed")
    m = ELEMENTS[size] // n
    assert size_class(m, n) == ("large" if size == "large" else "few" if m <= FEW_ROWS else "small")
    _assert_right_and_alike(KINDS[kind]._replace(size=(m, n)), RUNS[size])


@pytest.mark.parametrize("n", [3001, *WIDE])
@pytest.mark.parametrize("kind", ["residual", "two gradients", "stream"])
def test_a_thousand_runs(kind, n):
    """Teams beside a residual wait for each other; rows that are not aligned share vectors with their neighbours."""
    _assert_right_and_alike(KINDS[kind]._replace(size=(ELEMENTS["large"] // n, n)), 1000)


@pytest.mark.parametrize("size", ELEMENTS)
@pytest.mark.parametrize("lead", HEADS)
@pytest.mark.parametrize("kind", OF_HEADS)
def test_heads(kind, lead, size):
    b, t, h, n = lead
    if size == "large":
        t = -(-ELEMENTS[size] // (b * h * n)) | 1  # odd: the last tile along T is partly empty
    assert size_class(b * t * h, n) == ("large" if size == "large" else "small")
    _assert_right_and_alike(OF_HEADS[kind]._replace(size=(b, t, h, n)), RUNS[size])
