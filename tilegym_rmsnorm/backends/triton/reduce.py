# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The last kernel of a backward in Triton: dw, and db, from the partial rows that the kernels before leave
(backward.py)."""

import triton
import triton.language as tl


@triton.jit
def sum_columns(
    partial_ptr, sum_ptr, P, N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr
):
    """ROWS running sums, each over the rows of partial_ptr in index order, are then added as a tree; ADDS: and to what
    sum_ptr holds."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tsum = tl.zeros((ROWS, WIDTH), tl.float32)

    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        tmask = (rows < P)[:, None] & (columns < N)[None, :]
        tsum += tl.load(partial_ptr + rows[:, None] * N + columns[None, :], mask=tmask, other=0.0)

    total = tl.sum(tsum, axis=0)
    if ADDS:
        total = tl.load(sum_ptr + columns, mask=columns < N, other=0.0) + total
    tl.store(sum_ptr + columns, total, mask=columns < N)


@triton.jit(do_not_specialize=["P", "second_P"])
def sum_partials(
    partial_ptr,
    sum_ptr,
    P,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    second_partial_ptr,
    second_sum_ptr,
    second_P,
    SECOND_N: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Grid: (cdiv(N, WIDTH), 1), or 2 where there is a second sum, for the larger N: all columns, of all heads
    where each has its own weight. ADDS: 1 adds to the first sum, 2 to the second, 3 to both."""
    if second_sum_ptr is None:
        sum_columns(partial_ptr, sum_ptr, P, N, ROWS, WIDTH, ADDS % 2 == 1)
    else:
        if tl.program_id(1) == 0:
            sum_columns(partial_ptr, sum_ptr, P, N, ROWS, WIDTH, ADDS % 2 == 1)
        else:
            sum_columns(second_partial_ptr, second_sum_ptr, second_P, SECOND_N, ROWS, WIDTH, ADDS >= 2)
