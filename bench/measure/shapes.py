# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Shapes to measure, and the bytes that each op must move at least.

Shapes are (rows, columns) of x. The default rows make x 64 to 134 MB in bf16 at the widths of real models, so that a
call is bound by memory and not by its launch; the batches of BATCHES show the launch-bound end. GRID is for heat maps.

The ops are forward, backward, both, and dx: the backward where the weight is frozen and dw not wanted. Those of a
transformer block, with a residual, a bias or strided heads, are in block/families.py.
"""

from __future__ import annotations

from typing import Any

import torch

OPS = ("forward", "backward", "both", "dx")

Shape = tuple[int, int]
Cell = tuple[str, int, int, str, str]  # op, rows, columns, dtype, provider
Record = dict[str, Any]  # see run_shape.py
Result = dict[str, Any]  # see report/tables.py

BATCHES: tuple[Shape, ...] = ((1, 4096), (16, 4096), (128, 4096), (1024, 4096), (4096, 256))
QK_NORM: tuple[Shape, ...] = tuple((rows, cols) for cols in (64, 128, 256) for rows in (131072, 524288))
MODELS: tuple[Shape, ...] = (
    *((rows, 1024) for rows in (4096, 16384, 32768)),
    (16384, 2048),
    (8192, 2560),
    *((16384, cols) for cols in (2880, 3072, 3584, 4096, 5120)),
    *((8192, cols) for cols in (6144, 7168, 8192, 12288)),
    *((4096, cols) for cols in (16384, 18432, 32768)),
    (2048, 65536),
)
WIDEST_HEAD = 256
DEFAULT_SHAPES = BATCHES + QK_NORM + MODELS
QUICK_SHAPES: tuple[Shape, ...] = ((16, 4096), (524288, 128), (4096, 1024), (16384, 4096), (8192, 7168))
GRID: tuple[Shape, ...] = tuple(
    (4**i, 4**j) for i in range(10) for j in range(3, 9) if 4 ** (i + j) <= 1 << 27
)  # 1 to 262144 rows, 64 to 65536 columns, x of at most 128 MiB in bf16
CPU_SHAPES: tuple[Shape, ...] = ((32, 128), (12, 500))
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """'4096x1024,16x64' as ((4096, 1024), (16, 64)); ValueError for anything else."""
    shapes = []
    for item in text.split(","):
        rows, cross, cols = item.strip().partition("x")
        if not (cross and rows.isdecimal() and cols.isdecimal() and int(rows) and int(cols)):
            raise ValueError(f"expected ROWSxCOLS,... with both at least 1, got {item!r}")
        shapes.append((int(rows), int(cols)))
    return tuple(shapes)


def compulsory_bytes(op: str, shape: Shape, dtype: torch.dtype) -> int:
    """Bytes that any implementation must move, x, y, dy, dx and both weights in `dtype`, rstd in float32.

    forward reads x, weight and writes y, rstd; backward reads x, dy, weight, rstd and writes dx, dw; dx is the backward
    without dw; both is the sum of forward and backward. Workspace never counts, so an implementation that needs less of
    it shows a higher rate.
    """
    rows, cols = shape
    size = dtype.itemsize
    forward = size * (2 * rows * cols + cols) + 4 * rows
    backward = size * (3 * rows * cols + 2 * cols) + 4 * rows
    both = forward + backward
    return {"forward": forward, "backward": backward, "both": both, "dx": backward - size * cols}[op]


def kind_of(result: Result) -> str:
    """Name a result's ops and shapes: of the plain norm at the shapes of models, of a grid, those of block/, or of
    widths.py."""
    if result.get("widths") is not None:
        return "widths"
    return "grid" if result.get("is_grid") else "block" if result.get("is_block") else "models"


def level_of(result: Result) -> str:
    """The level of reproducibility in effect; results from before they named it had none but "run"."""
    return result.get("reproducible", "run")


def shape_of(record: Record) -> Shape:
    return record["rows"], record["cols"]


def shape_text(record: Record) -> str:
    return "{} x {}".format(*shape_of(record))


def cell_of(record: Record) -> Cell:
    return record["op"], record["rows"], record["cols"], record["dtype"], record["provider"]
