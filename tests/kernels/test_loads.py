# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Loads and stores of rows, in the interpreter: by gathers, by TMA, of widths that are no multiple of 16, packed or
widened in pairs, and of a weight jointly with x. Where two ways read the same, the bits are the same."""

import dataclasses
from dataclasses import replace

import cuda.tile as ct
import helpers
import pytest
import torch
from cutile_runs import ShuffledMachine, run_backward, run_forward
from helpers import (
    BF16,
    FP16,
    FP32,
    assert_llama_rounds,
    assert_within,
    expected_results,
    in_turn,
    make_inputs,
)
from narrow_variants import BACKWARDS, FORWARDS, KERNELS
from planning import H100, by_rules, by_tables, device, problem

from tilegym_rmsnorm.backends.cutile import interpreter
from tilegym_rmsnorm.backends.cutile.host.norm import Backward
from tilegym_rmsnorm.backends.cutile.interpreter import OPERATIONS
from tilegym_rmsnorm.backends.cutile.interpreter.arrays import Array
from tilegym_rmsnorm.backends.cutile.interpreter.tile import Tile
from tilegym_rmsnorm.backends.cutile.kernels.tiles import (
    packed_row_as_float32,
    paired_row_as_float32,
    row_as_float32,
)
from tilegym_rmsnorm.backends.cutile.plans.plan import plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import Form
from tilegym_rmsnorm.backends.cutile.plans.variants import (
    BackwardPipelined,
    BackwardPipelinedTeam,
    BackwardRows,
    BackwardSplit,
    BackwardSplitReread,
    BackwardTeam,
    ForwardRows,
    ForwardTeam,
    ForwardTiles,
)
from tilegym_rmsnorm.ops.norm.spec import Spec, Wanted

CPU = torch.device("cpu")
TILE = {"rows": 4, "strip": 16, "slab": 8}
STRIPS = {
    "whole rows": BackwardSplit(width=64, warps=4, occupancy=1, latency=1, **TILE),
    "rows in two tiles, ahead": BackwardSplit(width=32, warps=4, occupancy=1, latency=2, rest=32, **TILE),
    "chunks": BackwardSplitReread(width=32, warps=4, occupancy=1, latency=1, gathers=True, **TILE),
    "chunks, ahead": BackwardSplitReread(width=32, warps=4, occupancy=1, latency=3, **TILE),
}
LATE = ForwardTiles(width=64, warps=4, occupancy=4, latency=4, rows=4)
EARLY, JOINT = (replace(LATE, weight_load=when) for when in ("early", "joint"))


@pytest.fixture(params=STRIPS)
def strips(request):
    return STRIPS[request.param]


def far_from_each_other(x):
    """Copy the rows in between NaN columns."""
    wide = torch.full((x.shape[0], x.shape[1] + 9), torch.nan, dtype=x.dtype)
    return wide[:, 4:-5].copy_(x)


@pytest.mark.parametrize("m", [1, 3, 8, 13])
@pytest.mark.parametrize("n", [48, 50, 64])
@pytest.mark.parametrize("weight", [BF16, FP32])
def test_strips(strips, m, n, weight):
    """13 rows are two slabs, of which the last has a tile of one row; 8 are one, which is dw, of weight's dtype."""
    inputs = make_inputs(m, n, BF16, weight, offset=0.5, device=CPU)
    found = run_backward(inputs, strips)
    assert_within(expected_results(inputs), **found)
    strided = inputs._replace(x=far_from_each_other(inputs.x), dy=far_from_each_other(inputs.dy))
    again = run_backward(strided, strips, seed=1)
    assert all(torch.equal(again[name], value) for name, value in found.items())


def test_strips_round_as_llama_does(strips):
    inputs = make_inputs(13, 50, BF16, FP32, casting="llama", device=CPU)
    found = run_backward(inputs, strips)
    assert_within(expected_results(inputs), **found)
    assert_llama_rounds(inputs, found, run_backward(inputs._replace(casting="once"), strips))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["dy", "x"])
def test_a_last_row_that_is_not_finite(strips, name, value):
    """The row stands in for rows past the last: 0 times infinity reaches no column that the row does not."""
    inputs = make_inputs(13, 50, BF16, FP32, device=CPU)
    inputs.x[-1, 7] = 1.0
    finite = run_backward(inputs, strips)["dw"]
    getattr(inputs, name)[-1, 7] = value
    dw = run_backward(inputs, strips)["dw"]
    others = torch.arange(50) != 7
    if name == "dy":
        assert dw[7].isnan() if value != value else dw[7] == value
        assert torch.equal(dw[others], finite[others])
    elif value != value:
        assert dw.isnan().all(), "rstd of that row is NaN"
    else:  # rstd of that row is 0
        without = inputs._replace(x=inputs.x[:-1], dy=inputs.dy[:-1])
        assert dw[7].isnan()
        assert torch.equal(dw[others], run_backward(without, strips)["dw"][others])


