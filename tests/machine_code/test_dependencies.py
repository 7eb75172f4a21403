# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""No kernel touches memory before the launch before it has ended, in machine code: whatever the compiler moves, and in
the warps that load for others too. The interpreter refuses what the source would do early; it knows no such warps."""

import dataclasses
import inspect
import itertools
import re
from pathlib import Path

import cuda.tile as ct
import helpers
import pytest
import torch
from compiling import (
    CompilingMachine,
    disassembled,
    meta,
    run_backward,
    run_forward,
    sampled,
    skip_without_disassembler,
)
from control_flow import followers, reached
from helpers import in_turn
from pipelines import ENDED, WAITED, awaits_first_end, operations
from planning import by_rules
from rope_cases import RopeCase, make

from tilegym_rmsnorm.backends.cutile.host import norm, rope
from tilegym_rmsnorm.backends.cutile.host.launcher import bind
from tilegym_rmsnorm.backends.cutile.kernels import KERNELS
from tilegym_rmsnorm.backends.cutile.kernels.pdl import NO_BLOCK, wait_for_launch_before
from tilegym_rmsnorm.backends.cutile.kernels.rows import load_tile
from tilegym_rmsnorm.backends.cutile.kernels.tiles import ConstBool, ConstInt
from tilegym_rmsnorm.backends.cutile.plans import variants
from tilegym_rmsnorm.backends.cutile.plans.partition import Team
from tilegym_rmsnorm.backends.cutile.plans.problem import OPS
from tilegym_rmsnorm.backends.cutile.plans.select import Choice
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

skip_without_disassembler()

BF16, FP32 = torch.bfloat16, torch.float32
# Of global memory: not shared (LDS, ATOMS), nor local (LDL), nor arguments and constants (LDC).
ACCESS = re.compile(
    r"\*/\s+(?:@!?U?P\d )?(?:LDG|STG|LDGSTS|ATOMG?|REDG?|LD|ST|UTMALDG|UTMASTG|UTMAREDG|UBLKCP)[. ]"
)
WIDE = variants.ForwardTeam(width=8192, warps=4, occupancy=2, latency=2, members=8, packed=True)
TWO, ALONE = {"warps": 4, "occupancy": 2, "latency": 4}, {"warps": 8, "occupancy": 1, "latency": 4}
THREE = variants.BackwardPipelinedTeam(**TWO, width=2048, pieces=3, members=3, rstd_ahead=True)
PAIR = variants.BackwardPipelinedTeam(**ALONE, width=8192, pieces=2, members=2, rstd_ahead=True, packed=True)
PARTS = {**TWO, "width": 1024}
SLABS = variants.BackwardSplit(**ALONE | {"latency": 1}, width=4096, rows=128, strip=32, slab=1024)
AHEAD = {"warps": 8, "occupancy": 2, "latency": 3, "rows": 8, "strip": 1024, "slab": 64}
CASES = [
    ("forward", 4096, variants.ForwardRows(width=4096, warps=8, occupancy=3, latency=4, weight_load="early")),
    ("forward", 4096, variants.ForwardRows(width=4096, warps=8, occupancy=3, latency=4, weight_load="joint")),
    ("forward", 128, variants.ForwardTiles(width=128, warps=4, occupancy=4, latency=4, rows=32)),
    ("forward", 1024, variants.ForwardTiles(**TWO, width=256, rows=4, pieces=4, weight_load="joint")),
    ("forward", 65536, WIDE),
    ("forward", 65536, dataclasses.replace(WIDE, weight_load="joint")),
    ("forward", 40000, variants.ForwardReread(width=4096, warps=8, occupancy=2, latency=4)),
    ("forward", 40000, variants.ForwardReread(width=4096, warps=8, occupancy=2, latency=4, tma=True)),
    ("forward", 3001, variants.ForwardUnaligned(**PARTS, pieces=3, vector=8)),
    ("forward", 1900, variants.ForwardUnaligned(**PARTS, pieces=2, rows=2, vector=4)),
    ("forward", 3001, variants.ForwardUnalignedTeam(**PARTS, members=3, vector=8)),
    ("backward", 3001, variants.BackwardUnaligned(**PARTS, pieces=3, vector=8)),
    ("backward", 3001, variants.BackwardUnalignedTeam(**PARTS, members=3, vector=8)),
    ("backward", 4096, variants.BackwardRows(width=4096, warps=8, occupancy=1, latency=6)),
    ("backward", 12288, variants.BackwardPipelined(width=4096, warps=8, occupancy=1, latency=4, pieces=3)),
    ("backward", 128, variants.BackwardTiles(width=128, warps=8, occupancy=3, latency=1, rows=16)),
    ("backward", 7168, variants.BackwardTiles(width=8192, warps=8, occupancy=1, latency=4, rows=2, tma=True)),
    ("backward", 32768, variants.BackwardTeam(width=8192, warps=4, occupancy=2, latency=2, members=4)),
    ("backward", 18432, THREE),
    ("backward", 32768, variants.BackwardPipelinedTeam(**TWO | {"occupancy": 3}, width=4096, members=8)),
    ("backward", 32768, PAIR),
    ("backward", 4096, SLABS),
    ("backward", 32768, variants.BackwardSplitReread(**AHEAD, width=8192)),
    ("backward", 40000, variants.BackwardStrips(width=2048, warps=4, occupancy=2, latency=4)),
    ("backward", 40000, variants.BackwardStrips(width=2048, warps=4, occupancy=3, latency=4, tma=True)),
    ("dx", 40000, variants.BackwardReread(width=4096, warps=4, occupancy=2, latency=4)),
    ("dx", 40000, variants.BackwardReread(width=4096, warps=4, occupancy=2, latency=4, tma=True)),
]


# `wait_for_launch_before` asks whether a block's number is one that no block has.
ASKED = re.compile(rf"ISETP\.GT(?:\.U32)?\.AND (U?P\d), U?PT, [\w.]+, {NO_BLOCK - 1:#x}, U?PT")
WAIT = re.compile(r"\*/\s+ACQBULK\b")  # without a condition


def goes_around(code: list[str], place: int) -> bool:
    """Whether the branch at `place` is taken where that is so: by the predicate, or a copy, of such a comparison."""
    branch = re.search(r"@(P\d) BRA 0x|BRA\.U (UP\d), 0x", code[place])
    if branch is None:
        return False
    predicate = branch[1] or branch[2]
    for line in reversed(code[:place]):
        if not re.search(rf"\*/\s+(?:@\S+ )?(?!BRA)[\w.]+ (?:[^,;]+, )?{predicate}\b", line):
            continue  # it is not written here: results come first
        if (asked := ASKED.search(line)) and asked[1] == predicate:
            return True
        copied = re.search(rf"\bPLOP3\.LUT {predicate}, PT, PT, PT, (UP\d), 0x80, 0x0\b", line)
        if copied is None:
            return False
        predicate = copied[1]
    return False


def waits_of(code: list[str], following: list[list[int]]) -> set[int]:
    """The places of waits, and of branches in front of them around nothing else that no block takes."""
    waits = {place for place, line in enumerate(code) if WAIT.search(line)}
    return waits | {
        place - 1
        for place in waits
        if set(following[place - 1]) == {place, place + 1} and goes_around(code, place - 1)
    }


def accesses_too_early(code: list[str]) -> list[str]:
    """The accesses to global memory that there is a way to from a kernel's beginning without its wait for the launch
    before: ACQBULK, or a barrier at which other warps arrive only after it."""
    following, done = followers(code), operations(code, range(len(code)))
    waits = waits_of(code, following)
    while True:
        early = reached({0}, following, without=waits)
        late = {each.barrier for each in done if each.name == ENDED} - {
            each.barrier for each in done if each.name == ENDED and each.place in early
        }
        more = {
            each.place
            for each in done
            if each.name == WAITED and each.place in early and each.barrier in late
            if awaits_first_end(code, each)
        }
        if not more:
            return [code[place] for place in sorted(early) if ACCESS.search(code[place])]
        waits |= more


def run(machine: CompilingMachine, op: str, n: int, choice: Choice | Variant) -> None:
    if op == "forward":
        run_forward(machine, choice, n, BF16, BF16)
    else:
        run_backward(machine, choice, n, BF16, BF16, has_dw=op == "backward")


def names_that_wait(folder: Path, told: object) -> set[str]:
    """Check the kernels in a folder, which is left empty, and return their names."""
    checked = set()
    for path in folder.glob("*.cubin"):
        code = disassembled(path)
        assert sum("ACQBULK" in line for line in code) == 1, (path.stem, told)
        assert not accesses_too_early(code), (path.stem, told)
        checked.add(path.stem)
        path.unlink()
    return checked


def test_no_kernel_touches_memory_before_the_launch_before_has_ended(tmp_path):
    """Each with and without TMA; with --every-config for three architectures, and every fifteenth of Hopper's rules."""
    architectures, cases = (90,), CASES
    if helpers.every_config:
        architectures = (90, 100, 120)
        for op in OPS:
            rules = {by_rules(op, n): n for n in (*range(1, 4096), *range(4096, 140000, 128))}
            cases = cases + [(op, n, choice) for choice, n in sampled(rules.items(), step=15)]
    checked = set()
    for architecture in architectures:
        machine = CompilingMachine(architecture, keep=tmp_path)
        for op, n, choice in cases:
            run(machine, op, n, choice)
            checked |= names_that_wait(tmp_path, (architecture, op, n, choice))
        call = make(RopeCase(BF16, length=64, heads=(32, 8), n=128, rotary_dim=128, layout="packed"), "meta")
        bind(rope.FORWARD, machine, call.spec, call.tensors)(call.tensors)
        bind(rope.BACKWARD, machine, call.spec, call.backward_tensors, call.wanted)(call.backward_tensors)
        checked |= names_that_wait(tmp_path, (architecture, call.spec))
    assert checked == {
        name for name, kernel in KERNELS.items() if "DEPENDENT" in inspect.signature(kernel).parameters
    }


