# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The kernels of the cutile backend, compiled by tileiras for every architecture, by a sample of the variants of all
widths up to WIDEST and some beyond: one at least of each kernel that serves there. --every-config compiles all of
Hopper's and of the entries, and a larger sample of the others.

Hopper's rules, of which each size class has its own, are compiled whole and with the last tile cut off. `tune` tries
backwards of rows and of teams by TMA on any GPU from Hopper on, and one whose warps wait for registers that nobody
gives back would hang there."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import cuda.tile as ct
import helpers
import pytest
import torch
from compiling import (
    WIDEST,
    CompilingMachine,
    assert_ends,
    assert_sound,
    disassembled,
    meta,
    run_backward,
    run_forward,
    sampled,
    skip_without_compiler,
)
from helpers import BF16, FP16, FP32, in_turn
from planning import by_rules, plan, problem, rules_of
from sweeps import beside_float32, shipped_entries

from tilegym_rmsnorm.backends.cutile.host.norm import Backward
from tilegym_rmsnorm.backends.cutile.kernels.pdl import wait_for_launch_before
from tilegym_rmsnorm.backends.cutile.kernels.rows import load_tile
from tilegym_rmsnorm.backends.cutile.kernels.tiles import ConstInt
from tilegym_rmsnorm.backends.cutile.kernels.weights import load_scale_tile
from tilegym_rmsnorm.backends.cutile.plans.partition import Team
from tilegym_rmsnorm.backends.cutile.plans.rules import ARCHITECTURES, sum_of
from tilegym_rmsnorm.backends.cutile.plans.select import Choice, select
from tilegym_rmsnorm.backends.cutile.plans.sizes import SIZES, rows_of_class, size_class
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardRows,
    ForwardRows,
    ForwardTiles,
)
from tilegym_rmsnorm.backends.cutile.tuning.search import rows_of

skip_without_compiler()
TIMED_STACK = 24  # bytes that an entry's variant may spill: H200, float32 18432; bfloat16 16384 takes 8
# What it spills beside another weight than it was timed with: bfloat16 beside float32, on an H100.
UNTIMED_STACK = {("dx", "bfloat16", 18432, torch.float32): 80}
SIBLINGS = (86, 89, 103)  # have the rules of sm_80 and sm_100


def step_of(itemsize: int, architecture: int) -> int:
    """Return the step between sampled choices: all of Hopper's, which are measurements; elsewhere a third of those of
    2-byte elements, half as many of float32, and fewer for siblings."""
    if architecture == 90:
        return 1
    return 9 if architecture in SIBLINGS else 6 if itemsize == 4 else 3


def thinned(widths: Sequence[int]) -> Sequence[int]:
    """Keep one of 16 columns beyond 4096 without --every-config: asking for the rest takes longer than compiling."""
    if helpers.every_config or not isinstance(widths, range):
        return widths
    narrow, step = [n for n in widths if n <= 4096], 16 // widths.step
    return [*narrow, *widths[len(narrow) + step - 1 :: step]]


def widths_of_choices(
    op: str, size: str, dtype: torch.dtype, architecture: int, among=range(1, WIDEST), with_tma=False
) -> list[tuple[Choice, int]]:
    """A sample of what the rules choose for these widths, or of that by TMA, each with the widest that is a multiple of
    16, or else the widest."""
    widths = {}
    for n in thinned(among):
        choice = by_rules(op, n, dtype, size, architecture=architecture)
        if size == "few" and choice == by_rules(op, n, dtype, architecture=architecture):
            continue  # tested as that of other sizes
        if (choice.first.uses_tma or not with_tma) and (n % 16 == 0 or widths.get(choice, n) % 16):
            widths[choice] = n
    return sampled(widths.items(), step_of(dtype.itemsize, architecture))


def run_dx(machine, choice, n, dtype, weight_dtype, m=4096):
    run_backward(machine, choice, n, dtype, weight_dtype, has_dw=False, m=m)


