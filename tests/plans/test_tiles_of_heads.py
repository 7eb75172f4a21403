# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Tiles of rows (B, T, H, N): what is selected for tensors as models have them, from their strides on."""

from __future__ import annotations

import itertools
import math

import planning
import pytest
import torch
from helpers import BF16, FP32

from tilegym_rmsnorm.backends.cutile.host.norm import form_of
from tilegym_rmsnorm.backends.cutile.plans.problem import Form
from tilegym_rmsnorm.backends.cutile.plans.rules import heads_of_form
from tilegym_rmsnorm.backends.cutile.plans.select import select
from tilegym_rmsnorm.backends.layout import viewed, views_of

OPS = ("forward", "backward")
# (rows, heads) of the tiles of a forward and a backward, by D and H. 8, 28 and 32 were timed (rules._tiles_of_heads).
TIMED = {
    (64, 8): ((8, 8), (8, 8)),
    (64, 28): ((16, 4), (16, 4)),
    (64, 32): ((4, 16), (8, 8)),
    (64, 40): ((8, 8), (8, 8)),
    (80, 8): ((8, 8), (4, 8)),
    (80, 28): ((16, 4), (8, 4)),
    (80, 32): ((4, 16), (4, 8)),
    (80, 40): ((8, 8), (4, 8)),
    (128, 8): ((4, 8), (8, 4)),
    (128, 28): ((8, 4), (8, 4)),
    (128, 32): ((2, 16), (8, 4)),
    (128, 40): ((4, 8), (8, 4)),
    (160, 8): ((4, 8), (2, 8)),
    (160, 28): ((8, 4), (4, 4)),
    (160, 32): ((2, 16), (2, 8)),
    (160, 40): ((4, 8), (2, 8)),
    (256, 8): ((2, 8), (4, 4)),
    (256, 28): ((4, 4), (4, 4)),
    (256, 32): ((1, 16), (4, 4)),
    (256, 40): ((2, 8), (4, 4)),
}


def rows_of(*size):
    return torch.empty(size, dtype=BF16, device="meta")


def selected(*rows, per_head=False, bias=False):
    """B, T and H, the form, and the first kernel of each of OPS."""
    n = rows[0].shape[-1]
    given = viewed(rows, views_of(n, rows[0].shape[-2] if per_head else 0, rows))
    _, form = form_of(given, (BF16,), False, bias, per_head)
    asked = (planning.problem(op, n, form=form) for op in OPS)
    return tuple(given[0].shape[:3]), form, [select(each, planning.rules_of()).first for each in asked]


@pytest.mark.parametrize("d, h", TIMED)
def test_tiles_that_were_timed(d, h):
    """q lies in (4, 4096, 3, H, D), and a gradient is transposed."""
    q, dy = rows_of(4, 4096, 3, h, d)[:, :, 0], rows_of(4, h, 4096, d).transpose(1, 2)
    lead, _, found = selected(q, dy)
    assert lead == (4, 4096, h)
    assert tuple((each.rows, each.heads) for each in found) == TIMED[d, h]


