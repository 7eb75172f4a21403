# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backend "triton": its launch decisions, over all kinds of shapes and several SM counts."""

import ast
import dataclasses
from pathlib import Path

import pytest

from tilegym_rmsnorm.backends.triton import config, config_rope
from tilegym_rmsnorm.backends.triton.config import backward_config, forward_config
from tilegym_rmsnorm.backends.triton.config_rope import (
    RopeHeads,
    rope_backward_config,
    rope_form,
    rope_forward_config,
)

WIDTHS = sorted(
    {n + d for p in range(19) for n in (2**p, 3 * 2**p) for d in (-1, 0, 1) if n + d > 0} | {2880, 18432}
)
BATCHES = (1, 2, 63, 64, 65, 4095, 4096, 131072, 2**24 + 1, 2**31 - 1)


def covers(tile, n):
    assert tile.tiles == 1 or tile.strips == 1
    count = tile.tiles * tile.strips
    return (count - 1) * tile.width < n <= count * tile.width


@pytest.mark.parametrize("sm_count", [1, 84, 132, 148])
def test_configs_cover_every_row_and_column(sm_count):
    for n in WIDTHS:
        forward = forward_config(n)
        assert covers(forward.tile, n)
        if forward.kernel == "forward_rows":
            assert forward.tile.strips == 1
        else:
            assert forward.kernel == "forward_reread" and forward.tile.rows == forward.tile.tiles == 1
        for m in BATCHES:
            plan = backward_config(m, n, sm_count)
            assert covers(plan.tile, n) and (plan.c_tile is None or covers(plan.c_tile, n))
            assert plan.kernel == "backward_dx" or plan.tile.rows == plan.tile.strips == 1
            assert (plan.c_tile is None) == (plan.tile.strips == 1)
            assert plan.c_tile is None or plan.c_tile.rows == plan.c_tile.tiles == 1
            steps = -(-m // plan.tile.rows)
            assert 1 <= plan.walks <= steps, "a walk without a row costs a row of dw_partial for nothing"
            grids = -(-m // forward.tile.rows), plan.walks * plan.tile.strips
            assert max(grids) < 2**31, "the largest grid"


def test_compiled_in_values_do_not_depend_on_the_batch():
    for n in WIDTHS:
        plans = {dataclasses.replace(backward_config(m, n, 132), walks=0) for m in BATCHES}
        assert len(plans) == 1


def test_tiles_are_what_triton_takes():
    for n in WIDTHS:
        forward, plan = forward_config(n), backward_config(4096, n, 132)
        tiles = [forward.tile, plan.tile, *filter(None, [plan.c_tile])]
        for extent in (plan.dw_width, *(extent for tile in tiles for extent in (tile.rows, tile.width))):
            assert extent & (extent - 1) == 0
        assert forward.num_warps in (4, 8, 16) and plan.num_warps in (8, 16)


def test_programs_fit_the_gpu_and_walk_alike():
    """All programs of the backward are resident at once, and no walk is longer than the largest grid would make it."""
    for sm_count in (84, 132):
        for n in WIDTHS:
            for m in BATCHES:
                plan = backward_config(m, n, sm_count)
                programs = plan.walks * plan.tile.strips
                most_programs = sm_count * config.WARPS_PER_SM // plan.num_warps
                assert programs <= most_programs or plan.walks == 1
                steps = -(-m // plan.tile.rows)
                most_walks = max(1, most_programs // plan.tile.strips)
                assert -(-steps // plan.walks) == -(-steps // most_walks)


@pytest.mark.parametrize("heads", [1, 3, 28, 300])
@pytest.mark.parametrize("margin", [0, 1, 16, 131])
def test_programs_of_all_heads_fit_the_sms_that_are_left(heads, margin):
    """And a margin changes nothing that is compiled."""
    for n in (64, 96, 128, 4096, 8192, 16384, 18432):
        for m in BATCHES:
            plan, whole = (backward_config(m, n, 132, heads, left) for left in (132 - margin, None))
            assert dataclasses.replace(plan, walks=0) == dataclasses.replace(whole, walks=0)
            programs = plan.walks * heads * plan.tile.strips
            assert programs <= (132 - margin) * config.WARPS_PER_SM // plan.num_warps or plan.walks == 1
            assert plan.walks <= whole.walks


@pytest.mark.parametrize("heads", [1, 3, 300])
def test_fixed_walks_depend_on_neither_rows_nor_gpu(heads):
    """But each has a row: what is appended goes to walks behind, or behind in the same walks."""
    for n in WIDTHS:
        most = backward_config(2**31 - 1, n, 132, heads, is_fixed=True)
        for m in BATCHES:
            plans = {
                backward_config(m, n, sms, heads, left, is_fixed=True)
                for sms, left in ((16, None), (78, 70), (132, None), (148, 148))
            }
            steps = -(-m // most.tile.rows)
            assert plans == {dataclasses.replace(most, walks=min(steps, most.walks))}


HEADS = {
    "grouped": (RopeHeads(40, False), RopeHeads(8, False)),
    "q alone": (RopeHeads(16, False),),
    "odd": (RopeHeads(7, False), RopeHeads(1, False)),
    "per-head": (RopeHeads(40, True), RopeHeads(8, True)),
    "q per-head": (RopeHeads(5, True), RopeHeads(3, False)),
    "more heads than programs": (RopeHeads(3000, True), RopeHeads(3000, True)),
}
DIMS = (
    (2, 2),
    (6, 6),
    (7, 4),
    (64, 64),
    (80, 80),
    (80, 20),
    (128, 32),
    (256, 64),
    (8192, 4096),
    (16384, 16384),
)
NO_FLAGS = dict.fromkeys(
    ("is_interleaved", "has_half_tables", "rounds_xhat", "rounds_n", "rounds_each"), False
)


def _rope_plans(sms_left=None):
    for heads in HEADS.values():
        for D, R in DIMS:
            for is_interleaved in (False, True):
                form = rope_form(D, R, **(NO_FLAGS | {"is_interleaved": is_interleaved}))
                for m in BATCHES:
                    yield m, heads, rope_backward_config(form, m, heads, 132, sms_left)


def test_rope_tiles_cover_every_column_and_are_what_triton_takes():
    for D, R in DIMS:
        form = rope_form(D, R, **NO_FLAGS)
        assert form.half // 2 < R // 2 <= form.half
        assert (form.rests - 1) * form.rest < D - R <= form.rests * form.rest or D == R
        for heads in HEADS.values():
            forward = rope_forward_config(form, heads)
            assert len(forward.tiles) == len(heads) and forward.num_warps in (4, 8, 16)
            for tile, each in zip(forward.tiles, heads, strict=True):
                assert tile.is_per_head == each.is_per_head
                extents = tile.tokens, tile.heads, form.half, *[form.rest] * min(form.rests, 1)
                assert all(extent & (extent - 1) == 0 < extent for extent in extents)


@pytest.mark.parametrize("sms_left", [None, 100, 1])
def test_rope_programs_fit_the_gpu_and_walk_alike(sms_left):
    """All are resident at once, and shorter walks would not be."""
    for m, heads, plan in _rope_plans(sms_left):
        steps, groups = [], []
        for tile, each in zip(plan.tiles, heads, strict=True):
            blocks = -(-each.H // tile.heads)
            groups.append(blocks if each.is_per_head else 1)
            steps.append(-(-m // tile.tokens) * blocks // groups[-1])
        assert plan.programs == tuple(w * group for w, group in zip(plan.walks, groups, strict=True))
        assert all(1 <= w <= count for w, count in zip(plan.walks, steps, strict=True)), (
            "a walk without tiles"
        )
        longest = max(-(-count // w) for count, w in zip(steps, plan.walks, strict=True))
        most = (sms_left or 132) * config.WARPS_PER_SM // plan.num_warps
        assert sum(plan.programs) <= most or longest == max(steps)
        if longest > 1:
            shorter = [-(-count // (longest - 1)) * group for count, group in zip(steps, groups, strict=True)]
            assert sum(shorter) > most


def test_what_rope_compiles_depends_neither_on_the_batch_nor_on_a_margin():
    seen = {}
    for sms_left in (None, 100):
        for _, heads, plan in _rope_plans(sms_left):
            seen.setdefault((heads, plan.form), set()).add(dataclasses.replace(plan, walks=(), programs=()))
    assert seen and all(len(plans) == 1 for plans in seen.values())


def test_config_imports_neither_torch_nor_triton():
    package = config.__name__.rpartition(".")[0]
    for module, own in (
        (config, set()),
        (config_rope, {package, "bisect", "collections.abc", "functools", "typing"}),
    ):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported == {"__future__", "dataclasses"} | own
        assert not any(isinstance(node, ast.Import) for node in ast.walk(tree))


def test_fixed_walks_of_rope_depend_on_neither_tokens_nor_gpu():
    for heads in HEADS.values():
        for D, R in DIMS:
            form = rope_form(D, R, **NO_FLAGS)
            most = rope_backward_config(form, 2**31 - 1, heads, 132, is_fixed=True)
            assert sum(most.programs) <= 132 * config.WARPS_PER_SM // most.num_warps or max(most.walks) == 1
            for m in BATCHES:
                few, other = (
                    rope_backward_config(form, m, heads, sms, left, is_fixed=True)
                    for sms, left in ((16, 15), (148, None))
                )
                assert few == other
                assert dataclasses.replace(few, walks=(), programs=()) == dataclasses.replace(
                    most, walks=(), programs=()
                )
                for side, (tile, each) in enumerate(zip(most.tiles, heads, strict=True)):
                    blocks = -(-each.H // tile.heads)
                    groups = blocks if tile.is_per_head else 1
                    steps = -(-m // tile.tokens) * blocks // groups
                    assert few.walks[side] == min(steps, most.walks[side])
                    assert few.programs[side] == few.walks[side] * groups