RUNS = {"forward": run_forward, "backward": run_backward, "dx": run_dx}


# Siblings share their rules with another architecture: without --every-config they compile one backward. Of Hopper
# The tests of Hopper below then compile as many kernels, of each size. The dtypes take turns: where one is compiled
# forwards, the other is backwards.
DTYPES = [BF16, FP32]
OTHERS = [each for each in ARCHITECTURES if helpers.every_config or each not in (90, *SIBLINGS)]


@pytest.mark.parametrize(("architecture", "dtype"), in_turn(OTHERS, DTYPES, of=2))
def test_forward_choices(architecture, dtype):
    machine = CompilingMachine(architecture)
    for choice, n in widths_of_choices("forward", "large", dtype, architecture):
        run_forward(machine, choice, n, dtype, dtype)
    assert_sound(machine)


@pytest.mark.parametrize(("architecture", "dtype"), in_turn(OTHERS, DTYPES[::-1], of=2))
def test_backward_choices(architecture, dtype):
    machine = CompilingMachine(architecture)
    for choice, n in widths_of_choices("backward", "large", dtype, architecture):
        run_backward(machine, choice, n, dtype, dtype)
    assert_sound(machine)


@pytest.mark.parametrize(("architecture", "dtype"), [*zip(SIBLINGS, (BF16, FP32, BF16), strict=True)])
def test_siblings(architecture, dtype):
    """With --every-config the tests of the others compile theirs too."""
    machine, n = CompilingMachine(architecture), 4096
    run_backward(machine, by_rules("backward", n, dtype, architecture=architecture), n, dtype, dtype)
    assert_sound(machine)


@pytest.mark.parametrize(("architecture", "dtype"), in_turn(OTHERS, DTYPES, of=2))
def test_backward_choices_for_few_rows(architecture, dtype):
    machine = CompilingMachine(architecture)
    for choice, n in widths_of_choices("backward", "few", dtype, architecture):
        run_backward(machine, choice, n, dtype, dtype, m=128)
    assert_sound(machine)


ODD = [("forward", "large"), ("backward", "large"), ("backward", "few")]


@pytest.mark.parametrize(("architecture", "run"), in_turn([80, 90, 100, 120], ODD, of=2), ids=str)
def test_odd_widths(architecture, run):
    """Bounds checks, and strides that are no multiple of 16 bytes. Without --every-config backwards of many rows on
    every second architecture, the others on those between."""
    (op, size), machine = run, CompilingMachine(architecture)
    for choice, n in widths_of_choices(op, size, BF16, architecture, range(1, WIDEST, 2)):
        RUNS[op](machine, choice, n, BF16, BF16)
    assert_sound(machine)


@pytest.mark.parametrize(
    ("architecture", "op", "dtype"), in_turn([80, 90], ["forward", "backward"], DTYPES, of=3)
)
def test_widths_that_are_no_multiple_of_16(architecture, op, dtype):
    """Rows of these begin at multiples of 16 bytes, and their last tile is cut off at one. Without --every-config
    forwards of bfloat16 before Hopper, and on it backwards of float32."""
    machine, step = CompilingMachine(architecture), 16 // dtype.itemsize
    among = [n for n in range(step, WIDEST, step) if n % 16]
    for choice, n in widths_of_choices(op, "large", dtype, architecture, among):
        RUNS[op](machine, choice, n, dtype, dtype)
    assert_sound(machine)


VARIANTS = {
    "float16": dict(dtype=FP16, weight_dtype=FP16),
    "float32 weight": dict(dtype=BF16, weight_dtype=FP32),
    "llama casting": dict(dtype=BF16, weight_dtype=BF16, round_xhat=True),
    "no weight": dict(dtype=BF16, weight_dtype=None),
}


ONE_WIDTH_PER_KERNEL = (128, 2048, 5120, 18432, 40000, 65536)
OF_VARIANTS = (80, 90, 120)  # architectures


