# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Loops that wait, in machine code. The kernels with TMA that are read here do not overwrite what their own workers
still read, a race inside a block which most runs do not show.

With another weight than x's dtype, none, and casting "llama" each is machine code of its own. One block of 18432
bfloat16 columns was right with a bfloat16 weight, and with a float32 weight asked for the next x while its workers
still read this one."""

import dataclasses
import itertools
import re
import types
from collections import Counter
from collections.abc import Iterable

import cuda.tile as ct
import helpers
import plain_calls
import pytest
import torch
from compiled_forms import FORM, WIDE, compile_call, problem_of
from compiling import (
    CompilingMachine,
    code_of_call,
    disassembled,
    meta,
    run_backward,
    skip_without_disassembler,
)
from control_flow import loops
from helpers import BF16, FP16, FP32
from pipelines import overwritten
from planning import H200, by_rules, device, plan
from sweeps import beside_float32, shipped_entries

from tilegym_rmsnorm.backends.cutile.host.norm import Backward
from tilegym_rmsnorm.backends.cutile.kernels.rows import load_gradient_tiles
from tilegym_rmsnorm.backends.cutile.kernels.tiles import ConstBool, ConstInt
from tilegym_rmsnorm.backends.cutile.plans.partition import Walks
from tilegym_rmsnorm.backends.cutile.plans.problem import D_RESIDUAL, FLOAT32, OPS, RESIDUAL, SAME, Bucket
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardRows,
    BackwardStrips,
    BackwardTiles,
)
from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates

skip_without_disassembler()


def whole_grid(variant: Variant) -> Variant:
    """Take all blocks that fit."""
    return dataclasses.replace(variant, grid_percent=100) if isinstance(variant, Walks) else variant


def variants_by_tma(op: str, dtype: torch.dtype, architecture: int = 90) -> list[tuple[Variant, int]]:
    """Return the rules' variants, each with its widest row, and those of the entries that ship for Hopper, which `tune`
    tries on any GPU; each kernel once, whatever part of the blocks walks the rows, those of the largest tiles first."""
    wide = 14336, 16368, 18432, 20480, 33001, 40000, 90112, 98304, 131072, 140000
    among = (*range(1, 4100), 4608, 5120, 7168, 10232, *wide)
    rules = {by_rules(op, n, dtype, architecture=architecture).first: n for n in among}
    name = str(dtype).removeprefix("torch.")
    entries = [
        each for each in shipped_entries(op, name) if each.architecture == 90 and each.bucket.weight == SAME
    ]
    found = [*rules.items(), *((each.variant, each.n) for each in entries)]
    kernels = {(whole_grid(variant), n) for variant, n in found if variant.uses_tma}
    return sorted(kernels, key=lambda case: (-getattr(case[0], "rows", 1) * case[0].width, str(case)))


def to_read(cases: Iterable[tuple[Variant, int]], *what: str) -> list[tuple[Variant, int]]:
    """Keep the first of each kernel without --every-config, by one row or by several, in one tile or in several, packed
    or not, and of each of these settings (`what`): reading a kernel takes as long as compiling it. Of variants_by_tma
    that is the one of the largest tiles, of which the fewest are under way."""
    first: dict[tuple, tuple[Variant, int]] = {}
    for variant, n in cases:
        kind = (
            variant.kernel,
            getattr(variant, "rows", 1) > 1,
            getattr(variant, "pieces", 1) > 1,
            getattr(variant, "packed", False),
            *(getattr(variant, name, None) for name in what),
        )
        first.setdefault((variant, n) if helpers.every_config else kind, (variant, n))
    return list(first.values())


def not_read_with_dw(op: str, cases: list[tuple[Variant, int]]) -> list[tuple[Variant, int]]:
    """Keep, without --every-config, of dx alone those of kernels that make no dw."""
    return [case for case in cases if helpers.every_config or op != "dx" or "backward" not in case[0].serves]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_no_backward_overwrites_tiles_in_use(dtype, tmp_path):
    """Read, without --every-config, bfloat16 with dw by one of each latency, float32 by one of each kind, dx alone of
    kernels that make no dw, and no float16: its bytes are bfloat16's."""
    helpers.skip_without_every_config(dtype is FP16)
    checked = 0
    what = ("latency",) if dtype is BF16 else ()
    cases = [
        (op, *case)
        for op in ("backward", "dx")
        for case in not_read_with_dw(op, to_read(variants_by_tma(op, dtype), *what))
    ]
    for op, variant, n in cases:
        reads_dx = (
            isinstance(variant, BackwardTiles)
            or helpers.every_config
            and isinstance(variant, BackwardPipelined)
        )
        for each in (op, "dx") if reads_dx and op != "dx" else (op,):
            for name, code in code_of_call(tmp_path, each, variant, n, dtype, dtype).items():
                assert not overwritten(code), (name, each, variant, n)
                checked += any("UTMALDG" in line for line in code)
    assert checked > 10


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("architecture", [100, 120])
def test_none_of_later_architectures_overwrites_tiles_in_use(architecture, dtype, tmp_path):
    """Branches are others than Hopper's, and sm_120 has so little shared memory that its steps are. Without
    --every-config float32 on sm_100 and bfloat16 on sm_120, of each kernel the one of the largest tiles."""
    helpers.skip_without_every_config((architecture == 100) != (dtype is FP32))
    read = Counter()
    for op in OPS:
        cases = not_read_with_dw(op, to_read(variants_by_tma(op, dtype, architecture)))
        if not helpers.every_config:
            cases = {variant.kernel: (variant, n) for variant, n in reversed(cases)}.values()
        for variant, n in cases:
            for name, code in code_of_call(tmp_path, op, variant, n, dtype, dtype, architecture).items():
                assert not overwritten(code), (name, variant, n)
                read[name] += any("UTMALDG" in line for line in code)
    kernels = {"forward_reread"} | {
        f"backward_{each}" for each in ("pipelined", "tiles", "pipelined_team", "means", "strips", "reread")
    }
    assert kernels <= {name for name, count in read.items() if count}