@pytest.mark.parametrize(
    ("variant", "by_tiles"),
    [
        *(pytest.param(variant, kind == "chunks, ahead", id=kind) for kind, variant in STRIPS.items()),
        pytest.param(EARLY, False, id="early weight"),
        pytest.param(JOINT, False, id="joint weight"),
        pytest.param(LATE, True, id="late weight"),
    ],
)
@pytest.mark.parametrize("n", [64, 56, 50])
def test_what_is_loaded_by_gathers(variant, by_tiles, n, monkeypatch):
    """And with which conditions: where tiles end with x, none. 50 bfloat16 are no multiple of 16 bytes: no such row is
    loaded by tiles."""
    tiles, conditions = [], []
    load, gather = (OPERATIONS[name] for name in ("load", "gather"))

    def counting_load(array, index, shape, **options):
        tiles.append(len(shape) == 2 and shape[0] == 4)  # not those of the sum
        return load(array, index, shape, **options)

    def counting_gather(array, index, **options):
        if isinstance(index, tuple) and isinstance(index[0], Tile) and index[0].shape == (4, 1):
            conditions.append(options["check_bounds"])
        return gather(array, index, **options)

    monkeypatch.setitem(OPERATIONS, "load", counting_load)
    monkeypatch.setitem(OPERATIONS, "gather", counting_gather)
    inputs = make_inputs(13, n, BF16, FP32, device=CPU)
    run_forward(inputs, variant) if isinstance(variant, ForwardTiles) else run_backward(inputs, variant)
    by_tiles = by_tiles and n != 50
    assert any(tiles) is by_tiles
    assert set(conditions) == (set() if by_tiles else {n != 64})


@pytest.mark.parametrize("m", [1, 4, 13])
@pytest.mark.parametrize("n", [33, 48, 64])
@pytest.mark.parametrize("weight", [BF16, FP32, None])
@pytest.mark.parametrize("casting", ["once", "llama"])
@pytest.mark.parametrize("variant", [EARLY, JOINT], ids=["early", "joint"])
def test_the_forward_has_the_bits_of_its_tiles(variant, m, n, weight, casting):
    inputs = make_inputs(m, n, BF16, weight, casting=casting, offset=0.5 if weight else 0.0, device=CPU)
    strided = inputs._replace(x=far_from_each_other(inputs.x))
    found = run_forward(strided, variant)
    assert_within(expected_results(inputs), **found)
    tiles = run_forward(inputs, LATE)
    assert all(torch.equal(tiles[name], value) for name, value in found.items())


WIDTHS = [80, 72, 76, 73]  # whose largest divisor of these is 16, 8, 4, 1
DTYPES = [BF16, FP32]
WEIGHTS = [BF16, FP32, None]
NEEDS_DW = ("split", "split, reread", "split, reread, ahead", "strips")
LOAD_TILES = [("forward", "tiles"), ("forward", "reread")]
LOAD_TILES += [
    ("backward", k) for k in ("tiles", "split, reread", "split, reread, ahead", "strips", "dx, reread")
]


@pytest.mark.parametrize(("kernel", "dtype", "n", "weight"), in_turn(FORWARDS, DTYPES, WIDTHS, WEIGHTS, of=3))
def test_forwards(kernel, weight, dtype, n):
    """Each width and dtype of a kernel has one of the weights, in turn, without --every-config."""
    inputs = make_inputs(13, n, dtype, weight, offset=0.5 if weight else 0.0, device=CPU)
    assert_within(expected_results(inputs), **run_forward(inputs, FORWARDS[kernel]))


@pytest.mark.parametrize(
    ("kernel", "dtype", "n", "weight"),
    in_turn([k for k in BACKWARDS if k not in NEEDS_DW], DTYPES, WIDTHS, WEIGHTS, of=3)
    + in_turn(NEEDS_DW, DTYPES, WIDTHS, [BF16, FP32], of=2),
)
def test_backwards(kernel, weight, dtype, n):
    """Each width and dtype of a kernel has one of the weights, in turn, without --every-config."""
    inputs = make_inputs(13, n, dtype, weight, offset=0.5 if weight else 0.0, device=CPU)
    found = run_backward(inputs, BACKWARDS[kernel], has_dw=kernel != "dx, reread")
    assert_within(expected_results(inputs), **found)