@pytest.mark.parametrize(("architecture", "variant"), in_turn(OF_VARIANTS, VARIANTS, of=2))
def test_variants(architecture, variant):
    """Without --every-config two on each architecture, and each of the widths once."""
    machine = CompilingMachine(architecture)
    op = "dx" if VARIANTS[variant]["weight_dtype"] is None else "backward"
    turn = [*VARIANTS].index(variant) // 2 + 2 * OF_VARIANTS.index(architecture)
    widths = ONE_WIDTH_PER_KERNEL
    for n in widths if helpers.every_config else widths[turn::6]:
        run_forward(machine, by_rules("forward", n, architecture=architecture), n, **VARIANTS[variant])
        for size in ("few", "large"):
            choice = by_rules(op, n, size=size, architecture=architecture)
            run_backward(machine, choice, n, **VARIANTS[variant])
    assert_sound(machine)


@pytest.mark.parametrize("architecture", OF_VARIANTS)
def test_frozen_weight_and_one_partial_row_per_row(architecture):
    """Without --every-config every third width, others on each architecture, dx of few rows and of many in turn."""
    machine = CompilingMachine(architecture)

    def run_own_partials(n, dtype):
        asked = problem("backward", n, dtype, facts=machine.facts, partials="own")
        own = select(asked, rules_of(architecture))
        run_backward(machine, Choice(own.first, own.source, own.spills), n, dtype, dtype, partials="own")

    widths, turn = ONE_WIDTH_PER_KERNEL, OF_VARIANTS.index(architecture)
    for n in widths if helpers.every_config else widths[turn::3]:
        for size in ("large", "few") if helpers.every_config else (("large", "few")[widths.index(n) > 2],):
            run_dx(machine, by_rules("dx", n, size=size, architecture=architecture), n, BF16, BF16)
        run_own_partials(n, BF16)
    # Tiles by Hopper's rules: rows of two, with their warps.
    for n in (2048, 5120, 6144) if architecture == 90 else ():
        run_own_partials(n, FP32)
    for n in (33000, 33001) if helpers.every_config else (33000 + turn % 2,):
        run_dx(machine, by_rules("dx", n, architecture=architecture), n, BF16, None)
    run_dx(machine, by_rules("dx", 40000, FP32, architecture=architecture), 40000, FP32, FP32)
    assert_sound(machine)


@pytest.mark.parametrize("architecture", [90, 100, 120])
def test_tma_of_single_rows_and_columns_and_of_odd_numbers(architecture):
    """Kernels apart: extents of 1 are compiled in, and which ones are multiples of 16. So few rows may spill. With
    --every-config both numbers of each choice, and Hopper's float32; else 33, on Hopper one and the other in turn, and
    elsewhere the backward on sm_100 and the other two on sm_120."""
    machine = CompilingMachine(architecture)
    for dtype in (BF16, FP32) if architecture == 90 and helpers.every_config else (BF16,):
        for op, run in RUNS.items():
            is_left_out = architecture != 90 and (architecture == 100) != (op == "backward")
            if is_left_out and not helpers.every_config:
                continue
            choices = widths_of_choices(op, "large", dtype, architecture, with_tma=True)
            for number, (choice, n) in enumerate(choices):
                is_one_row = architecture == 90 and number % 2
                for m in (1, 33) if helpers.every_config else (1 if is_one_row else 33,):
                    run(machine, choice, n, dtype, dtype, m=m)
            for m in (33, 4112) if helpers.every_config else (33,):
                run(machine, by_rules(op, 1, dtype, architecture=architecture), 1, dtype, dtype, m=m)
    assert_ends(machine)


