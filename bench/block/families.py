# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Ops that a transformer block needs beside the plain norm: shapes, inputs, and the bytes that they must move.

Ops that read the same inputs are a family, checked together. Shapes are (rows, columns) here too. Those of heads are
(B, T, H, D) with B * T * H rows: q is a slice of (B, T, 3, H, D), and dy is (B, H, T, D) transposed, as attention's
backward leaves it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import tilegym_rmsnorm as tr
from bench.measure.shapes import OPS, Shape
from bench.providers.ours import EPS

ALPHA = 0.22  # by which Granite multiplies the branch before it adds it
TOKENS = 4 * 4096  # B * T of the default shapes of heads
HEADS, HEAD_SIZES = (8, 28, 32, 40), (64, 80, 96, 128, 160, 192, 256)

HIDDEN: tuple[Shape, ...] = (
    (32768, 2048),
    (16384, 4096),
    *((8192, cols) for cols in (5120, 7168, 8192)),
    (4096, 16384),
)  # 8 bytes an element are 336 MB to 537 MB in bf16
FEW_ROWS: tuple[Shape, ...] = ((128, 4096),)
FROZEN: tuple[Shape, ...] = ((16384, 4096), (8192, 7168), (4096, 16384))
QUICK_HIDDEN: tuple[Shape, ...] = ((16384, 4096), (8192, 7168))
STRIDED: tuple[Shape, ...] = tuple((TOKENS * heads, size) for heads in HEADS for size in HEAD_SIZES)
QUICK_STRIDED: tuple[Shape, ...] = ((TOKENS * 8, 64), (TOKENS * 32, 128))
CPU_HIDDEN: tuple[Shape, ...] = ((32, 128), (12, 500))
CPU_STRIDED: tuple[Shape, ...] = ((48, 16),)
WIDEST_BIAS = 8192


class Family(NamedTuple):
    """Ops with the outputs of each, and what their inputs have beside x, weight and dy.

    tries_settings: of peers all settings are timed, as those of plain ops are; else what a peer chooses by itself.
    without: backends that are measured by --provider alone.
    """

    name: str
    outputs: dict[str, tuple[str, ...]]
    shapes: tuple[Shape, ...]
    quick_shapes: tuple[Shape, ...] = QUICK_HIDDEN
    cpu_shapes: tuple[Shape, ...] = CPU_HIDDEN
    has_residual: bool = False
    has_bias: bool = False
    is_strided: bool = False
    alpha: float = 1.0
    tries_settings: bool = False
    without: tuple[str, ...] = ()

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(self.outputs)


FAMILIES = (
    Family(
        "residual",
        {"residual_forward": ("y", "residual_out", "rstd"), "residual_backward": ("dx", "dw")},
        HIDDEN + FEW_ROWS,
        has_residual=True,
        tries_settings=True,
    ),
    # Two gradients: dx is alpha times the residual's.
    Family(
        "scaled residual",
        {"scaled_residual_backward": ("dx", "d_residual", "dw")},
        HIDDEN,
        has_residual=True,
        alpha=ALPHA,
    ),
    Family(
        "heads",
        {
            "qk_norm_forward": ("y", "rstd"),
            "qk_norm_backward": ("dx", "dw"),
            "contiguous_forward": ("y", "rstd"),
            "contiguous_backward": ("dx", "dw"),
        },
        STRIDED,
        QUICK_STRIDED,
        CPU_STRIDED,
        is_strided=True,
        without=("triton",),
    ),
    Family(
        "bias",
        {
            "bias_forward": ("y", "rstd"),
            "bias_backward": ("dx", "dw", "db"),
            "no_bias_forward": ("plain_y", "rstd"),
            "no_bias_backward": ("dx", "dw"),
        },
        tuple(shape for shape in HIDDEN if shape[1] <= WIDEST_BIAS),
        has_bias=True,
    ),
    Family("frozen weight", {"frozen_weight_backward": ("dx",)}, FROZEN),
)
BLOCK_OPS = tuple(op for family in FAMILIES for op in family.ops)
ALL_OPS = (*OPS, *BLOCK_OPS)
# By op the one without what it has more, at the same shape: of cutile alone.
CONTROLS = {
    "qk_norm_forward": "contiguous_forward",
    "qk_norm_backward": "contiguous_backward",
    "bias_forward": "no_bias_forward",
    "bias_backward": "no_bias_backward",
}
# Names for several ops, that the command line takes.
GROUPS = {"qk_norm": ("qk_norm_forward", "qk_norm_backward")}


