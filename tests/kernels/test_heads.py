# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The tile kernels with residual, bias, several dtypes and heads (B, T, H, N) that are read where they lie."""

import helpers
import pytest
import torch
from helpers import BF16, FP16, FP32, unchanged
from tile_runs import Tile, normalized, run_backward, run_forward
from variants import Variant, check, check_residual_out, llama_share, make

CPU = torch.device("cpu")
# Of heads: tiles of several heads, of several steps along T, of both; rows in two pieces.
HEADS = {
    "heads": Tile(rows=1, heads=4, tma=True),
    "steps": Tile(rows=4, heads=1),
    "both": Tile(rows=2, heads=2, tma=True),
    "two pieces": Tile(rows=2, heads=2, pieces=2),
    "gathers": Tile(rows=2, heads=4, gathers=True),
}
ROWS = {
    "late": Tile(rows=4),
    "early": Tile(rows=4, weight_load="early"),
    "joint": Tile(rows=4, weight_load="joint"),
    "joint, two pieces": Tile(rows=2, pieces=2, weight_load="joint"),
    "by TMA": Tile(rows=2, tma=True),
}
WALKED = {name: ROWS[name] for name in ("late", "by TMA")} | {"two pieces": Tile(rows=2, pieces=2)}
# H and T that tiles divide and do not, one head, one batch, fewer steps than a tile has
SIZES = [
    (2, 5, 3, 64),
    (1, 1, 1, 80),
    (3, 2, 4, 96),
    (1, 7, 1, 33),
    (2, 3, 5, 72),
    (1, 4, 2, 1),
    (1, 3, 9, 7),
]
LAYOUTS = ["heads", "mixed", "offset", "gaps"]
# All of residual, bias, weight, offset, casting and dtypes, in few calls.
SWITCHES = {
    "plain": Variant(BF16, weight_dtype=BF16),
    "no weight": Variant(FP16, weight="none", layout="slices"),
    "weight float32": Variant(BF16, weight_dtype=FP32, offset=1.0),
    "weight bfloat16": Variant(FP32, weight_dtype=BF16, casting="llama"),
    "y float32": Variant(FP16, out_dtype=FP32, bias_dtype=FP16),
    "y float16": Variant(FP32, out_dtype=FP16, weight_dtype=BF16, bias_dtype=BF16),
    "bias": Variant(BF16, weight_dtype=BF16, bias_dtype=BF16, casting="llama"),
    "bias alone": Variant(BF16, weight="none", bias_dtype=FP32),
    "residual": Variant(BF16, weight_dtype=BF16, residual_dtype=BF16),
    "residual kept in float32": Variant(
        BF16, weight_dtype=BF16, residual_dtype=BF16, residual_out_dtype=FP32, casting="llama"
    ),
    "residual rounded": Variant(FP32, residual_dtype=FP32, residual_out_dtype=BF16, casting="llama"),
    "residual, alpha": Variant(BF16, residual_dtype=BF16, alpha=0.22, bias_dtype=BF16),
    "residual float32": Variant(BF16, residual_dtype=FP32, alpha=-1.5, out_dtype=BF16),
    "residual float16": Variant(FP32, weight="none", residual_dtype=FP16, bias_dtype=BF16, offset=0.0),
    "all": Variant(
        FP16,
        weight_dtype=BF16,
        bias_dtype=FP32,
        residual_dtype=FP32,
        residual_out_dtype=BF16,
        alpha=0.5,
        out_dtype=FP32,
        offset=-0.5,
        casting="llama",
    ),
}


def some(tiles, number, step=2):
    """Take every `step`-th tile, in turn; with --every-config all."""
    tiles = [*tiles.values()]
    return tiles if helpers.every_config else tiles[number % step :: step]


def assert_forward(variant, tile):
    """Results against float64, with any order of blocks the same bits, and inputs as they were."""
    inputs = make(variant, device=CPU)
    with unchanged(inputs):
        found, again = (run_forward(variant, inputs, tile, seed=seed) for seed in (0, 1))
    assert all(torch.equal(found[name], again[name]) for name in found)
    residual_out = found.pop("residual_out", None)
    if residual_out is not None:
        check_residual_out(variant, inputs, residual_out)
    check(variant, inputs, residual_out, **found)
    if variant.casting == "llama" and found["y"].dtype is variant.normalized_dtype is not FP32:
        x = inputs.x if residual_out is None else residual_out
        assert llama_share(variant, inputs, x, found["y"]) > 0.9


def assert_backward(variant, tile, walks, dy_dtype=None):
    inputs = make(variant, device=CPU, dy_dtype=dy_dtype)
    x = normalized(variant, inputs)
    with unchanged(inputs):
        found, again = (run_backward(variant, inputs, x, tile, walks, seed=seed) for seed in (0, 1))
    check(variant, inputs, x, **found)
    assert found.keys() == again.keys() and all(torch.equal(found[name], again[name]) for name in found)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_layouts_of_heads(size, layout):
    """q as a slice of (B, T, 3, H, D) and dy transposed from (B, H, T, D) among them."""
    number = SIZES.index(size) + LAYOUTS.index(layout)
    for tile in some(HEADS, number, 3):
        if tile.pieces == 1 or size[-1] > 1:
            weight = "heads" if (number + tile.rows) % 2 else "vector"
            variant = Variant(BF16, size, weight, BF16, BF16, layout=layout)
            assert_forward(variant, tile)
            assert_backward(variant, tile, walks=1 + number % 3)


