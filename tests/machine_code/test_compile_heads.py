# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Tile kernels of heads (B, T, H, N) and of rows with a residual and a bias, compiled by tileiras: no registers spill,
and no warp waits for some."""

import re
from collections import Counter

import pytest
import torch
from helpers import BF16, FP16, FP32, take_turns

pytest.importorskip("cuda.tile", reason="cuda-tile is not installed")
from compiling import (  # noqa: E402
    CompilingMachine,
    assert_sound,
    disassembled,
    skip_without_compiler,
    skip_without_disassembler,
)
from tile_runs import Outputs, Tile, backward_call, forward_call, normalized  # noqa: E402
from variants import Variant, make  # noqa: E402

from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardTiles  # noqa: E402

skip_without_compiler()

CPU = torch.device("cpu")
ARCHITECTURES = (80, 90, 100, 120)
PLAIN = Variant(BF16, weight_dtype=BF16, layout="heads")
HEADS = {
    "plain": PLAIN,
    "residual": PLAIN._replace(residual_dtype=BF16),
    "bias": PLAIN._replace(bias_dtype=BF16, casting="llama"),
    "per head": PLAIN._replace(weight="heads", bias_dtype=BF16),
    "all": PLAIN._replace(
        weight="heads", bias_dtype=FP32, residual_dtype=BF16, residual_out_dtype=FP32, alpha=0.5
    ),
    "float16 beside float32": Variant(FP16, weight_dtype=FP32, out_dtype=FP32, layout="mixed"),
}
# Heads, elements, and the tile: 2048 elements a forward's, as many or 4096 a backward's.
TILES = {
    "64": (32, 64, Tile(rows=4, heads=8, tma=True)),
    "80": (16, 80, Tile(rows=1, heads=16)),
    "96 in pieces": (28, 96, Tile(rows=4, heads=4, pieces=3, tma=True)),
    "128": (32, 128, Tile(rows=1, heads=16, tma=True)),
    "128, 28 heads": (28, 128, Tile(rows=4, heads=4, tma=True)),
    "128, one head": (1, 128, Tile(rows=16, heads=1, tma=True)),
    "192": (8, 192, Tile(rows=1, heads=8, tma=True)),
    "256": (8, 256, Tile(rows=1, heads=8, tma=True)),
    "72, where rows are not multiples of 16": (40, 72, Tile(rows=2, heads=8)),
    "100, not aligned": (8, 100, Tile(rows=2, heads=4)),
    "128, begun elsewhere": (8, 128, Tile(rows=1, heads=8, gathers=True)),
}
ROWS = {
    "residual": PLAIN._replace(layout="contiguous", residual_dtype=BF16),
    "residual, bias": PLAIN._replace(layout="contiguous", residual_dtype=FP32, bias_dtype=BF16, alpha=0.5),
    "bias": PLAIN._replace(layout="contiguous", bias_dtype=BF16),
    "bias beside float32": PLAIN._replace(layout="contiguous", weight_dtype=FP32, bias_dtype=FP32),
}
TILES_OF_ROWS = {
    "late": (256, Tile(rows=8)),
    "early": (250, Tile(rows=8, weight_load="early")),
    "joint": (1024, Tile(rows=2, pieces=4, weight_load="joint")),
}


def compile_call(architecture, call, occupancy, **options):
    """With 4 warps. Before Hopper nothing is launched early."""
    call.named["DEPENDENT"], call.named["TMA"] = architecture >= 90, call.named["TMA"] and architecture >= 90
    machine = CompilingMachine(architecture, **options)
    hints = ForwardTiles(width=call.named["WIDTH"], warps=4, occupancy=occupancy, latency=2)
    machine.bind(call.kernel, hints, call.arguments(True))((call.blocks,), call.arguments(False))
    return machine


def forward_of(variant, tile):
    return forward_call(variant, make(variant, device=CPU), tile, Outputs())


def backward_of(variant, tile):
    inputs = make(variant, device=CPU)
    return backward_call(variant, inputs, normalized(variant, inputs), tile, 2, Outputs())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("switches", HEADS)
def test_heads_compile(switches, tile, architecture):
    number = [*HEADS].index(switches) * 2 + [*TILES].index(tile)
    take_turns(number, ARCHITECTURES.index(architecture) * 10, of=17)
    heads, n, tiles = TILES[tile]
    variant = HEADS[switches]._replace(size=(2, 32, heads, n))
    assert_sound(compile_call(architecture, forward_of(variant, tiles), occupancy=4))
    assert_sound(compile_call(architecture, backward_of(variant, tiles), occupancy=2))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tile", TILES_OF_ROWS)
@pytest.mark.parametrize("switches", ROWS)
def test_rows_compile(switches, tile, architecture):
    number = [*ROWS].index(switches) * 5 + [*TILES_OF_ROWS].index(tile)
    take_turns(number, ARCHITECTURES.index(architecture) * 3, of=7)
    n, tiles = TILES_OF_ROWS[tile]
    variant = ROWS[switches]._replace(size=(32, n))
    assert_sound(compile_call(architecture, forward_of(variant, tiles), occupancy=4))
    assert_sound(compile_call(architecture, backward_of(variant, tiles), occupancy=2))


@pytest.mark.parametrize("tile", [Tile(rows=1, heads=16, tma=True), Tile(rows=4, heads=4, tma=True)], ids=str)
def test_strided_heads_come_by_tma(tile, tmp_path):
    """Of a backward, a q slice and a transposed dy: no loads of global memory but of rstd and the weight, no stores but
    of dw."""
    skip_without_disassembler(is_module=False)
    call = backward_of(PLAIN._replace(size=(2, 32, 32, 128)), tile)
    compile_call(90, call, occupancy=2, keep=tmp_path)
    code = " ".join(disassembled(tmp_path / "backward_tiles.cubin"))
    found = Counter(re.findall(r"\b(LDG|STG|UTMALDG|UTMASTG)\b", code))
    assert found["UTMALDG"] and found["UTMASTG"], found
    assert found["LDG"] <= 4 and found["STG"] <= 2, found