@pytest.mark.parametrize(
    ("dtype", "n", "are_aligned"),
    [(BF16, 72, True), (BF16, 76, False), (BF16, 73, False), (FP32, 76, True), (FP32, 74, False)],
)
@pytest.mark.parametrize(("op", "kernel"), KERNELS)
def test_no_tile_of_rows_that_are_not_aligned_is_loaded_as_one(
    op, kernel, dtype, n, are_aligned, monkeypatch
):
    """`ct.load` has a branch around each one or two of their elements: 4096x10001 in 698 us instead of 168 (H100). Nor
    is it declared what divides their length: kernels by chunks then have twice the branches (1164 bfloat16; not
    timed)."""
    loaded, declared = [], []  # by tiles, and sliced by what divides N: tensors whose rows are n long
    load, slice_array = OPERATIONS["load"], Array.slice

    def recording_slice(array, *bounds):
        if array.tensor.shape[-1] == n:
            declared.append(array.tensor)
        return slice_array(array, *bounds)

    def recording_load(array, index, shape, **options):
        if array.tensor.shape[-1] == n:
            loaded.append(array.tensor)
        return load(array, index, shape, **options)

    monkeypatch.setitem(OPERATIONS, "load", recording_load)
    monkeypatch.setattr(Array, "slice", recording_slice)
    inputs = make_inputs(13, n, dtype, dtype, device=CPU)
    if op == "forward":
        run_forward(inputs, FORWARDS[kernel])
    else:
        run_backward(inputs, BACKWARDS[kernel], has_dw=kernel != "dx, reread")
    of_x = [t for t in loaded if t.shape == (13, n)]
    if "by TMA" in kernel:  # which has no branches, and no gathers
        assert of_x
        loaded = [t for t in loaded if t.shape != (13, n)]
    else:
        assert bool(of_x) == (are_aligned and (op, kernel) in LOAD_TILES)
    assert not [t for t in loaded + declared if n * t.element_size() % 16]
    if "unaligned" in kernel:  # by offsets in memory: of rows nothing is declared
        assert not [t for t in declared if t.shape == (13, n)]
    else:
        assert any(t.dtype is dtype for t in declared) == are_aligned