class Section(NamedTuple):
    """Ops of one family, or plain ones, the shapes at which they are measured, and backends that are left out there."""

    ops: tuple[str, ...]
    shapes: tuple[Shape, ...]
    without: tuple[str, ...] = ()

    def only(self, ops: Sequence[str] | None) -> Section:
        """The section with these of its ops; None: all."""
        return self if ops is None else self._replace(ops=tuple(op for op in self.ops if op in ops))


def family_of(op: str) -> Family | None:
    """Return None for a plain op."""
    return next((family for family in FAMILIES if op in family.ops), None)


def by_family(ops: Sequence[str]) -> list[tuple[Family | None, tuple[str, ...]]]:
    """The ops of each family, in the order of ALL_OPS; plain ones first."""
    wanted = [op for op in ALL_OPS if op in ops]
    named = [(family, tuple(op for op in wanted if family_of(op) is family)) for family in (None, *FAMILIES)]
    return [(family, of_family) for family, of_family in named if of_family]


def compulsory_bytes(op: str, shape: Shape, dtype: torch.dtype) -> int:
    """A forward with a residual reads two arrays and writes two; a backward with one reads three and writes
    one, or two where x's and the residual's gradients differ."""
    rows, cols = shape
    arrays = {"forward": 2, "backward": 3}[op.rpartition("_")[2]]
    arrays += {"residual_forward": 2, "residual_backward": 1, "scaled_residual_backward": 2}.get(op, 0)
    vectors = {"forward": 1, "backward": 2}[op.rpartition("_")[2]]  # weight, bias, dw, db
    vectors += {"bias_forward": 1, "bias_backward": 1, "frozen_weight_backward": -1}.get(op, 0)
    return dtype.itemsize * (arrays * rows * cols + vectors * cols) + 4 * rows


@dataclass(frozen=True)
class BlockInputs:
    """One set. x, residual, dy and d_residual_out are (M, N), or x and dy (B, T, H, N) and strided.

    normalized: what a backward has saved, alpha * x + residual or x. rstd: (M,), of that. packed, packed_dy: (M, N) of
    normalized and dy, contiguous; who copies a strided x saves that.
    """

    x: Tensor
    weight: Tensor
    dy: Tensor
    normalized: Tensor
    rstd: Tensor
    packed: Tensor
    packed_dy: Tensor
    alpha: float = 1.0
    bias: Tensor | None = None
    residual: Tensor | None = None
    d_residual_out: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in vars(self).values() if isinstance(each, Tensor)]


def make_inputs(
    family: Family, shape: Shape, dtype: torch.dtype, device: torch.device, sets: int, seed: int = 0
) -> list[BlockInputs]:
    """`sets` distinct sets that tell wrong results from right ones, as check.make_inputs makes them."""
    generator = torch.Generator(device).manual_seed(seed)
    return [_make_set(family, shape, dtype, device, generator) for _ in range(sets)]


def _make_set(
    family: Family, shape: Shape, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> BlockInputs:
    cols = shape[1]
    normal = functools.partial(torch.randn, dtype=dtype, device=device, generator=generator)
    if family.is_strided:
        b, t, h = heads_of(shape[0])
        x, dy = normal(b, t, 3, h, cols)[:, :, 0], normal(b, h, t, cols).transpose(1, 2)
    else:
        x, dy = normal(shape), normal(shape)
    x *= normal(*x.shape[:-1], 1, dtype=torch.float32).exp().to(dtype)
    x[..., cols // 3] *= 8
    weight = normal(cols) * 0.5 + 1.5
    bias = normal(cols) if family.has_bias else None
    residual = d_residual_out = None
    normalized = x
    if family.has_residual:
        residual, d_residual_out = normal(shape), normal(shape)
        normalized = (family.alpha * x.float() + residual.float()).to(dtype)
    packed = normalized.reshape(-1, cols)
    rstd = tr.compute_rms_norm_rstd_torch(packed, EPS)
    of_rows = normalized, rstd, packed, dy.reshape(-1, cols)
    return BlockInputs(x, weight, dy, *of_rows, family.alpha, bias, residual, d_residual_out)


def heads_of(rows: int) -> tuple[int, int, int]:
    """B, T and H of so many rows: (4, 4096, H) where TOKENS divides them, else B and H of 2 where they fit."""
    if rows % TOKENS == 0:
        return 4, TOKENS // 4, rows // TOKENS
    b, h = math.gcd(rows, 2), math.gcd(rows // math.gcd(rows, 2), 2)
    return b, rows // (b * h), h
