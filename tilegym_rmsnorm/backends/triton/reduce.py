# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""The last kernel of a backward in Triton: dw, and db, from the partial rows that the kernels before leave
(backward.py)."""

import triton
import triton.language as tl


@triton.jit
def sum_columns(partial_ptr, sum_ptr, P, N: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """ROWS running sums, each over the rows of partial_ptr in index order, are then added as a tree."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tsum = tl.zeros((ROWS, WIDTH), tl.float32)

    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        tmask = (rows < P)[:, None] & (columns < N)[None, :]
        tsum += tl.load(partial_ptr + rows[:, None] * N + columns[None, :], mask=tmask, other=0.0)

    tl.store(sum_ptr + columns, tl.sum(tsum, axis=0), mask=columns < N)


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
):
    """Grid: (cdiv(N, WIDTH), 1), or 2 where there is a second sum, for the larger N: all columns, of all heads
    where each has its own weight."""
    if second_sum_ptr is None:
        sum_columns(partial_ptr, sum_ptr, P, N, ROWS, WIDTH)
    else:
        if tl.program_id(1) == 0:
            sum_columns(partial_ptr, sum_ptr, P, N, ROWS, WIDTH)
        else:
            sum_columns(second_partial_ptr, second_sum_ptr, second_P, SECOND_N, ROWS, WIDTH)