def tiles_by_tma(y, rstd, x, weight, inv_n, ROWS: ConstInt, WIDTH: ConstInt, LATENCY: ConstInt):
    """The forward of tiles by TMA, which this package does not have."""
    i = ct.bid(0)
    wait_for_launch_before(i)
    tx = load_tile(x, (i, 0), (ROWS, WIDTH), LATENCY, True, WIDTH)
    tscale = load_scale_tile(weight, 0, WIDTH, 0.0, True, WIDTH)
    ct.grid_dependency_control_launch_dependents()
    trstd = ct.rsqrt(ct.sum(tx * tx, axis=1, keepdims=True) * inv_n)
    ct.store(rstd, (i,), ct.reshape(trstd, (ROWS,)), allow_tma=False)
    ct.store(y, (i, 0), ct.astype(tx * trstd * tscale, y.dtype), allow_tma=True)


def test_a_kernel_that_asks_for_registers_that_its_block_lacks_is_seen():
    """A forward of 33 x 1 never ended on an H100: so none of tiles has TMA."""
    machine = CompilingMachine(90)
    variant = ForwardTiles(width=8, warps=4, occupancy=4, latency=4, rows=256)
    x = meta(33, 8, dtype=FP32)
    arguments = x, meta(33, dtype=FP32), x, meta(8, dtype=FP32), 1 / 8
    machine.bind(tiles_by_tma, variant, (256, 8, 4))((1,), arguments)
    with pytest.raises(AssertionError, match="wait forever for registers"):
        assert_ends(machine)


WIDE = [50960, 58240, 65536, 67584, 81920, 98288, 131072]


@pytest.mark.parametrize("n", WIDE)
def test_teams_of_the_widest_rows(n):
    """The dtypes take turns without --every-config."""
    machine = CompilingMachine(90)
    for dtype in (BF16, FP32) if helpers.every_config else ((BF16, FP32)[WIDE.index(n) % 2],):
        run_forward(machine, by_rules("forward", n, dtype), n, dtype, dtype)
        run_backward(machine, by_rules("backward", n, dtype), n, dtype, dtype)
    assert_sound(machine)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
def test_entries_that_ship(op, dtype):
    """float16 has dw only, and dx alone bfloat16 only, without --every-config."""
    is_left_out = dtype != "bfloat16" and op == "dx" or (op, dtype) == ("forward", "float16")
    helpers.skip_without_every_config(is_left_out)
    shipped = shipped_entries(op, dtype)
    if dtype == "float16":  # what it shares is compiled as bfloat16, if at all
        shared = {(each.n, each.bucket.weight, each.variant) for each in shipped_entries(op, "bfloat16")}
        shipped = [each for each in shipped if (each.n, each.bucket.weight, each.variant) not in shared]
    if not shipped:
        pytest.skip(f"no entry of {op} and {dtype} ships")
    machines, its_dtype = {}, getattr(torch, dtype)
    for each in sampled(shipped):
        most_stack = UNTIMED_STACK.get((op, dtype, each.n, each.weight_dtype), TIMED_STACK)
        machine = machines.setdefault((each.architecture, most_stack), CompilingMachine(each.architecture))
        most = rows_of(each.bucket)[0]
        for m in {most, 33 if each.variant.uses_tma and helpers.every_config else most}:
            RUNS[op](machine, each.choice, each.n, its_dtype, each.weight_dtype, m=m)
            # dx alone, of bfloat16. Rows then need fewer registers; below some of those by TMA are compiled
            is_of_rows = isinstance(each.variant, (BackwardRows, BackwardPipelined))
            compiles_dx = helpers.every_config or dtype == "bfloat16" and not is_of_rows
            if op == "backward" and compiles_dx and each.variant.serves_dx_alone:
                run_dx(machine, each.choice, each.n, its_dtype, each.weight_dtype, m=m)
    for (_, most_stack), machine in machines.items():
        assert_sound(machine, most_stack)


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_a_backward_sums_by_the_variant_for_its_kernel_and_architecture(architecture, monkeypatch):
    machine, bound = CompilingMachine(architecture, compiles=False), []
    monkeypatch.setattr(machine, "bind", lambda function, variant, constants: bound.append(variant))
    for n, size in ((2560, "large"), (8192, "large"), (65536, "large"), (18432, "few")):
        choice = by_rules("backward", n, size=size)
        Backward(machine, plan(choice, "backward", n, size=size, facts=machine.facts))
        assert bound[-1] == sum_of(choice.first, n, architecture)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
