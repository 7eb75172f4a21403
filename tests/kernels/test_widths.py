# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Widths that are no multiple of 16: what kernels declare of N, in the interpreter, which refuses what is not so."""

import pytest
import torch
from cutile_runs import run_backward, run_forward
from helpers import BF16, FP32, assert_within, expected_results, in_turn, make_inputs
from narrow_variants import BACKWARDS, FORWARDS, KERNELS

from tilegym_rmsnorm.backends.cutile.interpreter.arrays import Array
from tilegym_rmsnorm.backends.cutile.interpreter.rebind import _OPERATIONS

CPU = torch.device("cpu")
WIDTHS = [80, 72, 76, 73]  # whose largest divisor of these is 16, 8, 4, 1
DTYPES = [BF16, FP32]
WEIGHTS = [BF16, FP32, None]
NEEDS_DW = ("split", "split, reread", "split, reread, ahead", "strips")
LOAD_TILES = [("forward", "tiles"), ("forward", "reread")]
LOAD_TILES += [
    ("backward", k) for k in ("tiles", "split, reread", "split, reread, ahead", "strips", "dx, reread")
]


@pytest.mark.parametrize(("kernel", "dtype", "n", "weight"), in_turn(FORWARDS, DTYPES, WIDTHS, WEIGHTS, of=3))
def test_forwards(kernel, weight, dtype, n):
    """Each width and dtype of a kernel has one of the weights, in turn, without --every-config."""
    inputs = make_inputs(13, n, dtype, weight, offset=0.5 if weight else 0.0, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs, FORWARDS[kernel]))


@pytest.mark.parametrize(
    ("kernel", "dtype", "n", "weight"),
    in_turn([k for k in BACKWARDS if k not in NEEDS_DW], DTYPES, WIDTHS, WEIGHTS, of=3)
    + in_turn(NEEDS_DW, DTYPES, WIDTHS, [BF16, FP32], of=2),
)
def test_backwards(kernel, weight, dtype, n):
    """Each width and dtype of a kernel has one of the weights, in turn, without --every-config."""
    inputs = make_inputs(13, n, dtype, weight, offset=0.5 if weight else 0.0, device=CPU)
    found = run_backward(inputs, BACKWARDS[kernel], has_dw=kernel != "dx, reread")
    assert_within(expected_results(inputs), **found)


@pytest.mark.parametrize(
    ("dtype", "n", "are_aligned"),
    [(BF16, 72, True), (BF16, 76, False), (BF16, 73, False), (FP32, 76, True), (FP32, 74, False)],
)
@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_no_tile_of_rows_that_are_not_aligned_is_loaded_as_one(
    op, kernel, dtype, n, are_aligned, monkeypatch
):
    """`ct.load` has a branch around each one or two of their elements: 4096x10001 in 698 us instead of 168 (H100). Nor
    is it declared what divides their length: kernels by chunks then have twice the branches (1164 bfloat16; not
    timed)."""
    loaded, declared = [], []  # by tiles, and sliced by what divides N: tensors whose rows are n long
    load, slice_array = _OPERATIONS["load"], Array.slice

    def recording_slice(array, *bounds):
        if array.tensor.shape[-1] == n:
            declared.append(array.tensor)
        return slice_array(array, *bounds)

    def recording_load(array, index, shape, **options):
        if array.tensor.shape[-1] == n:
            loaded.append(array.tensor)
        return load(array, index, shape, **options)

    monkeypatch.setitem(_OPERATIONS, "load", recording_load)
    monkeypatch.setattr(Array, "slice", recording_slice)
    inputs = make_inputs(13, n, dtype, dtype, device=CPU)
    if op == "forward":
        run_forward(inputs, FORWARDS[kernel])
    else:
        run_backward(inputs, BACKWARDS[kernel], has_dw=kernel != "dx, reread")
    of_x = [t for t in loaded if t.shape == (13, n)]
    if "by TMA" in kernel:  # which has no branches, and no gathers
        assert of_x
        loaded = [t for t in loaded if t.shape != (13, n)]
    else:
        assert bool(of_x) == (are_aligned and (op, kernel) in LOAD_TILES)
    assert not [t for t in loaded + declared if n * t.element_size() % 16]
    if "unaligned" in kernel:  # by offsets in memory: of rows nothing is declared
        assert not [t for t in declared if t.shape == (13, n)]
    else:
        assert any(t.dtype is dtype for t in declared) == are_aligned
