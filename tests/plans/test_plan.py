# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Plans: what M decides of each, that nothing else does, and that M decides nothing more."""

import dataclasses
import inspect
import itertools
import random

import pytest
from planning import H100, H200, classes_of, device, plan, problem, rules_of

from tilegym_rmsnorm.backends.cutile.kernels import KERNELS
from tilegym_rmsnorm.backends.cutile.plans import partition, sizes, variant, variants
from tilegym_rmsnorm.backends.cutile.plans.partition import MOST_MEMBERS, Split, Team, Unaligned
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan
from tilegym_rmsnorm.backends.cutile.plans.problem import LAUNCHES_AT_ONCE, OPS, WEIGHTS, Policy, Problem
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.cutile.plans.sizes import (
    LARGEST_GRID,
    LARGEST_GRID_Y,
    MOST_ROWS,
    SIZES,
    rows_of_class,
    size_class,
)
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BY_KERNEL,
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardReread,
    BackwardRows,
    BackwardSplit,
    BackwardSplitReread,
    BackwardStrips,
    BackwardTeam,
    BackwardTiles,
    BackwardUnaligned,
    BackwardUnalignedTeam,
    ForwardReread,
    ForwardRows,
    ForwardTeam,
    ForwardTiles,
    ForwardUnaligned,
    ForwardUnalignedTeam,
    SumPartials,
)
from tilegym_rmsnorm.backends.cutile.runtime import tables

NUMBERS = {"warps": 8, "occupancy": 2, "latency": 4}
UNALIGNED = (ForwardUnaligned, BackwardUnaligned)
UNALIGNED_TEAMS = (ForwardUnalignedTeam, BackwardUnalignedTeam)
SLABS = [{"rows": 64, "strip": 32, "slab": 1024}, {"rows": 1, "strip": 16, "slab": 8}]
CASES = [  # each first kernel with the columns of its rows
    *((ForwardRows(width=4096, **NUMBERS), 4096), (ForwardReread(width=4096, **NUMBERS), 40000)),
    *((ForwardTiles(width=64, rows=rows, **NUMBERS), 64) for rows in (1, 16, 256)),
    *((ForwardTeam(width=4096, members=members, **NUMBERS), 4096 * members) for members in (2, 3, 16)),
    *((BackwardRows(width=4096, **NUMBERS), 4096), (BackwardPipelined(width=4096, **NUMBERS), 4096)),
    (BackwardRows(width=4096, grid_percent=72, **NUMBERS), 4000),
    *((BackwardTiles(width=64, rows=rows, **NUMBERS), 64) for rows in (1, 16, 256)),
    *((BackwardTeam(width=4096, members=members, **NUMBERS), 4096 * members) for members in (2, 3, 16)),
    *((BackwardPipelinedTeam(width=4096, members=members, **NUMBERS), 4096 * members) for members in (3, 8)),
    *((BackwardSplit(width=4096, **NUMBERS, **slab), 4096) for slab in SLABS),
    *((BackwardSplitReread(width=4096, **NUMBERS, **slab), 20000) for slab in SLABS),
    *((BackwardStrips(width=2048, rows=rows, **NUMBERS), n) for rows in (1, 8) for n in (2048, 40000)),
    (BackwardReread(width=4096, **NUMBERS), 40000),
    *((each(width=64, rows=2, vector=8, **NUMBERS), n) for each in UNALIGNED for n in (64, 71)),
    *((each(width=4096, members=3, vector=4, **NUMBERS), 12291) for each in UNALIGNED_TEAMS),
]
PLANS = [
    pytest.param(
        plan(first, op, n, facts=device(sm_count=sm_count), **own), id=f"{first.kernel}-{op}-{number}"
    )
    for number, ((first, n), sm_count) in enumerate(itertools.product(CASES, (132, 7)))
    for op in first.serves
    for own in ({}, {"partials": "own"})
    if not own
    or op == "backward"
    and not isinstance(first, (Split, BackwardTiles, Unaligned))  # rules.own_partials
]
CHANCE = random.Random(0)
COUNTS = sorted(
    {
        *range(1, 300),
        *(2**k + d for k in range(8, 31) for d in (-1, 0, 1)),
        *(CHANCE.randrange(1, 2**24) for _ in range(99)),
    }
)