@pytest.mark.parametrize("d", [64, 80, 96, 128, 160, 192, 256, 65])
@pytest.mark.parametrize("residual", [False, True])
def test_widths_of_heads(d, residual):
    variant = Variant(BF16, (1, 3, 5, d), "vector", BF16, layout="heads")
    if residual:
        variant = variant._replace(residual_dtype=BF16, layout="mixed")
    pieces = {80: 5, 96: 3, 160: 5, 192: 3}.get(d, 1)  # which fill no lane with zeros
    for tile in (HEADS["both"], HEADS["two pieces"], Tile(rows=2, heads=4, pieces=pieces)):
        assert_forward(variant, tile)
        assert_backward(variant, tile, walks=2)


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("weight", ["vector", "heads"])
def test_switches_of_heads(switches, weight):
    variant = SWITCHES[switches]._replace(size=(2, 3, 5, 48))
    variant = variant._replace(layout="mixed" if variant.has_residual else "heads")
    if weight == "heads":
        if variant.weight == "none":
            pytest.skip("no weight, so none of each head")
        variant = variant._replace(weight="heads")
    number = [*SWITCHES].index(switches) + (weight == "heads")
    for tile in some(HEADS, number):
        assert_forward(variant, tile)
        assert_backward(variant, tile, walks=1 + number % 3)


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize(
    ("size", "layout"), [((7, 48), "slices"), ((8, 64), "offset"), ((5, 50), "gaps")], ids=str
)
def test_switches_of_rows(switches, size, layout):
    variant = SWITCHES[switches]._replace(size=size, layout=layout)
    number = [*SWITCHES].index(switches) + size[0]
    for tile in some(ROWS, number):
        assert_forward(variant, tile)
    for tile in some(WALKED, number):
        assert_backward(variant, tile, walks=1 + size[0] % 3)


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, FP16), (FP16, BF16)], ids=str)
@pytest.mark.parametrize("tile", [HEADS["both"], WALKED["by TMA"]], ids=["heads", "rows"])
def test_dy_of_another_dtype(dtypes, tile):
    size = (2, 3, 4, 40) if tile.heads else (9, 40)
    assert_backward(Variant(dtypes[0], size, bias_dtype=FP32), tile, 2, dy_dtype=dtypes[1])


@pytest.mark.parametrize("weight", ["vector", "heads"])
@pytest.mark.parametrize("residual", [False, True])
def test_dw_is_of_xhat_as_it_was_rounded(weight, residual):
    """xhat has the dtype of what was normalized: bfloat16, or residual_out's float32, which rounds nothing."""
    variant = Variant(BF16, (2, 8, 4, 32), weight, FP32, casting="llama")
    if residual:
        variant = variant._replace(residual_dtype=FP32)
    inputs = make(variant, device=CPU)
    x = normalized(variant, inputs)
    xhat = x.double() * (x.double().square().mean(-1, keepdim=True) + variant.eps).rsqrt()
    rounded, exact = (
        (inputs.dy.double() * each.double()).reshape(-1, *variant.vector_shape).sum(0)
        for each in (xhat.to(BF16), xhat)
    )
    dw = run_backward(variant, inputs, x, HEADS["both"], walks=2)["dw"]
    near, far = (exact, rounded) if residual else (rounded, exact)
    assert (dw - near).norm() < 0.1 * (dw - far).norm()


def test_a_head_is_summed_by_its_own_blocks():
    """P blocks for each of three tiles along H: row p has all heads, and rows past the walk's end are 0."""
    variant = Variant(FP32, (1, 2, 5, 16), "heads", layout="heads")
    inputs = make(variant, device=CPU)
    few = run_backward(variant, inputs, inputs.x, Tile(rows=1, heads=2), walks=2)
    many = run_backward(variant, inputs, inputs.x, Tile(rows=1, heads=2), walks=5)
    check(variant, inputs, None, **many)
    assert torch.equal(few["dw"], many["dw"]), "two steps along T, whether or not blocks are left over"


def test_heads_have_the_bits_of_rows():
    """Tiles of heads that lie together, and the same rows: each row is reduced in the same way."""
    heads, rows = Variant(BF16, (2, 4, 2, 64), weight_dtype=BF16), Variant(BF16, (16, 64), weight_dtype=BF16)
    inputs = make(heads, device=CPU)
    flat = inputs._replace(x=inputs.x.view(16, 64), dy=inputs.dy.view(16, 64))
    tiles = Tile(rows=2, heads=2), Tile(rows=4)
    found, wanted = run_forward(heads, inputs, tiles[0]), run_forward(rows, flat, tiles[1])
    assert torch.equal(found["y"].view(16, 64), wanted["y"]) and torch.equal(found["rstd"], wanted["rstd"])
    found = run_backward(heads, inputs, inputs.x, tiles[0], 3)
    wanted = run_backward(rows, flat, flat.x, tiles[1], 3)
    assert torch.equal(found["dx"].view(16, 64), wanted["dx"]) and torch.equal(found["dw"], wanted["dw"])


@pytest.mark.parametrize("weight_load", ["early", "joint"])
def test_heads_are_not_read_by_gathers_of_rows(weight_load):
    variant = Variant(BF16, (1, 2, 2, 16))
    with pytest.raises(AssertionError, match="heads are not read by gathers of rows"):
        run_forward(variant, make(variant, device=CPU), Tile(heads=2, weight_load=weight_load))
