# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Hopper's rules, of which each size class has its own: compiled, whole and with the last tile cut off."""

import itertools
from dataclasses import replace

import helpers
import pytest
import torch
from compiling import (
    WIDEST,
    CompilingMachine,
    assert_sound,
    run_backward,
    run_forward,
    sampled,
    skip_without_compiler,
)
from planning import by_rules
from sweeps import beside_float32

from tilegym_rmsnorm.backends.cutile.plans.partition import Team
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardRows

skip_without_compiler()

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RUNS = {"forward": run_forward, "backward": run_backward}


def is_whole(variant: Variant, n: int) -> bool:
    """Whether the tiles end where the row does."""
    return variant.constants(n).get("EVEN", False)


@pytest.mark.parametrize(("op", "size", "dtype"), helpers.in_turn(RUNS, SIZES, [BF16, FP32], of=2))
def test_hopper_choices_of_every_size_whole_and_cut_off(op, size, dtype):
    """Aligned rows, whose rules are measurements, with the widest whose last tile is cut off. A sample of whole rows
    or of cut off ones, of one dtype, in turn; all of both by --every-config."""
    machine, lanes, widths = CompilingMachine(90), 16 // dtype.itemsize, {True: {}, False: {}}
    for n in range(lanes, WIDEST, lanes):
        if (n <= 12288 or n % 16 == 0) and (rows := rows_of_class(size, n)):
            choice = by_rules(op, n, dtype, size)
            widths[is_whole(choice.first, n)][choice] = n, max(rows[0], 16)
    turn = (op == "forward") is not (size == SIZES[0])
    for whole, choices in widths.items():
        if whole is not turn and not helpers.every_config:
            continue
        for choice, (n, m) in sampled(choices.items()):
            RUNS[op](machine, choice, n, dtype, dtype, m=m)
    assert_sound(machine)


@pytest.mark.parametrize("dtype", [BF16, FP16] if helpers.every_config else [BF16])
def test_rows_whose_last_tile_is_cut_off_spill_no_more(dtype):
    """Forwards of 14352 to 18416 columns did by their rules of then, and backwards of 12304 to 16368, which took 18 to
    21 % longer so; 16384 and 18432, which had been tuned, did not. Backwards of 14352 to 16368 still take 16 bytes.
    float16 with --every-config alone."""
    machine = CompilingMachine(90)
    for n, size in itertools.product((14352, 16368, 18416), ("large", "few")):
        run_forward(machine, by_rules("forward", n, dtype, size), n, dtype, dtype)
    for n in (8200, 12304, 14320):
        run_backward(machine, by_rules("backward", n, dtype), n, dtype, dtype)
    assert not [each for each in machine.results if each.stack]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("op", "size"), [*(("forward", size) for size in SIZES), ("backward", "large")])
def test_choices_beside_a_float32_weight_whole_and_cut_off(op, size, dtype):
    """Each with the widest row that fills its tiles, and with the widest whose last tile is cut off. Without
    --every-config a sample of whole rows or of cut off ones, in turn, and no float16."""
    if dtype is FP16 and not helpers.every_config:
        pytest.skip("compiled with --every-config")
    machine, widths = CompilingMachine(90), {True: {}, False: {}}
    for n in (*range(8, 66000, 8), 73728, 131072):
        choice = beside_float32(op, n, size)
        if choice is not None and rows_of_class(size, n):
            variant = choice.first
            members = {"members": 1} if isinstance(variant, Team) else {}
            kind = replace(variant, pieces=variant.pieces // 16, **members)
            widths[is_whole(variant, n)][kind, choice.source] = n, choice
    turn = bool(([*RUNS].index(op) + SIZES.index(size)) % 2)
    for whole, cases in widths.items():
        if whole is not turn and not helpers.every_config:
            continue
        for n, choice in sampled(cases.values()):
            RUNS[op](machine, choice, n, dtype, FP32, m=max(rows_of_class(size, n)[0], 16))
    assert_sound(machine)


WIDE = [16400, 18448, 81920, 114672]
PAIRS = [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32)]


@pytest.mark.parametrize(("dtypes", "n"), helpers.in_turn(PAIRS, WIDE, of=len(WIDE)), ids=str)
def test_wide_backwards_spill_no_more_than_their_rules_say(dtypes, n):
    """Each weight is tried, casting once and as llama, with dw and dx alone, of many rows and of few. Without
    --every-config each pair of dtypes at one width and by one casting, with dw of many rows and dx of few, or the other
    way round, in turn."""
    (dtype, weight_dtype), number = dtypes, PAIRS.index(dtypes)
    castings = (False, True) if weight_dtype.itemsize > dtype.itemsize else (False,)
    if not helpers.every_config:
        castings = (castings[number // 2 % len(castings)],)
    for size, has_dw, as_llama in itertools.product(("large", "few"), (True, False), castings):
        if (number + (size == "few") + has_dw) % 2 == 0 and not helpers.every_config:
            continue
        machine = CompilingMachine(90)
        choice = by_rules("backward" if has_dw else "dx", n, dtype, size)
        m = max(rows_of_class(size, n)[0], 16)
        run_backward(machine, choice, n, dtype, weight_dtype, as_llama, has_dw, m)
        assert_sound(machine)
        is_packed = getattr(choice.first, "packed", False)
        most = 0 if not choice.spills else 32 if not is_packed else 56 if as_llama else 16
        assert not [each for each in machine.results if each.stack > most], (size, has_dw, as_llama)


@pytest.mark.parametrize("n", [12304, 16384])
def test_float32_backwards_by_teams_of_two_spill_no_more(n):
    """One block in one tile took 112 and 56 bytes of stack, and 6 to 18 % longer on an H100."""
    machine, choice = CompilingMachine(90), by_rules("backward", n, FP32)
    run_backward(machine, choice, n, FP32, FP32)
    assert isinstance(choice.first, Team) and not [each for each in machine.results if each.stack]


@pytest.mark.parametrize("n", [32768, 65536])
def test_packed_rows_take_fewer_registers(n):
    """Why packing is there: one tile of 32768 columns, and a team's part of 65536."""
    registers = []
    variant = by_rules("forward", n).first if n > 32768 else by_rules("forward", 30720, size="few").first
    if isinstance(variant, ForwardRows):  # in one tile, and the weight, which takes registers too, late
        variant = replace(variant, width=n, pieces=1, weight_load="late")
    assert variant.packed
    for packed in (True, False):
        machine = CompilingMachine(90)
        run_forward(machine, replace(variant, packed=packed), n, BF16, BF16)
        registers.append(machine.results[-1].registers)
    assert registers[0] < 0.8 * registers[1], registers