def counts(made: Plan) -> list[int]:
    """Numbers of rows that one launch takes, and that a memory of a TB holds."""
    most = min(made.most_rows, 2**40 // (made.problem.n * made.problem.itemsize))
    return [m for m in COUNTS if m <= most] + [most - 1, most]


def test_every_first_kernel_is_among_the_cases():
    assert {type(first) for first, _ in CASES} == set(BY_KERNEL.values()), "add the one that is missing"
    of_norm = {each.kernel for each in classes_of(variants).values()}  # other ops: their own tests
    assert {step.kernel for case in PLANS for step in case.values[0].steps} == of_norm


@pytest.mark.parametrize("made", PLANS)
def test_grids_are_within_the_limits(made):
    """cuda-tile's for the first dimension, CUDA's for the others."""
    assert 2**19 < made.most_rows <= MOST_ROWS
    for m in counts(made):
        for step, grid in zip(made.steps, made.sizes(m).grids, strict=True):
            if grid is not None:
                assert 1 <= grid[0] <= LARGEST_GRID, (m, step, grid)
                assert all(1 <= extent <= LARGEST_GRID_Y for extent in grid[1:]), (m, step, grid)
                assert len(grid) <= 2


@pytest.mark.parametrize("made", PLANS)
def test_partial_rows_and_what_they_decide(made):
    """The sum is the last step, of a backward alone, and not launched where the one partial row is dw."""
    n, sm_count, has_dw = made.problem.n, made.problem.device.sm_count, made.problem.op == "backward"
    assert [isinstance(step, SumPartials) for step in made.steps] == [False] * (len(made.steps) - has_dw) + [
        True
    ] * has_dw
    for m in counts(made):
        found = made.sizes(m)
        expected = m if made.has_own_partials else made.first.partial_rows(m, n, sm_count)
        assert found.partial_rows == expected >= 1
        assert made.has_own_partials or expected <= made.first.most_partial_rows(sm_count)
        launched = [grid is not None for grid in found.grids]
        assert launched == [True] * (len(launched) - has_dw) + [expected > 1] * has_dw
        is_split = isinstance(made.first, Split)
        assert found.tiles_in_slab == (made.first.slab_tiles(m, sm_count) if is_split else 0)


@pytest.mark.parametrize("made", PLANS)
def test_temporaries_are_those_that_the_steps_need(made):
    n, first = made.problem.n, made.first
    for m in counts(made):
        found, expected = made.sizes(m), {}
        if isinstance(first, Team):
            rows = found.temporaries["board"][0][0]
            assert m < rows <= m + 16 and rows % 16 == 0, "a row for each of x, and one that counts tickets"
            expected["board"] = (rows, first.slots), "int32"
            assert first.members <= first.slots < 2 * first.members
        if isinstance(first, BackwardStrips):
            expected["c"] = (m,), "float32"
        if made.problem.op == "backward" and found.partial_rows > 1:
            expected["dw_partial"] = (found.partial_rows, n), "float32"
        assert found.temporaries == expected


@pytest.mark.parametrize("made", PLANS)
def test_what_a_kernel_takes_is_what_its_plan_has(made):
    """Its compile-time arguments, its arrays and its numbers; and no array is made that no kernel takes."""
    found, given = made.sizes(1000), {"y", "dx", "dy", "x", "rstd", "weight", "dw", "dw_partial"}
    given |= {"inv_n", "eps", "offset", "tiles_in_slab", "residual", "bias"}
    given |= {"d_residual_out", "d_residual", "db_partial", "db"}
    taken = set()
    for step in made.steps:
        parameters = inspect.signature(KERNELS[step.kernel]).parameters
        constants = {name for name in parameters if name.isupper()}
        assert constants <= made.constants(step).keys(), step
        taken |= parameters.keys() - constants
    assert taken <= given | found.temporaries.keys()
    assert found.temporaries.keys() <= taken


@pytest.mark.parametrize("made", PLANS)
def test_nothing_but_m_decides_the_sizes_of_a_plan(made, monkeypatch):
    """Earlier questions, thresholds of size classes and other parts of the problem change nothing."""
    some = counts(made)[::7]
    before = {m: made.sizes(m) for m in some}
    for module in (sizes, partition, variant, variants):
        for name, value in (("FEW_ROWS", 5), ("SMALL", 640)):
            monkeypatch.setattr(module, name, value, raising=False)
    target = H200 if made.problem.device.target is None else None
    others = [
        made.problem._replace(size="few"),
        made.problem._replace(dtype="float16", weight="float32", casting="llama", policy=Policy(False)),
        made.problem._replace(device=made.problem.device._replace(target=target, most_members=1)),
    ]
    for asked in (made.problem, *others):
        other = dataclasses.replace(made, problem=asked)
        for m in CHANCE.sample(some, len(some)):
            assert other.sizes(m) == before[m]


# What chooses a plan


def test_the_selector_never_sees_how_many_rows_there_are():
    """Only their class: a plan is made once for all of it."""
    fields = set(Problem._fields)
    assert fields.isdisjoint({"m", "rows", "shape"}) and {"n", "size"} <= fields
    assert set(inspect.signature(select).parameters) == {"problem", "tables"}
    for op, n in itertools.product(OPS, (64, 4096, 40000)):
        classes = [size_class(m, n) for m in range(1, 70000, 997)]
        plans = {(size, select(problem(op, n, size=size), rules_of())) for size in classes}
        assert len(plans) == len(set(classes)), "as many plans as classes, for 71 numbers of rows"


WIDTHS = sorted(
    {
        *(1, 7, 64, 100, 513, 1000, 1024, 2049, 2880, 4096, 4097, 5120, 7168, 8192),
        *(12288, 14336, 16384, 16385),
        *range(16400, 70000, 1008),
        *(18432, 32768, 65536, 81920, 98304, 131072, 131088, 140000, 200000),
    }
)
DEVICES = {
    "h100": device(target=H100),
    "h200": device(target=H200),
    "sm_90 of many SMs": device(sm_count=400, most_members=50),
    "sm_90": device(),
    "sm_80": device(80, 108, 13),
    "sm_100": device(100, 148, 18),
}


def problems(facts, dtype, **others):
    """Yield every op, width, weight and size class, and a backward with partial rows of its own."""
    for op, n, weight, size in itertools.product((*OPS, "own"), WIDTHS, WEIGHTS, SIZES):
        if not rows_of_class(size, n) or weight == "float32" == dtype:
            continue
        partials = {"partials": "own"} if op == "own" else {}
        yield problem("backward" if op == "own" else op, n, dtype, size, weight, facts, **partials, **others)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("gpu", DEVICES)
def test_no_team_serves_where_the_policy_has_none(gpu, dtype):
    """The plan is then that of a GPU that has room for no team."""
    facts, teams = DEVICES[gpu], 0
    by = tables.tables_of(facts.architecture, facts.target, None)
    for with_teams in problems(facts, dtype):
        without = select(with_teams._replace(policy=Policy(teams=False)), by)
        assert not any(isinstance(step, Team) for step in without.steps), without
        alone = select(with_teams._replace(device=facts._replace(most_members=1)), by)
        assert dataclasses.replace(without, problem=alone.problem) == alone
        chosen = select(with_teams, by)
        if isinstance(chosen.first, Team):
            assert chosen.first.members <= min(facts.most_members, MOST_MEMBERS)
            teams += 1
        else:
            assert dataclasses.replace(without, problem=with_teams) == chosen, "nothing else changes"
    assert (teams > 0) == (facts.architecture == 90)


@pytest.mark.parametrize("gpu", DEVICES)
def test_a_margin_is_a_gpu_with_fewer_sms(gpu):
    """Plans, grids and partial rows are those of a GPU that has only what is left, by the same tables."""
    facts, changed = DEVICES[gpu], 0
    by = tables.tables_of(facts.architecture, facts.target, None)
    for margin in (1, 8, facts.sm_count - 1):
        left = facts.sm_count - margin
        members = min(facts.most_members, max(1, left // LAUNCHES_AT_ONCE))
        smaller = facts._replace(sm_count=left, most_members=members)
        for asked in problems(facts, "bfloat16"):
            made = select(asked._replace(policy=Policy(sm_margin=margin)), by)
            alone = select(asked._replace(device=smaller), by)
            assert dataclasses.replace(made, problem=alone.problem) == alone
            for m in (3, 5000, 10**6):
                assert made.sizes(m) == alone.sizes(m)
            changed += made.sizes(10**6) != select(asked, by).sizes(10**6)
    assert changed > 0, "a margin does something"


def test_no_margin_changes_nothing():
    facts = device(most_members=1)
    asked = problem("backward", 4096, facts=facts)
    assert asked.sm_count == facts.sm_count and asked.most_members == 1
    assert Policy() == Policy(True, 0)
