# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Machine code of kernels, for what no result tells: fused multiplications, loops that ask anew, wide loads of aligned
rows, few branches around loads, loads of weight before the first sum, heads, and subnormal numbers, which
tests/backends/test_extremes.py shows on a GPU alone."""

import re
from collections import Counter
from dataclasses import replace

import compiling
import helpers
import pytest
import torch
from compiling import (
    CompilingMachine,
    assert_sound,
    code_of_call,
    disassembled,
    run_backward,
    run_forward,
    skip_without_disassembler,
)
from control_flow import loops
from helpers import BF16, FP16, FP32, in_turn
from narrow_variants import BACKWARDS, FORWARDS, KERNELS
from planning import by_rules, device
from tile_runs import Outputs, Tile, backward_call
from variants import Variant, make

from tilegym_rmsnorm.backends.cutile.plans import variants
from tilegym_rmsnorm.backends.cutile.plans.partition import Split
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardSplitReread,
    ForwardRows,
    ForwardTeam,
    ForwardTiles,
)

skip_without_disassembler()


@pytest.mark.parametrize(
    ("n", "choice", "least"),
    [
        (4096, variants.BackwardRows(width=4096, warps=8, occupancy=1, latency=6), 0.6),
        (4096, variants.BackwardTiles(width=4096, warps=8, occupancy=1, latency=4, tma=True), 0.6),
        (32768, by_rules("backward", 32768), 0.6),
        (
            4096,
            by_rules("backward", 4096, size="few"),
            0.4,
        ),  # its blocks for dw multiply dy and rstd once more
    ],
)
def test_two_of_five_multiplications_are_fused_with_an_addition(n, choice, least, tmp_path):
    """An early return in terms_of_dw, or dx as g - x * factor, would leave one of them in two instructions: h, g and
    their product with x are multiplied, dw and dx multiplied and added."""
    machine = CompilingMachine(90, keep=tmp_path)
    run_backward(machine, choice, n, BF16, BF16)
    [cubin] = tmp_path.glob("backward_*.cubin")
    code = disassembled(cubin)
    multiplied, fused = (sum(f" {name} " in line for line in code) for name in ("FMUL", "FFMA"))
    assert least * multiplied < fused < multiplied, (multiplied, fused)


def test_a_team_asks_for_its_slots_again_and_again(tmp_path):
    """A compiler that took the question out of the loop would leave one that never ends. Atomics are what it keeps."""
    machine = CompilingMachine(90, keep=tmp_path)
    choice = by_rules("backward", 32768)
    assert isinstance(choice.first, variants.BackwardPipelinedTeam)
    run_backward(machine, choice, 32768, BF16, BF16)
    code = disassembled(tmp_path / "backward_pipelined_team.cubin")
    lines = [[code[place] for place in places] for places in loops(code)]
    # The loop over rows writes dx.
    asking = [loop for loop in lines if not any("STG" in line for line in loop)]
    assert any("ATOMG.E.OR" in line for loop in asking for line in loop)


compiling.skip_without_disassembler()

WIDE_LOADS = BF16, FP32
# What goes through a row as another of these does: so --every-config alone reads it.
ALIKE = (
    ("forward", "rows, joint"),
    ("forward", "tiles, early"),
    ("forward", "teams, joint"),
    ("forward", "unaligned teams"),
    ("backward", "rows, equal tiles"),
    ("backward", "teams by TMA"),
    ("backward", "unaligned teams"),
    ("backward", "split, reread, ahead"),
)
READ = [kernel for kernel in KERNELS if helpers.every_config or kernel not in ALIKE]


@pytest.mark.parametrize("dtype", WIDE_LOADS)
@pytest.mark.parametrize(("op", "kernel"), READ)
def test_aligned_rows_are_loaded_and_stored_as_those_of_multiples_of_16(op, kernel, dtype, tmp_path):
    """16 bytes at a time as often as there: 100000x72 in 11.8 us instead of 43.7, its backward in 24.6 instead of 87.2
    (bfloat16, an H100). Without --every-config one dtype and the other in turn."""
    helpers.skip_without_every_config(dtype is not WIDE_LOADS[READ.index((op, kernel)) % 2])
    widths = (1160 if dtype is BF16 else 1164, 1168)
    found, wanted = (accesses(op, kernel, n, dtype, tmp_path / str(n)) for n in widths)
    assert found and found == wanted


def accesses(op, kernel, n, dtype, folder):
    """Count each instruction on global memory in the kernels of a forward or backward, by 16 times as many columns a
    tile: more than one a thread."""
    folder.mkdir()
    # before Hopper the kernel that comes with strips, backward_means, goes without TMA: it needs the divisor there
    machine = compiling.CompilingMachine(80 if kernel == "strips" else 90, keep=folder)
    variant = FORWARDS[kernel] if op == "forward" else BACKWARDS[kernel]
    variant = replace(variant, width=16 * variant.width)
    if getattr(variant, "rest", 0):
        variant = replace(variant, rest=16 * variant.rest)
    if op == "forward":
        compiling.run_forward(machine, variant, n, dtype, dtype)
    elif isinstance(variant, Split):
        variant = replace(variant, rows=64, slab=128)
        compiling.run_backward(machine, variant, n, dtype, dtype, m=128)
    else:
        compiling.run_backward(machine, variant, n, dtype, dtype, has_dw=kernel != "dx, reread")
    return {
        cubin.stem: Counter(re.findall(r"\b(?:LDG|STG|LDGSTS)\.\S+", " ".join(compiling.disassembled(cubin))))
        for cubin in folder.glob("*.cubin")
    }


@pytest.mark.parametrize("n", [32768, 131072])
def test_slabs_have_no_branch_around_each_load(n, tmp_path):
    """`rows.at_least_zero` leaves 7 branches instead of 31 for 37 loads, of tiles of 1024 columns, and 7 instead of 19
    for 31, of tiles of 512, beside the one in front of the wait (`wait_for_launch_before`)."""
    machine = CompilingMachine(90, keep=tmp_path)
    slabs = by_rules("backward", n, size="few", facts=device(most_members=1))
    assert isinstance(slabs.first, BackwardSplitReread)
    run_backward(machine, slabs, n, torch.bfloat16, torch.bfloat16, m=128)
    code = disassembled(tmp_path / "backward_split_reread.cubin")
    assert "BRA" in code[next(place for place, line in enumerate(code) if "ACQBULK" in line) - 1]
    branches, loads = (sum(f" {name}" in line for line in code) - (name == "BRA") for name in ("BRA", "LDG"))
    assert 4 * branches < loads, (branches, loads)


LOAD = re.compile(r"\bLDG\b")
SUMMED = re.compile(r"\bSHFL\b")  # across the lanes of a warp; across warps, by shared memory, comes behind
SHARED = re.compile(r"\b(?:STS|LDS)\b")


def forward_code(folder, variant, n, dtype, weight_dtype=None):
    [code] = [
        code
        for name, code in code_of_call(folder, "forward", variant, n, dtype, weight_dtype or dtype).items()
        if name != "clear_board"
    ]
    return code


def places(pattern, code):
    return [place for place, line in enumerate(code) if pattern.search(line)]


# Those of which the machine code was read; the first three load the weight behind the first sum otherwise.
ROWS = [
    (4096, FP16, ForwardRows(width=4096, warps=8, occupancy=3, latency=4)),
    (4096, FP32, ForwardRows(width=4096, warps=8, occupancy=3, latency=4)),
    (4096, FP16, ForwardRows(width=2048, warps=4, occupancy=2, latency=4, rest=2048)),
    (8192, BF16, ForwardRows(width=8192, warps=8, occupancy=2, latency=4)),
    (16384, BF16, ForwardRows(width=2048, warps=8, occupancy=2, latency=4, pieces=8, packed=True)),
]


@pytest.mark.parametrize(("n", "dtype", "variant"), ROWS)
def test_rows_ask_for_x_and_the_weight_before_any_sum(n, dtype, variant, tmp_path):
    code = forward_code(tmp_path, replace(variant, weight_load="joint"), n, dtype)
    loads, sums, [signal] = places(LOAD, code), places(SUMMED, code), places(re.compile("PREEXIT"), code)
    assert loads and max(loads) < min(sums), "all loads come first"
    assert signal < min(loads), "and the signal before them"
    late = forward_code(tmp_path, variant, n, dtype)
    assert max(places(LOAD, late)) > min(places(SUMMED, late)), "nothing would be gained"


@pytest.mark.parametrize(("n", "dtype"), [(4096, BF16), (4104, FP16)])
def test_aligned_rows_of_16_bits_are_taken_two_elements_at_a_time(n, dtype, tmp_path):
    """One at a time each has a permute of its own: 8192x8192 95.9 us instead of 91.5 (bfloat16, an H100)."""
    variant = ForwardRows(width=4096, warps=8, occupancy=3, latency=4, rest=0 if n == 4096 else 512)
    joint, early = (
        forward_code(tmp_path, replace(variant, weight_load=when), n, dtype) for when in ("joint", "early")
    )
    elements = variant.lanes // (32 * variant.warps)
    most = len(early) + 2 * elements  # one for two elements, and some to begin with
    assert len(joint) < most


TILES = [
    (64, ForwardTiles(width=64, warps=4, occupancy=4, latency=4, rows=32)),
    (256, ForwardTiles(width=256, warps=4, occupancy=4, latency=4, rows=8)),
    (512, ForwardTiles(width=128, warps=4, occupancy=2, latency=4, rows=8, pieces=4)),
]
DTYPES = [(BF16, BF16), (FP32, FP32), (FP16, FP16), (BF16, FP32)]


@pytest.mark.parametrize(("tile", "dtypes"), in_turn(TILES, DTYPES, of=2))
def test_tiles_ask_for_x_and_the_weight_before_any_sum(tile, dtypes, tmp_path):
    (n, variant), (dtype, weight) = tile, dtypes
    code = forward_code(tmp_path, replace(variant, weight_load="joint"), n, dtype, weight)
    loads, sums = places(LOAD, code), places(SUMMED, code)
    assert loads and max(loads) < min(sums)
    if weight is dtype and variant.width * dtype.itemsize <= 512:
        assert not places(SHARED, code), "each thread asked for what it multiplies by"


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("warps", [4, 8])
def test_rows_of_a_warp_are_summed_without_shared_memory(dtype, warps, tmp_path):
    width = 512 // dtype.itemsize
    settings = {"warps": warps, "occupancy": 2, "latency": 4, "rows": warps, "weight_load": "joint"}
    code = forward_code(tmp_path, ForwardTiles(width=width, pieces=1024 // width, **settings), 1024, dtype)
    assert places(SUMMED, code) and not places(SHARED, code)
    in_one_tile = forward_code(tmp_path, ForwardTiles(width=1024, **settings), 1024, dtype)
    assert places(SHARED, in_one_tile), "nothing would be gained"


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_of_a_warp_spill_none_where_they_serve(dtype):
    """Eight blocks of them share an SM's registers: with the offset added to all tiles of the weight at the end, 80
    bytes a thread spilled, and 32768x1024 took 46.6 us instead of 33.7 (float16, an H200)."""
    machine = CompilingMachine(90)
    run_forward(machine, by_rules("forward", 1024, dtype, "large"), 1024, dtype, dtype)
    [compiled] = machine.results
    assert compiled.variant.pieces > 1 and compiled.variant.occupancy == 8
    assert_sound(machine)


@pytest.mark.parametrize(
    ("n", "dtype", "variant"),
    [
        (32768, BF16, ForwardTeam(width=8192, warps=8, occupancy=2, latency=4, members=4)),
        (65536, BF16, ForwardTeam(width=8192, warps=4, occupancy=2, latency=2, members=8, packed=True)),
    ],
)
def test_teams_ask_for_the_weight_before_any_sum(n, dtype, variant, tmp_path):
    joint, late = (
        forward_code(tmp_path, each, n, dtype) for each in (replace(variant, weight_load="joint"), variant)
    )
    for code, is_late in ((joint, False), (late, True)):
        loads, sums = places(LOAD, code), places(SUMMED, code)
        assert any(min(loads) < each < max(loads) for each in sums) is is_late


@pytest.mark.parametrize("n", [2048, 4096, 14336, 20480] if helpers.every_config else [2048, 14336])
def test_a_float32_weight_comes_to_the_threads_that_need_it(n, tmp_path):
    """Tiles of x of 16 bits give a thread four elements, 16 bytes of the weight. In the rules' tiles of eight the
    weight goes through shared memory."""
    own, rule = (by_rules("forward", n, BF16, weight=weight).first for weight in (FP32, BF16))
    through_memory = {}
    for variant in (own, rule):
        code = code_of_call(tmp_path, "forward", variant, n, BF16, FP32)["forward_rows"]
        through_memory[variant] = sum("STS.128" in line or "LDS.128" in line for line in code)
    assert through_memory[own] == 0 < through_memory[rule]


PLAIN = Variant(BF16, (2, 32, 32, 128), weight_dtype=BF16, layout="heads")


@pytest.mark.parametrize("tile", [Tile(rows=1, heads=16, tma=True), Tile(rows=4, heads=4, tma=True)], ids=str)
def test_strided_heads_come_by_tma(tile, tmp_path):
    """A backward of a q slice and a transposed dy has LDG for rstd and the weight alone, and STG for dw alone."""
    inputs = make(PLAIN, device=torch.device("cpu"))
    call = backward_call(PLAIN, inputs, inputs.x, tile, 2, Outputs())
    call.named["DEPENDENT"] = True
    hints = ForwardTiles(width=call.named["WIDTH"], warps=4, occupancy=2, latency=2)
    machine = CompilingMachine(90, keep=tmp_path)
    machine.bind(call.kernel, hints, call.arguments(True))((call.blocks,), call.arguments(False))
    code = " ".join(disassembled(tmp_path / "backward_tiles.cubin"))
    found = Counter(re.findall(r"\b(LDG|STG|UTMALDG|UTMASTG)\b", code))
    assert found["UTMALDG"] and found["UTMASTG"], found
    assert found["LDG"] <= 4 and found["STG"] <= 2, found


N = 96


@pytest.mark.parametrize("architecture", [90, 100])
def test_no_cutile_kernel_flushes_subnormal_numbers(architecture, tmp_path):
    """MUFU.RSQ does, so the compiler scales what is below 1.2e-38 first."""
    helpers.skip_without_every_config(architecture != 90)
    calls = [
        ("forward", variant) for variant in (FORWARDS[name] for name in ("rows", "tiles", "teams", "reread"))
    ]
    calls += [("backward", BACKWARDS[name]) for name in ("rows", "tiles", "split", "strips")]
    for op, variant in calls:
        for name, code in code_of_call(tmp_path, op, variant, N, FP32, FP32, architecture).items():
            assert not [line for line in code if re.search(r" (FADD|FMUL|FFMA|MUFU)\S*\.FTZ", line)], name
            if name.startswith("forward"):
                assert any("MUFU.RSQ" in line for line in code), name
                assert any("1.175494350822287508e-38" in line for line in code), name
