# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""One shape of the benchmark: check every provider, then time those that passed. A record is one cell of the result:

op, rows, cols, dtype, provider     what
settings, tried_us                  of a peer that has several: the fastest, and of each the time or why it has none; of
                                    cutile the config that served
us, us_p10, us_p90, samples         device microseconds per call: median, spread, number of samples
gb_per_s, copy_fraction             compulsory bytes over that time, and its share of the same run's copy ceiling
host_us                             host microseconds per eager call; of "both" by autograd
errors                              largest relative error of y, rstd, dx, dw against float64, see check.py
workspace_bytes                     device memory that a call takes beside its outputs
first_calls_s                       seconds of the shape's first calls of all ops, compiling included
error                               why there are no figures, None where there are

Without a GPU the time is the wall clock's and copy_fraction, host_us and workspace_bytes are None.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator

import torch

from bench.cell import Cell, Record
from bench.check import make_inputs
from bench.shapes import Shape
from tilegym_rmsnorm.timer import DeviceTimer, sets_needed

COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal: compilers write it into their errors


class ContextLostError(RuntimeError):
    """A kernel of `provider` broke the CUDA context: nothing more can run in this process."""

    def __init__(self, provider: str, text: str):
        super().__init__(f"{provider}: {text}")
        self.provider, self.text = provider, text


class Bench:
    """Measures shapes on one device with the providers and ops named."""

    def __init__(self, providers: tuple[str, ...], ops: tuple[str, ...], device: torch.device):
        self.providers, self.ops, self.device = providers, ops, device
        self.is_cuda = device.type == "cuda"
        self.timer = DeviceTimer(device)
        self.copy_bytes_per_second = self.timer.copy_bytes_per_second() if self.is_cuda else None

    def measure(self, shape: Shape, dtype: torch.dtype, progress: Callable[[str], None]) -> list[Record]:
        """The records of all ops and providers at one shape; `progress` is told what comes next."""
        rows, cols = shape
        bytes_read = dtype.itemsize * (rows * cols + cols)
        inputs = make_inputs(shape, dtype, self.device, sets_needed(bytes_read, self.device))
        progress("check")
        cell = Cell(self, shape, dtype, inputs)
        records = []
        for op in self.ops:
            progress(op)
            records += cell.measure(op)
        return records

    @contextlib.contextmanager
    def contained(self, provider: str, fail: Callable[[str], None]) -> Iterator[None]:
        """Passes an exception of one provider to `fail`, as one line, so that the others are still measured."""
        try:
            yield
        except Exception as error:
            fail(describe(error))
            if self.is_cuda:
                try:
                    torch.cuda.synchronize(self.device)
                    torch.cuda.empty_cache()
                except RuntimeError as lost:
                    raise ContextLostError(provider, f"{describe(error)}; then {_one_line(lost)}") from lost


def describe(error: BaseException) -> str:
    """One line: the exception, and the one that it hides (a failed capture hides why it failed)."""
    text = _one_line(error)
    if error.__context__ is not None and not error.__suppress_context__:
        text += f" (after {_one_line(error.__context__)})"
    return text


def _one_line(error: BaseException) -> str:
    text = COLOUR.sub("", "".join(traceback.format_exception_only(error)))
    return " ".join(text.split())[:400]
