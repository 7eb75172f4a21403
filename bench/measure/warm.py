# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Compiles in many processes what the benchmark will run, so that its own process finds it in the caches on disk.

A process has a GPU context of its own and makes the first calls of one provider at one shape, with the arguments that
are timed later; quack's many settings are shared between processes. What fails here fails there again, and is reported
there.

Inductor chooses between kernels by their times, which other work on the GPU may falsify. So what Inductor compiles
comes last, and its processes take turns in measuring, by inductor.py, and in making inputs. What else they do on the
GPU meanwhile is to run each kernel once.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from bench.block import cell as block_cell
from bench.block import families
from bench.block.families import Family, Section, by_family
from bench.measure import inductor
from bench.measure.check import checked_ops, make_inputs, run_op
from bench.measure.shapes import OPS, Shape
from bench.providers.ours import backend_of, in_level
from bench.providers.peers import make_providers

PROCESSES = 14  # each has some GB of tensors at the largest shapes
# Without a cache on disk (liger.cute), or with nothing to compile.
NOT_WARMED = frozenset(("liger.cute", "F.rms_norm", "torch"))
SHARES = {"quack": 4}  # how many processes share the settings of one shape; of others one has them all
BY_WIDTH = frozenset(("quack", "liger.triton"))  # compile for columns, not for rows or heads
_turn: Path | None = None  # the file that whoever uses the GPU locks, where Inductor measures


class Task(NamedTuple):
    """The first calls of one provider at one shape, or of every SHARES-th of its settings."""

    provider: str
    shape: Shape
    dtype: torch.dtype
    share: int = 0
    ops: tuple[str, ...] = OPS  # plain ones, or some of one family of block/

    @property
    def is_measured(self) -> bool:
        """Whether Inductor measures in it."""
        return self.provider in inductor.PROVIDERS


def warm(
    providers: Sequence[str],
    sections: Sequence[Section],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    processes: int | None = None,
) -> int:
    """Runs the tasks of all sections in one pool, since its processes take seconds to start; how many there were."""
    tasks = [task for section in sections for task in _tasks(providers, section, dtypes)]
    tasks.sort(key=lambda task: task.is_measured)
    if processes is None:
        processes = min(PROCESSES, max(1, (os.cpu_count() or 1) - 2))
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(
            min(processes, max(1, len(tasks))),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_take_turns_in_tuning,
            initargs=(Path(folder) / "lock",),
        )
        with pool, tqdm(total=len(tasks), unit="kernel", desc="compile", dynamic_ncols=True) as bar:
            try:
                for _, part in itertools.groupby(tasks, lambda task: task.is_measured):
                    for future in as_completed([pool.submit(first_calls, task, device) for task in part]):
                        future.result()
                        bar.update()
            except BrokenProcessPool:  # a compiler that crashes, or too little memory
                left = "what is left compiles as it is measured"
                tqdm.write(f"compiling ahead ended early: a process died; {left}")
    return len(tasks)


def _tasks(providers: Sequence[str], section: Section, dtypes: Sequence[torch.dtype]) -> Iterator[Task]:
    [(family, _)] = by_family(section.ops)
    for name in providers:
        if name in NOT_WARMED or backend_of(name) in section.without:
            continue
        shapes = section.shapes
        if name == "quack" or (family is not None and name in BY_WIDTH):
            shapes = tuple({cols: (rows, cols) for rows, cols in reversed(shapes)}.values())
        for dtype in dtypes:
            for shape in shapes:
                for share in range(_shares(name, family)):
                    yield Task(name, shape, dtype, share, section.ops)


def _shares(name: str, family: Family | None) -> int:
    return SHARES.get(name, 1) if family is None or family.tries_settings else 1


def first_calls(task: Task, device: torch.device) -> None:
    """Every op of every setting of the task once. A failure is left to the process that measures."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    [(family, _)] = by_family(task.ops)
    share = slice(task.share, None, _shares(task.provider, family))
    with contextlib.suppress(Exception), in_level(task.provider):
        with inductor.held(_turn) if task.is_measured else contextlib.nullcontext():
            if family is None:
                (inputs,) = make_inputs(task.shape, task.dtype, device, sets=1)
            else:
                (block_inputs,) = families.make_inputs(family, task.shape, task.dtype, device, sets=1)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if family is None:
            for provider in make_providers(task.provider, task.shape, task.dtype, device)[share]:
                for op in checked_ops(provider):
                    with contextlib.suppress(Exception):
                        run_op(provider, op, inputs, poisons=False)
        else:
            block_cell.first_calls(task.provider, family, task.ops, task.shape, block_inputs, share)
    if device.type == "cuda":
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()


def _take_turns_in_tuning(lock: Path) -> None:
    """Lets one process at a time measure on the GPU when Inductor chooses between kernels by their times."""
    global _turn
    _turn = lock
    inductor.time_by_device(lock)
