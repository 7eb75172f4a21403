# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""One shape of the benchmark: check every provider, then time those that passed. A record is one cell of the result:

op, rows, cols, dtype, provider     what
settings, tried_us                  of a peer that has several: the fastest, and of each the time or why it has none; of
                                    cutile the kernel that served, and its own
us, us_p10, us_p90, samples         device microseconds per call: median, spread, number of samples
gb_per_s, copy_fraction             compulsory bytes over that time, and its share of the same run's copy ceiling
level_ratio                         of a backend under a level of reproducibility: us over that of the backend without
host_us                             host microseconds per eager call; of "both" by autograd
errors                              largest relative error of each output against float64: y, rstd, dx, dw, and of ops
                                    of block/ residual_out, d_residual, db. See check.py, block/check.py
workspace_bytes                     device memory that a call takes beside its outputs
first_calls_s                       seconds of the shape's first calls of all ops, compiling included
error                               why there are no figures, None where there are

Without a GPU the time is the wall clock's and copy_fraction, level_ratio, host_us and workspace_bytes are None.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.block import families
from bench.block.cell import BlockCell
from bench.block.families import by_family
from bench.measure.cell import Cell
from bench.measure.check import make_inputs
from bench.measure.session import Session
from bench.measure.shapes import Record, Shape
from tilegym_rmsnorm.measure.timer import sets_needed


class Bench(Session):
    """Measures shapes on one device with the providers and ops named: plain ops, or some of one family of block/."""

    def measure(self, shape: Shape, dtype: torch.dtype, progress: Callable[[str], None]) -> list[Record]:
        """The records of all ops and providers at one shape; `progress` is told what comes next."""
        rows, cols = shape
        [(family, _)] = by_family(self.ops)
        sets = sets_needed(dtype.itemsize * (rows * cols + cols), self.device)
        cell: Cell
        progress("check")
        if family is None:
            cell = Cell(self, shape, dtype, make_inputs(shape, dtype, self.device, sets))
        else:
            inputs = families.make_inputs(family, shape, dtype, self.device, sets)
            cell = BlockCell(family, self, shape, dtype, inputs)
        records = []
        for op in self.ops:
            progress(op)
            records += cell.measure(op)
        return records
