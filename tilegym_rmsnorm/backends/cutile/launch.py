# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Backend "cutile": allocates outputs, computes grids and launches the configured kernels.

`Forward` and `Backward` hold what is decided once per device, width, dtypes and switches; a call only allocates and
launches. With TILEGYM_RMSNORM_INTERPRET=1 CPU tensors take the same path and the interpreter runs the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile.kernels import (
    backward,
    backward_team,
    forward,
    forward_team,
    pipelined,
    reduce,
    reread,
    split,
    two_pass,
)
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config, constants_of
from tilegym_rmsnorm.backends.cutile.plans.rules import row_partials_config, sum_config
from tilegym_rmsnorm.backends.cutile.plans.select import chosen_config
from tilegym_rmsnorm.backends.cutile.plans.sizes import LARGEST_GRID, partial_rows, size_class, slab_tiles
from tilegym_rmsnorm.backends.cutile.plans.wide import means_config
from tilegym_rmsnorm.backends.cutile.runtime.boards import Boards
from tilegym_rmsnorm.backends.cutile.runtime.machine import Launch, Machine, machine_of
from tilegym_rmsnorm.registry import register_impl

# A kernel sees shapes, strides and row numbers as int32; only the offsets of elements are computed in 64 bits.
MOST_ROWS = 2**30
LARGEST_ROW_STRIDE = 2**31 - 1


