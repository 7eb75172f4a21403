# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Backend "cutile": allocates outputs, computes grids and launches the configured kernels.

`Forward` and `Backward` hold what is decided once per device, width, dtype and switches; a call only allocates and
launches. With TILEGYM_RMSNORM_INTERPRET=1 CPU tensors take the same path and the interpreter runs the kernels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tilegym_rmsnorm.backends.cutile import backward, forward
from tilegym_rmsnorm.backends.cutile.config import (
    LARGEST_GRID,
    Config,
    backward_config,
    forward_config,
    means_config,
    partial_rows,
    row_partials_config,
    sum_config,
)
from tilegym_rmsnorm.backends.cutile.machine import Machine, machine_of
from tilegym_rmsnorm.registry import register_impl

# A kernel sees shapes, strides and row numbers as int32; only the offsets of elements are computed in 64 bits.
MOST_ROWS = 2**30
LARGEST_ROW_STRIDE = 2**31 - 1


@register_impl("rms_norm_forward", "cutile")
def rms_norm_forward(
    x: Tensor, weight: Tensor | None, bias: None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """y (M, N) of x's dtype and rstd (M,), float32. x (M, N) with any row stride; `unusable` has refused a bias."""
    run = _forward(x.device, x.shape[1], x.dtype, weight is not None, casting == "llama")
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

    plan="row_partials" keeps one temporary row per row of x (P = M) instead of a few per SM: the same two kernels,
    14 bytes of traffic per bf16 element instead of 6.
    """
    has_dw = needs_dw and weight is not None
    run = _backward(x.device, x.shape[1], x.dtype, weight is not None, has_dw, casting == "llama", plan)
    return run(x, dy, weight, rstd, offset)


@functools.cache
def _forward(device: torch.device, n: int, dtype: torch.dtype, has_weight: bool, round_xhat: bool) -> Forward:
    machine = machine_of(device)
    return Forward(
        machine, forward_config(n, dtype.itemsize, machine.architecture), n, has_weight, round_xhat
    )


@functools.cache
def _backward(
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    has_weight: bool,
    has_dw: bool,
    round_xhat: bool,
    plan: str | None,
) -> Backward:
    if plan not in (None, "row_partials"):
        raise ValueError(f"plan: expected None or 'row_partials', got {plan!r}")
    machine = machine_of(device)
    configure = backward_config if plan is None else row_partials_config
    config = configure(n, dtype.itemsize, machine.architecture)
    return Backward(machine, config, n, has_weight, has_dw, round_xhat, shares_partials=plan is None)


class Forward:
    """The forward of rows of n elements by one config."""

    def __init__(self, machine: Machine, config: Config, n: int, has_weight: bool, round_xhat: bool) -> None:
        self.machine, self.config, self.n, self.inv_n = machine, config, n, 1.0 / n
        self.most_rows = min(MOST_ROWS, LARGEST_GRID * config.rows)
        function = {
            "rows": forward.forward_rows,
            "tiles": forward.forward_tiles,
            "chunks": forward.forward_chunks,
        }[config.kernel]
        self.launch = machine.bind(function, config, (*tile_constants(config, n), has_weight, round_xhat))

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        machine, n = self.machine, self.n
        x, m = _with_int32_stride(x), x.shape[0]
        y, rstd = machine.empty((m, n), x.dtype), machine.empty((m,), torch.float32)
        if weight is None:
            weight = machine.no_weight
        rows = self.config.rows
        if m <= self.most_rows:
            self.launch((-(-m // rows),), (y, rstd, x, weight, self.inv_n, eps, offset))
            return y, rstd
        for slab in zip(*(array.split(self.most_rows) for array in (y, rstd, x)), strict=True):
            blocks = -(-slab[0].shape[0] // rows)
            self.launch((blocks,), (*slab, weight, self.inv_n, eps, offset))
        return y, rstd


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
        self.most_rows = MOST_ROWS if shares_partials else LARGEST_GRID
        self.dependent = machine.dependent_launch
        switches = (has_weight, has_dw, round_xhat)
        if config.kernel == "strips":
            means = means_config(machine.architecture)
            constants = (*tile_constants(means, n), has_weight)
            self.launch_means = machine.bind(backward.backward_means, means, constants)
            switches = (*switches, self.dependent)
        function = {
            "rows": backward.backward_rows,
            "tiles": backward.backward_tiles,
            "strips": backward.backward_strips,
        }[config.kernel]
        if config.kernel == "rows":
            switches = (*switches, config.short, self.dependent)
        self.launch = machine.bind(function, config, (*tile_constants(config, n), *switches))
        self.sum = sum_config()
        self.sum_grid = (-(-n // self.sum.width),)
        self.launch_sum = machine.bind(
            backward.sum_partials, self.sum, (*tile_constants(self.sum, n), self.dependent)
        )

    def __call__(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        machine, n = self.machine, self.n
        x, dy, m = _with_int32_stride(x), _with_int32_stride(dy), x.shape[0]
        dx = machine.empty((m, n), x.dtype)
        scale = machine.no_weight if weight is None else weight
        dw = machine.empty((n,), weight.dtype) if self.has_dw else None
        if m > self.most_rows:
            self._run_slabs(dx, dw, dy, x, scale, rstd, offset)
            return dx, dw

        blocks = self.partial_rows_of(m)
        if dw is None:
            dw_partial = machine.no_dw_partial
        elif blocks == 1:
            dw_partial = dw.view(1, n)  # the one partial row is dw
        else:
            dw_partial = machine.empty((blocks, n), torch.float32)
        self._walk(blocks, dx, dw_partial, dy, x, scale, rstd, offset)
        if dw is not None and blocks > 1:
            self.launch_sum(self.sum_grid, (dw, dw_partial), self.dependent)
        return dx, dw

    def _run_slabs(
        self,
        dx: Tensor,
        dw: Tensor | None,
        dy: Tensor,
        x: Tensor,
        scale: Tensor,
        rstd: Tensor,
        offset: float,
    ) -> None:
        """More rows than one launch takes: the partial rows of each slab lie behind those of the one before."""
        slabs = list(zip(*(array.split(self.most_rows) for array in (dx, dy, x, rstd)), strict=True))
        counts = [self.partial_rows(slab[0].shape[0]) for slab in slabs]
        parts = [self.machine.no_dw_partial] * len(slabs)
        if dw is not None:
            dw_partial = self.machine.empty((sum(counts), self.n), torch.float32)
            parts = dw_partial.split(counts)
        for blocks, part, (slab_dx, slab_dy, slab_x, slab_rstd) in zip(counts, parts, slabs, strict=True):
            self._walk(blocks, slab_dx, part, slab_dy, slab_x, scale, slab_rstd, offset)
        if dw is not None:
            self.launch_sum(self.sum_grid, (dw, dw_partial), self.dependent)

    def partial_rows(self, m: int) -> int:
        """P, the rows of dw_partial that m rows of x leave."""
        return partial_rows(m, self.n, self.config, self.machine.sm_count) if self.shares_partials else m

    def _walk(
        self,
        blocks: int,
        dx: Tensor,
        dw_partial: Tensor,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        offset: float,
    ) -> None:
        if self.config.kernel != "strips":
            self.launch((blocks,), (dx, dw_partial, dy, x, weight, rstd, self.inv_n, offset))
            return
        m = x.shape[0]
        c = self.machine.empty((m,), torch.float32)
        self.launch_means((m,), (c, dy, x, weight, rstd, self.inv_n, offset))
        grid = (blocks, -(-self.n // self.config.width))
        self.launch(grid, (dx, dw_partial, dy, x, weight, rstd, c, offset), dependent=self.dependent)


def tile_constants(config: Config, n: int) -> tuple[Any, ...]:
    """The compile-time arguments that a config stands for, in its kernel's order."""
    if config.kernel == "rows":
        is_even = config.width + config.rest == n
        return config.width, config.rest, is_even, config.latency
    if config.kernel == "sum":
        return config.rows, config.width
    rows = () if config.kernel in ("chunks", "means") else (config.rows,)
    return (*rows, config.width, config.latency, config.tma)


def _with_int32_stride(x: Tensor) -> Tensor:
    if x.stride()[0] <= LARGEST_ROW_STRIDE:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single row as it is
