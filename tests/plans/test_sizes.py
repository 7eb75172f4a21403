# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Size classes, and slabs of few rows, by the number of rows."""

from hypothesis import given
from hypothesis import strategies as st
from planning import by_rules

from tilegym_rmsnorm.backends.cutile.plans.sizes import NO_END, SIZES, rows_of_class, size_class


def test_size_classes_follow_rows_and_elements():
    assert [size_class(m, 4096) for m in (0, 1, 1024, 1025, 2**20)] == ["few", "few", "few", "large", "large"]
    assert [size_class(m, 256) for m in (1024, 1025, 16384, 16385)] == ["few", "small", "small", "large"]
    assert size_class(16, 2**18) == "few" and size_class(16, 2**18 + 1) == "large"


@given(size=st.sampled_from(SIZES), n=st.integers(1, 2**23))
def test_the_rows_of_a_class_are_those_that_are_in_it(size, n):
    rows = rows_of_class(size, n)
    assert all(size_class(m, n) == size for m in (*rows[:3], *rows[-3:]))
    for m in (rows.start - 1, rows.stop):
        assert m < 1 or size_class(m, n) != size or m == NO_END


def test_which_few_rows_take_more_than_one_slab():
    """One row of dw_partial is dw itself."""

    for n in (64, 512, 513, 1024, 2048, 4096, 8192, 12288, 16384):
        for dtype in ("bfloat16", "float32"):
            first = by_rules("backward", n, dtype, "few").first
            one_slab = {"bfloat16": {8192: 512}, "float32": {64: 128, 16384: 64}}[dtype].get(
                n, 256 if n <= 512 else 1024
            )
            for m in (1, 16, 128, 129, 256, 257, 1024):
                if m in rows_of_class("few", n):
                    assert first.partial_rows(m, n, 132) == -(-m // one_slab), (m, n, dtype)