@pytest.mark.parametrize("n", [4096, 1001])
def test_a_sum_that_is_added_waits_for_the_rows_and_for_what_it_is_added_to(n, tmp_path):
    machine = CompilingMachine(90, keep=tmp_path)
    for m in (4, 4096):  # one partial row, and several
        x, weight = meta(m, n, dtype=BF16), meta(n, dtype=BF16)
        rstd, target = meta(m, dtype=FP32), meta(n, dtype=FP32)
        tensors, wanted = (x, x.clone(), weight, rstd, None, target), Wanted(BF16, dw=FP32)
        bind(norm.BACKWARD, machine, Spec(n, 0.0, 0.0, "once"), tensors, wanted)(tensors)
        assert "sum_partials" in names_that_wait(tmp_path, (m, n))


EVERYWHERE, WHERE_A_BLOCK_IS, SOMEWHERE, SOMEWHERE_AND_ASKED, WHERE_ASKED_AND_SOMEWHERE = range(5)


def sums_of_rows(y, x, TMA: ConstBool, WAITS_FIRST: ConstBool, WAITS_WHERE: ConstInt):
    tsum = ct.zeros((1, 4096), dtype=ct.float32)
    if WAITS_FIRST:
        if WAITS_WHERE == EVERYWHERE:
            ct.grid_dependency_control_wait()
        elif WAITS_WHERE == WHERE_A_BLOCK_IS:
            wait_for_launch_before(ct.bid(0))
        elif WAITS_WHERE == WHERE_ASKED_AND_SOMEWHERE:
            if x.shape[1] < NO_BLOCK:
                if ct.bid(0) < x.shape[0] - 1:
                    ct.grid_dependency_control_wait()
        elif ct.bid(0) < x.shape[0] - 1:
            ct.grid_dependency_control_wait()
    columns = x.shape[1]
    if WAITS_WHERE == SOMEWHERE_AND_ASKED:
        if columns >= NO_BLOCK:
            columns = 0
    for j in range(ct.cdiv(columns, 4096)):
        tsum = tsum + load_tile(x, (ct.bid(0), j), (1, 4096), 4, TMA, 16)
    if not WAITS_FIRST:
        ct.grid_dependency_control_wait()
    ct.scatter(y, ct.bid(0), ct.sum(tsum))


