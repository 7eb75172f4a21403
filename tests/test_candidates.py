# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The configs that tuning tries."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegym_rmsnorm.backends.cutile import candidates as space
from tilegym_rmsnorm.backends.cutile.candidates import candidates, distance, fits_registers
from tilegym_rmsnorm.backends.cutile.config import ARCHITECTURES, Config
from tilegym_rmsnorm.backends.cutile.tables import ITEMSIZE, RULES, SIZES, Bucket, check_config

OPS = tuple(RULES)


@given(
    op=st.sampled_from(OPS),
    n=st.one_of(st.integers(1, 2000), st.integers(2000, 100_000)),
    dtype=st.sampled_from(list(ITEMSIZE)),
    size=st.sampled_from(SIZES),
    architecture=st.sampled_from(ARCHITECTURES),
    most=st.integers(1, 80),
)
def test_candidates_are_few_distinct_possible_and_begin_with_the_rules(
    op, n, dtype, size, architecture, most
):
    bucket, itemsize = Bucket(op, n, dtype, size), ITEMSIZE[dtype]
    found = candidates(bucket, itemsize, architecture, most)
    default = RULES[op](n, itemsize, architecture)
    assert found[0] == default and 1 <= len(found) <= most
    assert len({replace(config, reason="", spills="") for config in found}) == len(found)
    for config in found[1:]:
        check_config(config, bucket, architecture)
        assert fits_registers(config, op, itemsize)
    assert [distance(config, default) for config in found[1:]] == sorted(
        distance(config, default) for config in found[1:]
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [64, 1024, 4096, 5120, 16384, 65536])
def test_every_width_has_a_choice(op, n):
    """Of more than one value of everything that its kernels have, jointly: no field is kept while others are swept."""
    for size in SIZES:
        found = candidates(Bucket(op, n, "bfloat16", size), 2, 90)
        assert len(found) >= 20
        for name in ("warps", "occupancy", "latency"):
            assert len({getattr(config, name) for config in found}) > 1, name
        changed = [
            sum(getattr(config, f.name) != getattr(found[0], f.name) for f in fields(Config))
            for config in found
        ]
        assert max(changed) >= 3


@pytest.mark.parametrize("op", OPS)
def test_sweeps_name_fields_of_config_and_kernels_of_the_op(op):
    names = {field.name for field in fields(Config)}
    for sweep in space.SWEEPS[op]:
        assert set(sweep.values) < names
        for tile in sweep.tiles(sweep.narrowest):
            config = Config(sweep.kernel, **tile, warps=4, occupancy=1, latency=1)
            check_config(config, Bucket(op, sweep.narrowest, "float32", "large"), 90)


def test_registers():
    rows = Config("rows", 16384, 8, 1, 4)
    assert fits_registers(rows, "backward", 2)
    assert not fits_registers(replace(rows, warps=4), "backward", 2), "192 registers and more for each thread"
    assert not fits_registers(replace(rows, occupancy=2), "backward", 2), (
        "two blocks have 128 for each thread"
    )
    assert not fits_registers(replace(rows, width=32768), "backward", 2)
    assert fits_registers(replace(rows, width=32768), "forward", 2)
    assert not fits_registers(Config("tiles", 64, 4, 8, 2, rows=1), "forward", 2), (
        "half of the threads are idle"
    )
