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
    SMALL,
    Config,
    means_config,
    partial_rows,
    row_partials_config,
    sum_config,
)
from tilegym_rmsnorm.backends.cutile.machine import Machine, machine_of
from tilegym_rmsnorm.backends.cutile.tables import chosen_config
from tilegym_rmsnorm.registry import register_impl

# A kernel sees shapes, strides and row numbers as int32; only the offsets of elements are computed in 64 bits.
MOST_ROWS = 2**30
LARGEST_ROW_STRIDE = 2**31 - 1


@register_impl("rms_norm_forward", "cutile")
def rms_norm_forward(
    x: Tensor, weight: Tensor | None, bias: None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """y (M, N) of x's dtype and rstd (M,), float32. x (M, N) with any row stride; `unusable` has refused a bias."""
    run = _forward(x.device, x.shape[1], x.dtype, weight is not None, casting == "llama", x.numel() <= SMALL)
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
    is_small = x.numel() <= SMALL
    run = _backward(
        x.device, x.shape[1], x.dtype, weight is not None, has_dw, casting == "llama", is_small, plan
    )
    return run(x, dy, weight, rstd, offset)


@functools.cache
def _forward(
    device: torch.device, n: int, dtype: torch.dtype, has_weight: bool, round_xhat: bool, is_small: bool
) -> Forward:
    machine = machine_of(device)
    config = chosen_config("forward", machine, n, dtype, is_small)
    return Forward(machine, config, n, has_weight, round_xhat)


@functools.cache
def _backward(
    device: torch.device,
    n: int,
    dtype: torch.dtype,
    has_weight: bool,
    has_dw: bool,
    round_xhat: bool,
    is_small: bool,
    plan: str | None,
) -> Backward:
    if plan not in (None, "row_partials"):
        raise ValueError(f"plan: expected None or 'row_partials', got {plan!r}")
    machine = machine_of(device)
    if plan is None:
        config = chosen_config("backward", machine, n, dtype, is_small)
    else:
        config = row_partials_config(n, dtype.itemsize, machine.architecture)
    return Backward(machine, config, n, has_weight, has_dw, round_xhat, shares_partials=plan is None)


class Forward:
    """The forward of rows of n elements by one config."""

    def __init__(self, machine: Machine, config: Config, n: int, has_weight: bool, round_xhat: bool) -> None:
        self.machine, self.config, self.n = machine, config, n
        self.most_rows = min(MOST_ROWS, LARGEST_GRID * config.rows)
        function = {
            "rows": forward.forward_rows,
            "tiles": forward.forward_tiles,
            "chunks": forward.forward_chunks,
        }[config.kernel]
        self.launch = machine.bind(function, config, (*tile_constants(config, n), has_weight, round_xhat))

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        machine, n = self.machine, self.n
        x = _with_int32_stride(x)
        y = machine.empty((x.shape[0], n), x.dtype)
        rstd = machine.empty((x.shape[0],), torch.float32)
        if weight is None:
            weight = machine.no_weight
        for slab_y, slab_rstd, slab_x in _slabs(self.most_rows, y, rstd, x):
            blocks = -(-slab_x.shape[0] // self.config.rows)
            self.launch((blocks,), (slab_y, slab_rstd, slab_x, weight, 1.0 / n, eps, offset))
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
        self.machine, self.config, self.n = machine, config, n
        self.has_dw, self.shares_partials = has_dw, shares_partials
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
        self.launch_sum = machine.bind(
            backward.sum_partials, self.sum, (*tile_constants(self.sum, n), self.dependent)
        )

    def __call__(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, rstd: Tensor, offset: float
    ) -> tuple[Tensor, Tensor | None]:
        machine, n = self.machine, self.n
        x, dy = _with_int32_stride(x), _with_int32_stride(dy)
        dx = machine.empty((x.shape[0], n), x.dtype)
        scale = machine.no_weight if weight is None else weight
        slabs = _slabs(self.most_rows, dx, dy, x, rstd)
        if not self.has_dw:
            for slab in slabs:
                self._walk(*slab, machine.no_dw_partial, scale, offset)
            return dx, None

        dw = machine.empty((n,), weight.dtype)
        counts = [self.partial_rows(slab[0].shape[0]) for slab in slabs]
        if counts == [1]:  # the one partial row is dw
            self._walk(*slabs[0], dw.view(1, n), scale, offset)
            return dx, dw
        dw_partial = machine.empty((sum(counts), n), torch.float32)
        for slab, part in zip(slabs, _split(dw_partial, counts), strict=True):
            self._walk(*slab, part, scale, offset)
        strips = -(-n // self.sum.width)
        self.launch_sum((strips,), (dw, dw_partial), dependent=self.dependent)
        return dx, dw

    def partial_rows(self, m: int) -> int:
        """P, the rows of dw_partial that m rows of x leave."""
        return partial_rows(m, self.n, self.config, self.machine.sm_count) if self.shares_partials else m

    def _walk(
        self,
        dx: Tensor,
        dy: Tensor,
        x: Tensor,
        rstd: Tensor,
        dw_partial: Tensor,
        weight: Tensor,
        offset: float,
    ) -> None:
        m, n = x.shape
        blocks = self.partial_rows(m)
        if self.config.kernel != "strips":
            self.launch((blocks,), (dx, dw_partial, dy, x, weight, rstd, 1.0 / n, offset))
            return
        c = self.machine.empty((m,), torch.float32)
        self.launch_means((m,), (c, dy, x, weight, rstd, 1.0 / n, offset))
        grid = (blocks, -(-n // self.config.width))
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


def _slabs(most_rows: int, *arrays: Tensor) -> list[tuple[Tensor, ...]]:
    """The arrays, split alike along their first dimension into parts of at most `most_rows`: nearly always one."""
    m = arrays[0].shape[0]
    if m <= most_rows:
        return [arrays]
    return list(zip(*(array.split(most_rows) for array in arrays), strict=True))


def _split(dw_partial: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    return (dw_partial,) if len(counts) == 1 else dw_partial.split(counts)


def _with_int32_stride(x: Tensor) -> Tensor:
    if x.stride(0) <= LARGEST_ROW_STRIDE:
        return x
    return x.clone(memory_format=torch.contiguous_format)  # contiguous() leaves a single row as it is
