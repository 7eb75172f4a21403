# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Backwards whose rows, or parts of rows, come and go by TMA, in the interpreter: the same bits as by gathers."""

import dataclasses

import pytest
import torch
from cutile_runs import ShuffledMachine, run_backward
from helpers import BF16, FP32, assert_llama_rounds, assert_within, expected_results, make_inputs
from planning import H100, by_rules, by_tables, device, problem

from tilegym_rmsnorm.backends.cutile.launch import Backward
from tilegym_rmsnorm.backends.cutile.plans.plan import plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import Form
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardRows,
    BackwardTeam,
)
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

CPU = torch.device("cpu")
TEAM = BackwardPipelinedTeam(width=16, warps=4, occupancy=2, latency=2, pieces=3, members=2, rstd_ahead=True)
# A row's columns, and a variant by TMA that holds it. Of a team three blocks an SM load no rstd ahead.
VARIANTS = {
    "rows of one tile": (84, BackwardPipelined(width=128, warps=4, occupancy=2, latency=2)),
    "rows": (96, BackwardPipelined(width=32, warps=4, occupancy=1, latency=2, pieces=3)),
    "rows, the last tile partial": (
        84,
        BackwardPipelined(width=32, warps=4, occupancy=1, latency=2, pieces=3),
    ),
    "teams": (96, TEAM),
    "teams, the last tile partial": (84, TEAM),
    "teams, three blocks an SM": (
        84,
        BackwardPipelinedTeam(width=32, warps=4, occupancy=3, latency=2, members=3),
    ),
    "packed rows": (84, BackwardPipelined(width=32, warps=8, occupancy=1, latency=2, pieces=3, packed=True)),
    "packed teams": (84, dataclasses.replace(TEAM, warps=8, occupancy=1, packed=True)),
}
every_variant = pytest.mark.parametrize(("n", "variant"), VARIANTS.values(), ids=VARIANTS)


def by_gathers(variant: BackwardPipelined | BackwardPipelinedTeam) -> BackwardRows | BackwardTeam:
    """The kernel without TMA, in the same tiles; not packed."""
    settings = dataclasses.asdict(variant)
    del settings["packed"]
    if settings.pop("rstd_ahead", None) is None:
        return BackwardRows(**settings)
    return BackwardTeam(**settings)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("weight_dtype", [BF16, FP32, None])
@every_variant
def test_the_same_bits_as_by_gathers(n, variant, weight_dtype, dtype):
    if variant.packed and dtype is FP32:
        pytest.skip("nothing to pack")
    inputs = make_inputs(11, n, dtype, weight_dtype, offset=1.0, device=CPU)
    expected = run_backward(inputs, by_gathers(variant))
    assert_within(expected_results(inputs), **expected)
    got = run_backward(inputs, variant, seed=1)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    alone = run_backward(inputs, variant, has_dw=False)
    assert torch.equal(alone["dx"], expected["dx"])


@pytest.mark.parametrize("weight_dtype", [BF16, FP32])
@pytest.mark.parametrize("name", [name for name, (_, variant) in VARIANTS.items() if "bias" in variant.takes])
def test_db_beside_dw(name, weight_dtype):
    """Right, and the same bits as by gathers; dx and dw as without it."""
    n, variant = VARIANTS[name]
    inputs = make_inputs(11, n, BF16, weight_dtype, device=CPU)
    x, dy, weight, eps, *_ = inputs
    rstd = torch.rsqrt(x.double().square().mean(dim=1) + eps).float()
    spec, wanted = Spec(n, eps, 0.0, "once"), Wanted(BF16, None, FP32, FP32)

    def run(first, wanted):
        machine = ShuffledMachine()
        asked = problem("backward", n, weight=weight_dtype, form=Form(bias=wanted.db is not None))
        run = Backward(machine, plan_of(asked._replace(device=machine.facts), first))
        return run(spec, (x, dy, weight, rstd, None), wanted)

    dx, _, dw, db = run(variant, wanted)
    truth = dy.double().sum(0)
    assert (db - truth).abs().max() <= 1e-5 * dy.double().abs().sum(0).max()
    gathered, plain = run(by_gathers(variant), wanted), run(variant, wanted._replace(db=None))
    assert all(map(torch.equal, (dx, dw, db), (gathered[0], gathered[2], gathered[3])))
    assert all(map(torch.equal, (dx, dw), (plain[0], plain[2])))


@every_variant
def test_fewer_rows_than_blocks(n, variant):
    for m in (1, 2):
        inputs = make_inputs(m, n, BF16, BF16, device=CPU)
        assert_within(expected_results(inputs), **run_backward(inputs, variant))


@every_variant
def test_other_layouts(n, variant):
    """Rows farther apart than they are long, at an offset, and one row that is all rows of dy."""
    inputs = make_inputs(11, n, BF16, BF16, device=CPU)
    x, dy = (torch.full((11, n + 3), torch.nan, dtype=BF16) for _ in range(2))
    x[:, :n], dy[:, 3:] = inputs.x, inputs.dy
    strided = inputs._replace(x=x[:, :n], dy=dy[:, 3:])
    assert_within(expected_results(inputs), **run_backward(strided, variant))
    expanded = inputs._replace(dy=inputs.dy[4:5].expand(11, n))
    assert_within(expected_results(expanded), **run_backward(expanded, variant))


@every_variant
def test_casting_like_llama_rounds_what_dw_sums(n, variant):
    inputs = make_inputs(7, n, BF16, FP32, casting="llama", device=CPU)
    found = run_backward(inputs, variant)
    assert_within(expected_results(inputs), **found)
    assert_llama_rounds(inputs, found, run_backward(inputs._replace(casting="once"), variant))


@pytest.mark.parametrize(("n", "members"), [(24576, 4), (66000, 11)])
def test_rules_take_it_for_teams_of_many_rows_of_16_bits(n, members):
    variant = by_rules("backward", n, BF16).first
    assert isinstance(variant, BackwardPipelinedTeam)
    assert (variant.width, variant.pieces, variant.members) == (2048, 3, members)


def test_dx_alone_takes_no_teams_by_tma_of_a_backward():
    """Teams with a float32 weight spill on an H100. The rules have others, the entries that ship some of dx."""
    for n in (18432, 24576, 32768, 65536):
        asked = problem("backward", n, BF16, facts=device(target=H100))
        with_dw = by_tables(asked).first
        assert isinstance(with_dw, BackwardPipelinedTeam) and not with_dw.serves_dx_alone
        alone = by_tables(asked._replace(op="dx"))
        assert alone.first != with_dw and alone.source.startswith("the entry") == (n in (18432, 32768))