def code_of_sums(folder, architecture: int, *switches: bool | int) -> list[str]:
    machine = CompilingMachine(architecture, keep=folder)
    variant = variants.ForwardReread(width=4096, warps=4, occupancy=1, latency=4)
    launch_one = machine.bind(sums_of_rows, variant, switches)
    launch_one((64,), (meta(64, dtype=FP32), meta(64, 40000, dtype=BF16)))
    return disassembled(folder / "sums_of_rows.cubin")


# Without --every-config no kernel of the last two is read: of each the reader is asked half of the questions.
OTHERS, BOTH = (100, 120), (True, False)


@pytest.mark.parametrize(
    ("architecture", "tma", "waits_first"),
    [*itertools.product((90,), BOTH, BOTH), *in_turn(OTHERS, BOTH, BOTH, of=2)],
)
def test_loads_before_the_wait_are_seen(architecture, tma, waits_first, tmp_path):
    code = code_of_sums(tmp_path, architecture, tma, waits_first, EVERYWHERE)
    assert any("UTMALDG" in line for line in code) is tma
    assert bool(accesses_too_early(code)) is not waits_first


WHERES = (WHERE_A_BLOCK_IS, SOMEWHERE, SOMEWHERE_AND_ASKED, WHERE_ASKED_AND_SOMEWHERE)