@pytest.mark.parametrize("again", [packed_row_as_float32, paired_row_as_float32])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_number_is_the_same(dtype, again):
    """All bits of all 16-bit numbers, NaN, infinities and zeros of either sign among them, in their places."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, -1)
    plain, other = torch.full((2, 1, 2**16), torch.nan)

    def widen(x, plain, other):
        tiles = (ct.reshape(ct.load(x, (0, 0), (1, 2**16)), (2**16,)),)
        ct.store(plain, (0, 0), ct.reshape(row_as_float32(tiles)[0], (1, 2**16)))
        ct.store(other, (0, 0), ct.reshape(again(tiles)[0], (1, 2**16)))

    interpreter.launch(widen, (1,), (numbers, plain, other))
    assert torch.equal(plain.view(torch.int32), numbers.float().view(torch.int32))
    assert torch.equal(other.view(torch.int32), plain.view(torch.int32))


def with_numbers_that_a_wrong_widening_shows(m, n, dtype, weight_dtype):
    """Rows of zeros, of -0 and a denormal."""
    inputs = make_inputs(m, n, dtype, weight_dtype, offset=1.0, device=CPU)
    inputs.x[0], inputs.x[1, :2] = 0.0, torch.tensor([-0.0, torch.finfo(dtype).tiny / 2])
    return inputs


def assert_same_bits(got, expected, variant):
    for name, value in expected.items():
        bits = torch.int32 if value.dtype == FP32 else torch.int16
        assert torch.equal(got[name].view(bits), value.view(bits)), (name, variant)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("width", "pieces"), [(128, 1), (32, 3)])
def test_packed_rows_give_the_same_bits(width, pieces, dtype, weight_dtype):
    inputs = with_numbers_that_a_wrong_widening_shows(6, 84, dtype, weight_dtype)
    settings = {"width": width, "pieces": pieces, "occupancy": 1, "latency": 2}
    packed_rows = BackwardRows(warps=4, **settings, packed=True)
    by_tma = BackwardPipelined(warps=8, **settings, packed=True)
    for run, plain, variants in (
        (run_forward, ForwardRows(warps=4, **settings), (ForwardRows(warps=4, **settings, packed=True),)),
        (run_backward, BackwardRows(warps=4, **settings), (packed_rows, by_tma)),
    ):
        expected = run(inputs, plain)
        for variant in variants:
            assert_same_bits(run(inputs, variant), expected, variant)


@pytest.mark.parametrize("weight_dtype", [BF16, FP32, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("width", "pieces", "members"), [(64, 1, 2), (16, 2, 3), (16, 3, 2)])
def test_packed_teams_give_the_same_bits(width, pieces, members, dtype, weight_dtype):
    """Teams by gathers agree, with dw and without."""
    inputs = with_numbers_that_a_wrong_widening_shows(11, 84, dtype, weight_dtype)
    tile = {"width": width, "pieces": pieces, "members": members}
    settings = tile | {"warps": 8, "occupancy": 1, "latency": 2}
    packed = BackwardPipelinedTeam(**settings, rstd_ahead=True, packed=True)
    expected = run_backward(inputs, BackwardTeam(**settings))
    assert_same_bits(run_backward(inputs, packed), expected, packed)
    alone = run_backward(inputs, packed, has_dw=False)
    assert_same_bits(alone, {"dx": expected["dx"]}, packed)


OF_ROWS = {"warps": 4, "occupancy": 2, "latency": 4, "weight_load": "joint"}
OF_TILES, OF_TEAMS = OF_ROWS | {"occupancy": 4, "rows": 2}, OF_ROWS | {"occupancy": 1, "latency": 1}
JOINTLY = {
    "rows": ForwardRows(**OF_ROWS, width=64),
    "rows in two tiles": ForwardRows(**OF_ROWS, width=32, rest=32),
    "packed rows in equal tiles": ForwardRows(**OF_ROWS, width=16, pieces=4, packed=True),
    "tiles": ForwardTiles(**OF_TILES, width=64),
    "tiles of a warp": ForwardTiles(**OF_TILES, width=16, pieces=4),
    "teams": ForwardTeam(**OF_TEAMS, width=16, members=4),
    "packed teams": ForwardTeam(**OF_TEAMS, width=16, pieces=2, members=2, packed=True),
}


JOINT_DTYPES = (BF16, FP32, FP16) if helpers.every_config else (BF16, FP32)
CALLS = [  # dtype, weight, casting
    *((dtype, *each) for dtype in JOINT_DTYPES for each in ((dtype, "once"), (dtype, "llama"))),
    *((dtype, FP32, "llama") for dtype in JOINT_DTYPES if dtype is not FP32),
    *((dtype, None, "once") for dtype in JOINT_DTYPES),
]


@pytest.mark.parametrize(("kind", "call", "n"), in_turn(JOINTLY, CALLS, [56, 50], of=2), ids=str)
def test_the_bits_are_those_of_the_weight_loaded_late(kind, call, n):
    """Rows hold what an exclusive or could spoil: zeros of both signs, infinities, NaN. A weight of another dtype is
    not awaited: there an early one is compared with a late one. Without --every-config one width and the other in turn,
    and no float16, which takes bfloat16's branches."""
    (dtype, weight, casting), variant = call, JOINTLY[kind]
    if "packed" in kind and dtype is FP32:
        variant = replace(variant, packed=False)
    inputs = make_inputs(13, n, dtype, weight, casting=casting, offset=0.5 if weight else 0.0, device=CPU)
    found = run_forward(inputs, variant)
    assert_within(expected_results(inputs), **found)
    inputs.x[2], inputs.x[3, ::2], inputs.x[3, 1::2] = 0.0, -0.0, 0.0
    inputs.x[5, 7], inputs.x[6, 9] = -torch.inf, torch.nan
    if weight is not None:
        inputs.weight[4] = torch.inf
    found = run_forward(inputs, variant)
    late = replace(variant, weight_load="late")
    if isinstance(
        variant, ForwardTiles
    ):  # cannot have pieces late, and adds its squares as rows of such tiles do
        late = ForwardRows(width=late.width, warps=4, occupancy=4, latency=4, pieces=late.pieces)
    again = run_forward(inputs, late)
    assert all(bits(again[name]).equal(bits(value)) for name, value in found.items())


def bits(tensor):
    return torch.where(tensor.isnan(), torch.nan, tensor).view(
        torch.int32 if tensor.dtype is FP32 else torch.int16
    )


TEAM = BackwardPipelinedTeam(width=16, warps=4, occupancy=2, latency=2, pieces=3, members=2, rstd_ahead=True)
# A row's columns, and a variant by TMA that holds it. Of a team three blocks an SM load no rstd ahead.
BY_TMA = BackwardPipelined(width=32, warps=4, occupancy=1, latency=2, pieces=3)
OF_THREE = BackwardPipelinedTeam(width=32, warps=4, occupancy=3, latency=2, members=3)
VARIANTS = {
    "rows of one tile": (84, BackwardPipelined(width=128, warps=4, occupancy=2, latency=2)),
    "rows": (96, BY_TMA),
    "rows, the last tile partial": (84, BY_TMA),
    "teams": (96, TEAM),
    "teams, the last tile partial": (84, TEAM),
    "teams, three blocks an SM": (84, OF_THREE),
    "packed rows": (84, replace(BY_TMA, warps=8, packed=True)),
    "packed teams": (84, replace(TEAM, warps=8, occupancy=1, packed=True)),
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