@pytest.mark.parametrize("n", [128, 2048, 4096, 5000, 40000, 65536])
def test_batch_sizes_and_eps_compile_nothing_new(n, weight_dtype):
    """Each variant, of one size class or several, compiles once for each class of M and of P that cuda-tile tells
    apart: 1, multiples of 16, others. The sum of dw has a variant of its own, and no M."""
    symbols, expected = defaultdict(set), defaultdict(set)
    for m in (1, 2, 16, 100, 128, 1000, 4096, 5000, 65536, 131072, 524288):
        size = size_class(m, n)
        forward, backward = (
            by_rules(op, n, BF16, size, weight_dtype).first for op in ("forward", "backward")
        )
        counting = CompilingMachine(90, compiles=False)
        for eps in (1e-6, 1e-5, 0.1):
            run_forward(counting, forward, n, BF16, weight_dtype, m=m, eps=eps)
            run_backward(counting, backward, n, BF16, weight_dtype, m=m)
        p = alignment(backward.partial_rows(m, n, counting.facts.sm_count))
        keys = {
            "forward": (forward, alignment(m)),
            "backward": (backward, alignment(m), p),
            "sum": (sum_of(backward, n, 90), p),
            "clear": (forward, backward, alignment(m), p),
        }
        for name, found in counting.symbols.items():
            symbols[name] |= found
            expected[name].add(keys[name.partition("_")[0]])
    for name, found in symbols.items():
        assert len(found) <= len(expected[name]), f"{name}: {len(found)} compilations for {expected[name]}"


def alignment(extent: int) -> str:
    return "one" if extent == 1 else "multiple of 16" if extent % 16 == 0 else "other"


PASSES = {"forward": run_forward, "backward": run_backward}


def is_whole(variant: Variant, n: int) -> bool:
    """Whether the tiles end where the row does."""
    return variant.constants(n).get("EVEN", False)


@pytest.mark.parametrize(("op", "size", "dtype"), helpers.in_turn(PASSES, SIZES, [BF16, FP32], of=2))
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
            PASSES[op](machine, choice, n, dtype, dtype, m=m)
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
    helpers.skip_without_every_config(dtype is FP16)
    machine, widths = CompilingMachine(90), {True: {}, False: {}}
    for n in (*range(8, 66000, 8), 73728, 131072):
        choice = beside_float32(op, n, size)
        if choice is not None and rows_of_class(size, n):
            variant = choice.first
            members = {"members": 1} if isinstance(variant, Team) else {}
            kind = replace(variant, pieces=variant.pieces // 16, **members)
            widths[is_whole(variant, n)][kind, choice.source] = n, choice
    turn = bool(([*PASSES].index(op) + SIZES.index(size)) % 2)
    for whole, cases in widths.items():
        if whole is not turn and not helpers.every_config:
            continue
        for n, choice in sampled(cases.values()):
            PASSES[op](machine, choice, n, dtype, FP32, m=max(rows_of_class(size, n)[0], 16))
    assert_sound(machine)


WIDE_ON_HOPPER = [16400, 18448, 81920, 114672]
PAIRS = [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32)]


@pytest.mark.parametrize(
    ("dtypes", "n"), helpers.in_turn(PAIRS, WIDE_ON_HOPPER, of=len(WIDE_ON_HOPPER)), ids=str
)
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