ALONE, TEAM = {"warps": 8, "occupancy": 1, "latency": 4}, {"latency": 4, "rstd_ahead": True}


@pytest.mark.parametrize(
    ("n", "variant"),
    [
        (12288, BackwardPipelined(**ALONE, width=4096, pieces=3)),
        (16384, BackwardPipelined(**ALONE, width=2048, pieces=8)),
        (18432, BackwardPipelined(**ALONE, width=2048, pieces=9, packed=True)),
        (18432, BackwardPipelinedTeam(**TEAM, width=2048, warps=4, occupancy=2, pieces=3, members=3)),
        (32768, BackwardPipelinedTeam(**ALONE | TEAM, width=8192, pieces=2, members=2, packed=True)),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_next_row_is_asked_for_before_this_one_is_summed(dtype, n, variant, tmp_path):
    """A block gives TMA its slots of shared memory back as soon as their tiles are in registers, before it adds its
    products and waits for its team. What it loads itself, rstd, is the next row's: nothing waits for it here."""
    helpers.skip_without_every_config(dtype is FP16)
    run_backward(CompilingMachine(90, keep=tmp_path), variant, n, dtype, dtype)
    code = disassembled(tmp_path / f"{variant.kernel}.cubin")
    assert not overwritten(code)
    [workers] = [
        loop
        for loop in ([code[place] for place in places] for places in loops(code))
        if any("FFMA" in line for line in loop) and not any("UTMALDG" in line for line in loop)
    ]
    given_back = [i for i, line in enumerate(workers) if "SYNCS.ARRIVE.TRANS64.A1T0" in line]
    last = given_back[2 * variant.pieces - 1]
    sums = [i for i, line in enumerate(workers) if "BAR.SYNC" in line]
    assert last < sums[0]
    [(load, rstd)] = [
        (i, found[1]) for i, line in enumerate(workers) if (found := re.search(r"LDG\.E (R\d+),", line))
    ]
    used = next(i for i, line in enumerate(workers) if i > load and re.search(rf"\b{rstd}\b", line))
    assert load < sums[0] and used > max(i for i, line in enumerate(workers) if "FFMA" in line)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_no_backward_beside_a_float32_weight_overwrites_tiles_in_use(dtype, tmp_path):
    """Its rules are read, those of wide rows, and the entries for such a weight. Without --every-config by one casting
    and the other in turn, and not in float16."""
    helpers.skip_without_every_config(dtype is FP16)
    choices = {beside_float32("backward", n, "large"): n for n in range(8, 16400, 8)}
    rules = [
        (choice.first, n) for choice, n in choices.items() if choice is not None and choice.first.uses_tma
    ]
    plain = (4608, 10240, 14336, 20480, 24576, 32752)
    rules += [(by_rules("backward", n).first, n) for n in plain]
    entries = {
        (whole_grid(each.variant), each.n)
        for each in shipped_entries("backward", "bfloat16")
        if each.bucket.weight == FLOAT32 and each.variant.uses_tma
    }
    assert len(rules) > 8 and len(entries) > 3 and all(each.uses_tma for each, _ in rules)
    cases = to_read([*rules, *sorted(entries, key=str)], "latency", "warps")
    castings = itertools.cycle((False, True))
    calls = itertools.product(cases, (False, True)) if helpers.every_config else zip(cases, castings)  # noqa: B905
    for (variant, n), round_xhat in calls:
        for name, code in code_of_call(
            tmp_path, "backward", variant, n, dtype, FP32, round_xhat=round_xhat
        ).items():
            assert not overwritten(code), (name, variant, n, round_xhat)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_no_forward_or_dx_alone_overwrites_chunks_in_use(dtype, tmp_path):
    for n in (33001, 33008, 140000) if helpers.every_config else (33008, 140000):
        for op in ("forward", "dx"):
            choice = by_rules(op, n, dtype)
            for name, code in code_of_call(tmp_path, op, choice, n, dtype, dtype).items():
                assert not overwritten(code), (name, n)


def code_of(architecture: int, variant: Variant, n: int, name: str, folder) -> list[str]:
    """The machine code of a backward's kernel."""
    run_backward(CompilingMachine(architecture, keep=folder), variant, n, BF16, BF16)
    return disassembled(folder / f"{name}.cubin")


STRIPS = BackwardStrips(width=2048, warps=4, occupancy=3, latency=4, tma=True)
TILES = BackwardTiles(width=1024, warps=8, occupancy=1, latency=2, rows=8, tma=True)


@pytest.mark.parametrize(
    ("n", "variant", "name", "arrays"),
    [(1024, TILES, "backward_tiles", 3), (140000, STRIPS, "backward_means", 2 * 3)],  # two kinds of steps
)
def test_a_slot_too_few_is_seen(n, variant, name, arrays, tmp_path):
    code = code_of(90, variant, n, name, tmp_path)
    made = [i for i, line in enumerate(code) if "SYNCS.EXCH" in line]
    found = [overwritten([*code[:i], *code[i + 1 :]]) for i in made]
    assert not overwritten(code) and len({each.split(":")[0] for each in sum(found, [])}) == arrays, found


def test_a_wait_for_this_step_is_told_from_one_for_the_step_before(tmp_path):
    """Parity tells: the loop of a kernel with one slot for each tile begins with it."""
    code = code_of(120, STRIPS, 140000, "backward_means", tmp_path)
    others = [re.sub(r"UMOV (UR\d+), URZ", r"UMOV \1, 0x1", line) for line in code]
    assert not overwritten(code) and overwritten(others)


def test_a_read_after_the_end_that_its_slot_waits_for_is_seen(tmp_path):
    """The memory read tells, in a kernel with one slot for each tile and fewer ends of steps."""
    variant = BackwardTiles(width=8192, warps=8, occupancy=1, latency=4, rows=2, tma=True)
    [code] = code_of_call(tmp_path, "dx", variant, 7168, BF16, BF16).values()
    assert not overwritten(code)
    first, last = "+0x8200]", "+0xe200]"  # the second halves of the first and of the last of dy's four tiles
    swap = {first: last, last: first}
    late = [
        re.sub(r"\+0x[8e]200\]", lambda found: swap[found[0]], line) if "LDS" in line else line
        for line in code
    ]
    assert sum(a != b for a, b in zip(code, late, strict=True)) == 2
    assert len(overwritten(late)) == 1


@pytest.mark.parametrize(
    ("found", "other"),
    [
        (r"\bBRA\b", "NOP"),  # no loops
        (r"PHASECHK", "OTHER"),  # no waits
        (r"ARRIVE\.TRANS64 ", "OTHER "),  # no loads
        (r"ARRIVE\.TRANS64\.A1T0", "OTHER"),  # no ends of steps
        (r"SYNCS\.PHASECHK\S+ P\d", "SYNCS.OTHER 1"),
        (r"BRA 0x\w+", "BRX R2"),
    ],
)
def test_a_kernel_that_is_not_recognised_does_not_pass(found, other, tmp_path):
    code = code_of(90, TILES, 1024, "backward_tiles", tmp_path)
    assert not overwritten(code)
    with pytest.raises(ValueError):
        overwritten([re.sub(found, other, line) for line in code])


def last_block_sums(
    dx, dw_partial, dw, count, dy, x, weight, rstd, ROWS: ConstInt, WIDTH: ConstInt, SUMS: ConstBool
):
    """The dw kernel that this package does not have: the last block to end adds the partial rows, if SUMS."""
    tdw = ct.zeros((1, WIDTH), dtype=ct.float32)
    tscale = ct.reshape(ct.astype(ct.load(weight, (0,), (WIDTH,)), ct.float32), (1, WIDTH))
    for i in range(ct.bid(0), ct.cdiv(x.shape[0], ROWS), ct.num_blocks(0)):
        tx, tdy, trstd = load_gradient_tiles(x, dy, rstd, (i, 0), (ROWS, WIDTH), 4, True, 16)
        txhat = tx * trstd
        tg = tdy * tscale
        tc = ct.sum(txhat * tg, axis=1, keepdims=True)
        ct.store(dx, (i, 0), ct.astype((tg - txhat * tc) * trstd, dx.dtype), allow_tma=False)
        tdw = tdw + ct.sum(tdy * txhat, axis=0, keepdims=True)
    ct.store(dw_partial, (ct.bid(0), 0), tdw, allow_tma=False)
    if SUMS:
        ended = ct.atomic_add(count, 0, 1, memory_order=ct.MemoryOrder.ACQ_REL)
        if ended == ct.num_blocks(0) - 1:
            for j in range(ct.cdiv(x.shape[1], 16)):
                tsum = ct.zeros((128, 16), dtype=ct.float32)
                for i in range(ct.cdiv(dw_partial.shape[0], 128)):
                    tsum = tsum + ct.load(
                        dw_partial, (i, j), (128, 16), padding_mode=ct.PaddingMode.ZERO, allow_tma=False
                    )
                ct.store(dw, (j,), ct.sum(tsum, axis=0), allow_tma=False)


@pytest.mark.parametrize("sums", [True, False])
def test_a_kernel_whose_last_block_sums_overwrites_tiles_in_use(sums, tmp_path):
    """So its sums of dw were wrong on an H100, in 36 of 40 runs of 16384x4096. The loop alone has slots enough."""
    m, n = 4096, 4096
    machine = CompilingMachine(90, keep=tmp_path)
    variant = BackwardTiles(width=n, warps=8, occupancy=1, latency=4, rows=2)
    launch = machine.bind(last_block_sums, variant, (2, n, sums))
    x, partial = meta(m, n, dtype=BF16), meta(132, n, dtype=FP32)
    launch(
        (132,),
        (
            x,
            partial,
            meta(n, dtype=FP32),
            meta(16, dtype=torch.int32),
            x,
            x,
            meta(n, dtype=FP32),
            meta(m, dtype=FP32),
        ),
    )
    assert bool(overwritten(disassembled(tmp_path / "last_block_sums.cubin"))) is sums


CALLS = {
    "another weight": {"round_xhat": False, "m": 4096},
    "no weight": {"round_xhat": False, "m": 4096},
    "llama": {"round_xhat": True, "m": 4096},
    "llama, another weight": {"round_xhat": True, "m": 4097},
}


def weight_dtype_of(call: str, dtype: torch.dtype) -> torch.dtype | None:
    if call == "no weight":
        return None
    if call == "llama":
        return dtype
    return FP32


@pytest.mark.parametrize("op", ["forward", "backward", "dx"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("call", CALLS)
def test_no_other_call_overwrites_tiles_in_use(call, dtype, op, tmp_path):
    """Read, without --every-config, rows and teams that `to_read` keeps, one of each kind, of bfloat16 beside a float32
    weight. test_no_backward_beside_a_float32_weight_overwrites_tiles_in_use has those of each latency."""
    if call == "no weight" and op == "backward":
        pytest.skip("without a weight there is no dw")
    if dtype is FP32 and call in ("another weight", "llama, another weight"):
        pytest.skip("there is no other weight beside float32")
    helpers.skip_without_every_config(call != "another weight" or op == "forward" or dtype is FP16)
    weight_dtype = weight_dtype_of(call, dtype)
    checked = 0
    for variant, n in to_read(variants_by_tma(op, dtype)):
        if not helpers.every_config and not isinstance(variant, (BackwardPipelined, BackwardPipelinedTeam)):
            continue
        kernels = code_of_call(tmp_path, op, variant, n, dtype, weight_dtype, **CALLS[call])
        for name, code in kernels.items():
            assert not overwritten(code), (name, variant, n)
            checked += any("UTMALDG" in line for line in code)
    assert checked


@pytest.mark.parametrize(("dtype", "x_dtype"), [(BF16, BF16), (FP32, FP32), (FP32, BF16)])
def test_no_gradient_of_a_wide_residual_overwrites_tiles_in_use(dtype, x_dtype, tmp_path):
    """One width without --every-config. x_dtype: of x, where the residual's is wider."""
    machine, checked = types.SimpleNamespace(facts=device(target=H200)), 0
    for n in WIDE if helpers.every_config else (28672,):
        for op, form in itertools.product(("backward", "dx"), (RESIDUAL, D_RESIDUAL)):
            compile_call(
                problem_of(machine, op, n, dtype, FORM[form], x_dtype), dtype, x_dtype, keep=tmp_path
            )
            for cubin in tmp_path.glob("*.cubin"):
                code = disassembled(cubin)
                cubin.unlink()
                assert not overwritten(code), (cubin.stem, op, form, n)
                checked += any("UTMALDG" in line for line in code)
    assert checked


@pytest.mark.parametrize("weight_dtype", [BF16, FP16, FP32])
def test_nothing_packed_that_tune_tries_overwrites_tiles_in_use(weight_dtype, tmp_path):
    """Read, without --every-config, what `to_read` keeps of 18432 columns, which no other test reads but for what the
    tables have, and of teams; float16 with it alone."""
    helpers.skip_without_every_config(weight_dtype is FP16)
    dtype = BF16 if weight_dtype is FP32 else weight_dtype
    name = str(dtype).removeprefix("torch.")
    widths = (5120, 6144, 8192, 10240, 12288, 16384, 18432, 24576, 32768, 65536)
    found = {
        (op, whole_grid(variant), n)
        for n in (widths if helpers.every_config else (18432, 32768))
        for op in (("backward", "dx") if helpers.every_config else ("backward",))
        for variant in candidates(Bucket(op, n, name, "large"), 90, most=10000)
        if isinstance(variant, (BackwardPipelined, BackwardPipelinedTeam)) and variant.packed
    }
    assert {type(variant) for _, variant, _ in found} == {BackwardPipelined, BackwardPipelinedTeam}
    for op in sorted({op for op, *_ in found}):
        of_op = sorted(((variant, n) for each, variant, n in found if each == op), key=str)
        for variant, n in to_read(of_op, "latency", "warps"):
            for code in code_of_call(tmp_path, op, variant, n, dtype, weight_dtype).values():
                assert not overwritten(code), (op, variant, n)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
def test_no_rows_of_a_warp_that_tune_tries_are_overwritten_in_use(dtype, weight_dtype, tmp_path):
    """Read, without --every-config, those of 1024 columns by latency 4 alone, one for each number of warps and of rows
    where all is bfloat16, and one for one number of warps beside float32."""
    name = str(dtype).removeprefix("torch.")
    found = {
        (variant, n)
        for n in ((384, 512, 768, 1024) if helpers.every_config else (1024,))
        for variant in candidates(Bucket("backward", n, name, "large"), 90, most=10000)
        if isinstance(variant, BackwardTiles) and variant.pieces > 1 and variant.width <= 256 and variant.tma
        if helpers.every_config or variant.latency == 4
    }
    assert {variant.warps for variant, _ in found} == {4, 8}
    cases = to_read(sorted(found, key=str), "warps", *(("rows",) if weight_dtype is BF16 else ()))
    if weight_dtype is FP32 and not helpers.every_config:
        cases = cases[dtype is FP32 :: 2]
    for variant, n in cases:
        for code in code_of_call(tmp_path, "backward", variant, n, dtype, weight_dtype).values():
            assert not overwritten(code), (variant, n)


@pytest.mark.parametrize("n", [5120, 5119])
@pytest.mark.parametrize("kernel", [BackwardRows, BackwardPipelined])
def test_views_unlike_packed_rows_are_copied_for_tma_alone(kernel, n):
    """float32 rows of 5 * 1024 columns with a dy whose rows begin anywhere have one slot of shared memory where two are
    needed, rows of 5119 where x alone is aligned. By gathers views are read where they are. What is compiled says
    which: what divides strides is part of it."""
    variant = kernel(width=1024, warps=8, occupancy=1, latency=4, pieces=5)
    machine = CompilingMachine(90, compiles=False)
    run = Backward(machine, plan(variant, "backward", n, FP32, facts=machine.facts))
    plain, view = meta(9, n, dtype=FP32), meta(9, 5121 if n == 5120 else 5120, dtype=FP32)[:, :n]
    for x, dy in ((plain, plain), (plain, view), (view, plain), (view, view)):
        plain_calls.backward(run, x, dy, meta(n, dtype=FP32), meta(9, dtype=FP32), 0.0)
    assert len(machine.symbols[kernel.kernel]) == (1 if kernel is BackwardPipelined else 4)