VIEWS = {
    "tokens but the first": rows_of(2, 4096, 512)[:, 1:],
    "tokens of three images": rows_of(3, 257, 768)[:, 1:],
    "tokens of many images": rows_of(256, 197, 768)[:, 1:],
    "wide": rows_of(3, 4000, 1024)[:, 1:],
    "q but the first": rows_of(2, 4096, 32, 128)[:, 1:],
    "narrow q but the first": rows_of(2, 4096, 32, 64)[:, 1:],
    "q (B, H, T, D)": rows_of(2, 4095, 8, 128).transpose(1, 2),
    "narrow q (B, H, T, D)": rows_of(2, 4095, 8, 64).transpose(1, 2),
    "k of two heads (B, H, T, D)": rows_of(2, 4095, 2, 64).transpose(1, 2),
    "narrower q (B, H, T, D)": rows_of(2, 4095, 8, 32).transpose(1, 2),
    "short q (B, H, T, D)": rows_of(64, 127, 8, 128).transpose(1, 2),
    "q of one token": rows_of(64, 1, 3, 8, 128)[:, :, 0],
    "7 heads": rows_of(2, 4096, 3, 7, 128)[:, :, 0],
    "71 heads": rows_of(2, 4096, 3, 71, 64)[:, :, 0],
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_tiles_are_full(name, bias):
    lead, form, found = selected(VIEWS[name], bias=bias)
    assert form.heads
    for op, first in zip(OPS, found, strict=True):
        wasted = first.tiled_rows(lead) / math.prod(lead)
        assert wasted < 1.07, (op, lead, first)


@pytest.mark.parametrize("n", [64, 128, 512, 1024, 2048])
def test_many_sequences_have_few_plans(n):
    """Each is a kernel to compile. A sequence of 256 or more has that of rows that `warmup` is told of by one head."""
    for view in (
        lambda t: rows_of(2, t + 1, n)[:, 1:],
        lambda t: rows_of(2, t, 8, n).transpose(1, 2),
        lambda t: rows_of(2, t + 1, 4, n)[:, 1:],
    ):
        forms = {selected(view(t))[1] for t in range(2, 4200, 13)}
        assert len(forms) <= (1 if n > 1024 else 7)
        long = {selected(view(t))[1] for t in range(256, 4200, 13)}
        assert len(long) == 1
    assert (
        selected(rows_of(2, 4096, n)[:, 1:])[1] == form_of([rows_of(1, 1, 1, n)], (), False, False, False)[1]
    )


def test_heads_of_a_tile():
    found = {h: heads_of_form(128, h) for h in range(1, 5000)}
    assert set(found.values()) == {1, 2, 4, 8, 16, 64}
    for h, each in found.items():
        assert each == min(16, h & -h) or -(-h // each) * each <= h * (17 / 16 if h < 256 else 5 / 4)
    assert {heads_of_form(1025, h) for h in (1, 7, 16, 4096)} == {1}, "a row a block"


def test_weights_of_heads_have_tiles_that_divide_them():
    """All rows of a tile along T have the weights of its heads."""
    for h, n in itertools.product((8, 28, 71, 127, 256, 300), (64, 128, 1024)):
        q = rows_of(2, 4096, 3, h, n)[:, :, 0]
        lead, form, found = selected(q, per_head=True)
        assert form == Form(heads=h, per_head=True) and lead[2] == h
        assert all(h % each.heads == 0 and each.heads <= 16 for each in found)


@pytest.mark.parametrize(
    "n, form, found",
    [
        (128, Form(), (64, 4)),
        (128, Form(bias=True), (64, 4)),
        (128, Form(is_scattered=True), (32, 4)),
        (100, Form(), (32, 4)),
        (128, Form(per_head=True), (32, 4)),
        (128, Form(per_head=True, bias=True), (32, 3)),
    ],
    ids=str,
)
def test_forwards_beside_a_residual_hold_what_registers_have_room_for(n, form, found):
    """(rows of a tile, blocks an SM). On Hopper larger tiles spilled up to 408 bytes a thread where weights are of
    heads or rows begin anywhere; others did not, and keep them."""
    asked = planning.problem("forward", n, form=form._replace(residual=True, heads=8))
    first = select(asked, planning.rules_of()).first
    assert (first.rows_of_tile, first.occupancy) == found


def test_forms_of_several_dtypes_have_them_too():
    rows = rows_of(2, 8, 4096, 64).transpose(1, 2)[:, 1:], rows_of(2, 4095, 8, 64).to(FP32)
    dtype, form = form_of(viewed(rows, views_of(64, 0, rows)), (BF16,), True, False, False)
    assert dtype is FP32 and form.heads == 8 and form.narrowest == 2
