# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Rows of 16-bit numbers that stay packed while they are summed, in the interpreter."""

import dataclasses

import pytest
import torch
from helpers import BF16, FP16, FP32, make_inputs

ct = pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from test_cutile import CPU, run_backward, run_forward  # noqa: E402

from tilegym_rmsnorm.backends.cutile import interpreter  # noqa: E402
from tilegym_rmsnorm.backends.cutile.kernel_config import Config  # noqa: E402
from tilegym_rmsnorm.backends.cutile.rows import packed_row_as_float32, row_as_float32  # noqa: E402


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_number_is_the_same_once_packed(dtype):
    """All bits of all 16-bit numbers, NaN, infinities and zeros of either sign among them."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, -1)
    plain, packed = torch.empty(2, 1, 2**16)

    def widen(x, plain, packed):
        tiles = (ct.load(x, (0, 0), (1, 2**16)),)
        ct.store(plain, (0, 0), row_as_float32(tiles)[0])
        ct.store(packed, (0, 0), packed_row_as_float32(tiles)[0])

    interpreter.launch(widen, (1,), (numbers, plain, packed))
    assert torch.equal(packed.view(torch.int32), plain.view(torch.int32))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("width", "pieces"), [(128, 1), (32, 3)])
def test_packed_rows_give_the_same_bits(width, pieces, dtype):
    inputs = make_inputs(6, 84, dtype, FP32, offset=1.0, device=CPU)
    inputs.x[0], inputs.x[1, :2] = 0.0, torch.tensor([-0.0, torch.finfo(dtype).tiny / 2])
    plain = Config("rows", width, 4, 1, 2, pieces=pieces)
    packed = Config("rows", width, 4, 1, 2, pieces=pieces, packed=True)
    by_tma = dataclasses.replace(packed, tma=True)
    for run, configs in ((run_forward, (packed,)), (run_backward, (packed, by_tma))):
        expected = run(inputs, plain)
        for config in configs:
            got = run(inputs, config)
            for name, value in expected.items():
                bits = torch.int32 if value.dtype == FP32 else torch.int16
                assert torch.equal(got[name].view(bits), value.view(bits)), (name, config)