@register_impl("rms_norm_forward", "cutile")
def rms_norm_forward(
    x: Tensor, weight: Tensor | None, bias: None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """y (M, N) of x's dtype and rstd (M,), float32. x (M, N) with any row stride; `unusable` has refused a bias."""
    m, n = x.shape
    weight_dtype = None if weight is None else weight.dtype
    run = _forward(x.device, n, x.dtype, weight_dtype, casting == "llama", size_class(m, n))
    return run(x, weight, eps, offset)


@register_impl("rms_norm_backward", "cutile")
def rms_norm_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    casting: str,
    needs_dw: bool,
    plan: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """dx (M, N) of x's dtype; dw (N,) of weight's, or None where not needed. x, dy (M, N), any row strides; rstd (M,).

    plan="row_partials" keeps one temporary row per row of x (P = M) instead of a few per SM: 14 bytes of traffic per
    bf16 element instead of 6 (18 where rows are too wide for registers and for teams).
    """
    has_dw = needs_dw and weight is not None
    m, n = x.shape
    size, weight_dtype = size_class(m, n), None if weight is None else weight.dtype
    run = _backward(x.device, n, x.dtype, weight_dtype, has_dw, casting == "llama", size, plan)
    return run(x, dy, weight, rstd, offset)


@functools.cache
def _forward(
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    round_xhat: bool,
    size: str,
) -> Forward:
    machine = machine_of(device)
    config = chosen_config("forward", machine, n, dtype, size, weight_dtype)
    return Forward(machine, config, n, weight_dtype is not None, round_xhat)


@functools.cache
def _backward(
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    has_dw: bool,
    round_xhat: bool,
    size: str,
    plan: str | None,
) -> Backward:
    if plan not in (None, "row_partials"):
        raise ValueError(f"plan: expected None or 'row_partials', got {plan!r}")
    machine = machine_of(device)
    shares_partials = plan is None or not has_dw
    if shares_partials:
        config = chosen_config("backward" if has_dw else "dx", machine, n, dtype, size, weight_dtype)
    else:
        config = row_partials_config(n, dtype.itemsize, machine.architecture, machine.most_members)
    return Backward(machine, config, n, weight_dtype is not None, has_dw, round_xhat, shares_partials)


class Forward:
    """The forward of rows of n elements by one config."""

    def __init__(self, machine: Machine, config: Config, n: int, has_weight: bool, round_xhat: bool) -> None:
        self.machine, self.config, self.n, self.inv_n = machine, config, n, 1.0 / n
        self.most_rows = min(MOST_ROWS, LARGEST_GRID * config.rows)
        function = {
            "rows": forward.forward_rows,
            "tiles": forward.forward_tiles,
            "teams": forward_team.forward_team,
            "chunks": reread.forward_reread,
        }[config.kernel]
        self.launch = _bind(machine, function, config, n, HAS_WEIGHT=has_weight, ROUND_XHAT=round_xhat)
        self.boards = None
        if config.kernel == "teams":
            self.boards = Boards(machine, config, n)
            self.most_rows = LARGEST_GRID // config.members

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        machine, n = self.machine, self.n
        x, m = _as_read(x, self.config.tma), x.shape[0]
        y, rstd = machine.empty((m, n), x.dtype), machine.empty((m,), torch.float32)
        if weight is None:
            weight = machine.no_weight
        if m <= self.most_rows:
            self._walk(m, y, rstd, x, weight, eps, offset)
            return y, rstd
        for part in zip(*(array.split(self.most_rows) for array in (y, rstd, x)), strict=True):
            self._walk(part[0].shape[0], *part, weight, eps, offset)
        return y, rstd

    def _walk(
        self, m: int, y: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float
    ) -> None:
        if self.boards is None:
            self.launch((-(-m // self.config.rows),), (y, rstd, x, weight, self.inv_n, eps, offset))
            return
        board = self.boards.new(m)
        self.launch((m * self.config.members,), (y, rstd, x, weight, board, self.inv_n, eps, offset))


class Backward:
    """The backward of rows of n elements by one config: what computes dx and the partial rows of dw, then their sum."""

    def __init__(
        self,
        machine: Machine,
        config: Config,
        n: int,
        has_weight: bool,
        has_dw: bool,
        round_xhat: bool,
        shares_partials: bool = True,
    ) -> None:
        self.machine, self.config, self.n, self.inv_n = machine, config, n, 1.0 / n
        self.has_dw, self.shares_partials = has_dw, shares_partials
        self.partial_rows_of = functools.lru_cache(self.partial_rows)  # the M of a model's calls repeat
        has_block_per_row = not shares_partials or config.kernel in ("chunks", "strips")
        self.most_rows = LARGEST_GRID if has_block_per_row else MOST_ROWS
        self.tma = config.tma
        if config.kernel == "strips":
            means = means_config(machine.architecture)
            self.tma |= means.tma
            self.launch_means = _bind(machine, two_pass.backward_means, means, n)
        if config.kernel == "teams":
            self.boards = Boards(machine, config, n)
            self.most_rows = min(self.most_rows // config.members, LARGEST_GRID)  # of blocks, and of a board
        function = {
            "rows": pipelined.backward_pipelined if config.tma else backward.backward_rows,
            "tiles": backward.backward_tiles,
            "teams": backward_team.backward_team,
            "fused": split.backward_split,
            "fused_chunks": split.backward_split,
            "strips": two_pass.backward_strips,
            "chunks": reread.backward_reread,
        }[config.kernel]
        switches = {"HAS_WEIGHT": has_weight, "HAS_DW": has_dw, "ROUND_XHAT": round_xhat}
        self.launch = _bind(machine, function, config, n, **switches)
        self.sum = sum_config(config, n, machine.architecture)
        self.sum_grid = (-(-n // self.sum.width),)
        self.launch_sum = _bind(machine, reduce.sum_partials, self.sum, n)

    def __call__(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        machine, n = self.machine, self.n
        x, dy, m = _as_read(x, self.tma), _as_read(dy, self.tma), x.shape[0]
        dx = machine.empty((m, n), x.dtype)
        scale = machine.no_weight if weight is None else weight
        dw = machine.empty((n,), weight.dtype) if self.has_dw else None
        if m > self.most_rows:
            self._run_parts(dx, dw, dy, x, scale, rstd, offset)
            return dx, dw

        p = self.partial_rows_of(m)
        if dw is None:
            dw_partial = machine.no_dw_partial
        elif p == 1:
            dw_partial = dw.view(1, n)  # the one partial row is dw
        else:
            dw_partial = machine.empty((p, n), torch.float32)
        self._walk(p, dx, dw_partial, dy, x, scale, rstd, offset)
        if dw is not None and p > 1:
            self.launch_sum(self.sum_grid, (dw, dw_partial))
        return dx, dw

    def _run_parts(
        self,
        dx: Tensor,
        dw: Tensor | None,
        dy: Tensor,
        x: Tensor,
        scale: Tensor,
        rstd: Tensor,
        offset: float,
    ) -> None:
        """More rows than one launch takes: the partial rows of each part lie behind those of the one before."""
        parts = list(zip(*(array.split(self.most_rows) for array in (dx, dy, x, rstd)), strict=True))
        counts = [self.partial_rows(part[0].shape[0]) for part in parts]
        sums = [self.machine.no_dw_partial] * len(parts)
        if dw is not None:
            dw_partial = self.machine.empty((sum(counts), self.n), torch.float32)
            sums = dw_partial.split(counts)
        for p, part_sums, (part_dx, part_dy, part_x, part_rstd) in zip(counts, sums, parts, strict=True):
            self._walk(p, part_dx, part_sums, part_dy, part_x, scale, part_rstd, offset)
        if dw is not None:
            self.launch_sum(self.sum_grid, (dw, dw_partial))

    def partial_rows(self, m: int) -> int:
        """P, the rows of dw_partial that m rows of x leave."""
        return partial_rows(m, self.n, self.config, self.machine.sm_count) if self.shares_partials else m

    def _walk(
        self,
        p: int,
        dx: Tensor,
        dw_partial: Tensor,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        offset: float,
    ) -> None:
        m, n = x.shape
        config, arguments = self.config, (dx, dw_partial, dy, x, weight, rstd)
        if config.kernel == "chunks":
            self.launch((m,), (dx, *arguments[2:], self.inv_n, offset))
        elif config.kernel == "strips":
            c = self.machine.empty((m,), torch.float32)
            self.launch_means((m,), (c, dy, x, weight, rstd, self.inv_n, offset))
            self.launch((p, -(-n // config.width)), (*arguments, c, offset))
        elif config.kernel == "teams":
            self.launch((p * config.members,), (*arguments, self.boards.new(m), self.inv_n, offset))
        elif config.is_fused:
            tiles = slab_tiles(m, config, self.machine.sm_count)
            rows = tiles * config.rows
            if p == 1 and config.kernel == "fused":
                rows = m  # blocks for rows past M would have nothing to do
            grid = (-(-n // config.strip) + rows, p)
            self.launch(grid, (*arguments, self.inv_n, offset, tiles))
        else:
            self.launch((p,), (*arguments, self.inv_n, offset))


def _bind(
    machine: Machine, function: Callable[..., None], config: Config, n: int, **switches: bool
) -> Launch:
    """What launches a kernel by a config on rows of n elements."""
    constants = constants_of(function, config, n, DEPENDENT=machine.dependent_launch, **switches)
    return machine.bind(function, config, constants)


def _as_read(x: Tensor, tma: bool) -> Tensor:
    """x, or a copy where rows lie too far apart, or where a kernel by TMA would not read them as it reads packed ones.

    Packed rows begin at multiples of 16 bytes or, by their length, do not. Rows that do not the compiler loads element
    by element, and beside an array by TMA it may load over tiles that are still read: float32 rows of 5120 columns and
    teams of 12288 where dy alone is such a view, rows of 5119 where x alone is aligned.
    """
    stride, itemsize = x.stride()[0], x.itemsize
    if stride <= LARGEST_ROW_STRIDE:
        if not tma or ((stride * itemsize | x.data_ptr()) & 15 == 0) == (x.shape[1] * itemsize & 15 == 0):
            return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single row as it is