PAIR = BackwardPipelinedTeam(
    width=8192, warps=8, occupancy=1, latency=4, pieces=2, members=2, rstd_ahead=True, packed=True
)
# Most of what the entries have.
CASES = [
    (16384, BackwardPipelined(width=4096, warps=8, occupancy=1, latency=4, pieces=4)),
    (16384, BackwardPipelined(width=2048, warps=8, occupancy=1, latency=4, pieces=8)),
    (12288, BackwardPipelined(width=2048, warps=8, occupancy=1, latency=4, pieces=6)),
    (3584, BackwardPipelined(width=2048, warps=8, occupancy=2, latency=4, pieces=2)),
    (18432, BackwardPipelined(width=2048, warps=8, occupancy=1, latency=4, pieces=9, packed=True)),
    (32768, PAIR),
]
KERNELS = ("backward_pipelined", "backward_pipelined_team")
CALLS = {
    "bfloat16": {"dtype": BF16, "weight_dtype": BF16},
    "float16, dx alone": {"dtype": FP16, "weight_dtype": FP16, "has_dw": False},
    "float32 weight, llama, odd M": {"dtype": BF16, "weight_dtype": FP32, "round_xhat": True, "m": 4097},
    "no weight, one row": {"dtype": BF16, "weight_dtype": None, "m": 1},
}


WITH_TMA = (90, 100, 120)


@pytest.mark.parametrize(("case", "architecture"), in_turn(range(len(CASES)), WITH_TMA, of=3))
def test_no_warp_waits_for_registers(case, architecture):
    """One kind of call of each on one architecture, in turn; with --every-config all."""
    (n, variant), calls = CASES[case], [*CALLS.values()]
    if not helpers.every_config:
        calls = calls[(case // 2 + WITH_TMA.index(architecture)) % 4 :: 4]
    machine = CompilingMachine(architecture)
    for call in calls:
        run_backward(machine, variant, n, **call)
    found = [each for each in machine.results if each.name in KERNELS]
    assert len(found) == len(calls) and not any(each.lacking > 0 for each in found), found


HELD = [
    (16384, CASES[0][1], BF16, BF16, 8),
    (16384, CASES[1][1], BF16, BF16, 0),
    (16384, CASES[1][1], FP16, FP16, 0),
    (12288, CASES[2][1], BF16, BF16, 0),
    (18432, CASES[4][1], BF16, BF16, 0),
    (18432, CASES[4][1], FP16, FP16, 0),
    (18432, CASES[4][1], BF16, FP32, 0),
    (32768, CASES[5][1], BF16, BF16, 0),
    (32768, CASES[5][1], FP16, FP16, 0),
    (32768, CASES[5][1], BF16, FP32, 0),
    (5120, BackwardPipelined(width=1024, warps=8, occupancy=1, latency=4, pieces=5), FP32, FP32, 0),
]


@pytest.mark.parametrize(
    ("n", "variant", "dtype", "weight_dtype", "most_stack"),
    [case for case in HELD if helpers.every_config or case[2] is not FP16],
)
def test_registers_hold_rows_and_dw(n, variant, dtype, weight_dtype, most_stack):
    """Kernels add a row to dw before its products are summed. After that 8 * 2048 columns took 256 bytes of stack.
    float16, whose bytes are bfloat16's, with --every-config alone."""
    machine = CompilingMachine(90)
    run_backward(machine, variant, n, dtype, weight_dtype)
    [found] = [each for each in machine.results if each.name in KERNELS]
    assert found.stack <= most_stack


@pytest.mark.parametrize("call", ["bfloat16", "float32 weight, llama, odd M"])
def test_teams_of_three_blocks_an_sm_keep_no_weight_in_registers(call, tmp_path):
    """Keeping it took 32 and 112 bytes of stack. `not_hoisted` still tells that 16 bytes lie together."""
    machine = CompilingMachine(90, keep=tmp_path)
    variant = BackwardPipelinedTeam(width=4096, warps=4, occupancy=3, latency=4, members=8)
    run_backward(machine, variant, 32768, **CALLS[call])
    [found] = [each for each in machine.results if each.name == "backward_pipelined_team"]
    assert found.stack == 0
    code = disassembled(tmp_path / "backward_pipelined_team.cubin")
    loads = [line for line in code if "LDG.E" in line]
    # Of a thread's 32 columns, but for rstd and what a team exchanges.
    assert sum("LDG.E.128" in line for line in loads) == (4 if call == "bfloat16" else 8)
