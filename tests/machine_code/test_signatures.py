# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What tests compile in place of a launch: tuples as arguments, each of whose forms is a kernel of its own."""

from __future__ import annotations

import cuda.tile as ct
import pytest
import torch
from compiling import CompilingMachine, meta, signature_of, skip_without_compiler

from tilegym_rmsnorm.backends.cutile.plans.variants import ForwardTiles

skip_without_compiler()

VARIANT = ForwardTiles(rows=1, width=64, warps=4, occupancy=1, latency=4)


def add_others(y, x, others, WIDTH: ct.Constant):
    tile = ct.load(x, (ct.bid(0), 0), (1, WIDTH), padding_mode=ct.PaddingMode.ZERO)
    if len(others) > 0:
        other, alpha = others
        tile = tile * alpha + ct.load(other, (ct.bid(0), 0), (1, WIDTH), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (ct.bid(0), 0), tile)


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return meta(4096, 64, dtype=dtype)


def symbol(*arguments) -> str | None:
    return signature_of(arguments, ()).with_mangled_symbol("kernel").symbol


@pytest.mark.parametrize("others", [(), (rows(torch.bfloat16), 0.5)], ids=["without", "with"])
def test_a_kernel_with_a_tuple_compiles(others):
    machine = CompilingMachine(90)
    machine.bind(add_others, VARIANT, (64,))((4096,), (rows(), rows(), others))
    [result] = machine.results
    assert result.registers > 0 and result.stack == 0


def test_tuples_are_told_apart_as_their_items_are():
    forms = (
        (),
        (rows(),),
        (rows(torch.float16),),
        ((rows(),),),
        (rows(), 1.0),
        (rows(), 1),
        (meta(1, 64, dtype=torch.float32),),
    )
    assert len({symbol(rows(), each) for each in forms}) == len(forms)
    assert symbol(rows(), (rows(), 1.0)) == symbol(rows(), (rows(), 2.5)), "a number is no constant"