@pytest.mark.parametrize(
    ("architecture", "where"), [*itertools.product((90,), WHERES), *in_turn(OTHERS, WHERES, of=2)]
)
def test_a_wait_that_some_blocks_leave_out_is_seen(architecture, where, tmp_path):
    """Also beside a comparison such as `wait_for_launch_before` makes."""
    early = accesses_too_early(code_of_sums(tmp_path, architecture, False, True, where))
    assert bool(early) is (where != WHERE_A_BLOCK_IS)


WAIT_BEHIND_INDICES = ("forward_tiles", "backward_split", "sum_partials")


def loads_jointly(variant: Variant) -> bool:
    return getattr(variant, "weight_load", None) == "joint"


@pytest.mark.parametrize(
    "op, n, variant",
    [
        case
        for case in CASES
        if isinstance(case[2], variants.BackwardSplit)
        or case[1] == 128
        or loads_jointly(case[2])
        and not isinstance(case[2], Team)
    ],
)
def test_what_follows_from_a_blocks_number_is_not_left_until_after_the_wait(op, n, variant, tmp_path):
    """A division by the blocks of a cluster, in the kernels between which small calls pass their time."""
    run(CompilingMachine(90, keep=tmp_path), op, n, variant)
    cubins = tmp_path.glob("*.cubin")
    found = {path for path in cubins if path.stem in WAIT_BEHIND_INDICES or loads_jointly(variant)}
    assert found
    for path in found:
        code = disassembled(path)
        following = followers(code)
        behind = reached({place for place, line in enumerate(code) if WAIT.search(line)}, following)
        behind -= reached({place for place in behind if ACCESS.search(code[place])}, following)
        assert not [code[place] for place in behind if re.search(r"\b(?:MUFU\.RCP|F2I)", code[place])], path
