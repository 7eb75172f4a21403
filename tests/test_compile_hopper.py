# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Hopper's forwards, of whose rules each size class has its own: compiled, whole and with the last tile cut off."""

from dataclasses import replace

import pytest
import torch

from tilegym_rmsnorm.backends.cutile.config import forward_config
from tilegym_rmsnorm.backends.cutile.sizes import SIZES, rows_of_class

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")

from compiling import CompilingMachine, run_forward, sampled  # noqa: E402
from test_compile import WIDEST, assert_sound  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("size", SIZES)
def test_hopper_forwards_of_every_size_whole_and_cut_off(size, dtype):
    """Of aligned rows, whose rules are measurements, also the widest whose last tile is cut off: 16-bit rows of
    14352 to 18416 columns spilled, and 16384 and 18432, which had been tuned, did not. A sample; all by
    --every-config."""
    machine, lanes, widths = CompilingMachine(90), 16 // dtype.itemsize, {}
    for n in range(lanes, WIDEST, lanes):
        if (n <= 12288 or n % 16 == 0) and (rows := rows_of_class(size, n)):
            config = forward_config(n, dtype.itemsize, 90, size)
            widths[config, config.lanes == n] = n, max(rows[0], 16)
    for config, _, n, m in sampled((config, is_whole, n, m) for (config, is_whole), (n, m) in widths.items()):
        run_forward(machine, config, n, dtype, dtype, m=m)
    assert_sound(machine)


@pytest.mark.parametrize("n", [32768, 65536])
def test_packed_rows_take_fewer_registers(n):
    """Why packing is there: one tile of 32768 columns, and a team's part of 65536."""
    registers = []
    for packed in (True, False):
        machine = CompilingMachine(90)
        config = forward_config(n, 2, 90, "few")
        if config.kernel == "rows":  # in one tile, and the weight, which takes registers too, late
            config = replace(config, width=n, pieces=1, together=False)
        assert config.packed
        run_forward(machine, replace(config, packed=packed), n, BF16, BF16)
        registers.append(machine.results[-1].registers)
    assert registers[0] < 0.8 * registers[1], registers
