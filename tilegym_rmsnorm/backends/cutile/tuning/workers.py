# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Searches in several processes, which compile side by side and take turns on the GPU.

cuda-tile compiles under a lock of its process, so threads would not do.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import torch

from tilegym_rmsnorm import settings
from tilegym_rmsnorm.backends.cutile.host.norm import plan_for
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket, Policy
from tilegym_rmsnorm.backends.cutile.plans.records import Record
from tilegym_rmsnorm.backends.cutile.runtime.machine import machine_of
from tilegym_rmsnorm.backends.cutile.runtime.tables import shipped_for
from tilegym_rmsnorm.backends.cutile.tuning import search
from tilegym_rmsnorm.backends.cutile.tuning.candidates import candidates

MOST_PROCESSES = 16
# Of GPU memory: the context, inputs that overflow the L2, a graph's outputs. 6.8 GiB were seen, of 60 variants at 64 MB
# of x; 256 MB add three quarters of a GiB of inputs.
BYTES_PER_PROCESS = 8 * 2**30
# More, of the process that checks results in float64, which gives them back after that.
BYTES_OF_TURN = 8 * 2**30
NO_MEMORY = "out of GPU memory. To mend it: the same command with --skip-tuned and fewer --processes"


class DiedError(RuntimeError):
    """A process of the search is gone, and with it the others."""


class Found(NamedTuple):
    """Result of a search of a bucket. entry: None where the search failed, for the reason `failure`; lines: its output
    on the way; lost: a kernel broke the process's CUDA context."""

    bucket: Bucket
    entry: Record | None
    lines: tuple[str, ...] = ()
    failure: str = ""
    lost: bool = False


def count_processes(device: torch.device, buckets: int) -> int:
    """Count processes that cores and GPU memory allow, no more than there are buckets."""
    cores = (os.cpu_count() or 2) - 1
    fit = (torch.cuda.mem_get_info(device)[0] - BYTES_OF_TURN) // BYTES_PER_PROCESS
    return max(1, min(MOST_PROCESSES, cores, fit, buckets))


_searching: search.Search  # of this process
_lines: list[str] = []


def start(device: torch.device, turn: search.Turn, teams: bool) -> None:
    """Make this process ready to search, with teams or without."""
    global _searching
    settings.set_teams(teams)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _searching = search.Search(machine_of(device), device, _lines.append, turn)


def search_all(
    buckets: list[Bucket],
    device: torch.device,
    most: int,
    processes: int,
    start: Callable[[torch.device, search.Turn, bool], None] = start,
) -> Iterator[Found]:
    """The searches of all buckets over at most `most` candidates each, as they end. A lost context ends them: the
    last one has it. With one process it is this one; others end with the generator, whatever they do."""
    if processes == 1:
        start(device, search.ALONE, settings.teams())
        for bucket in buckets:
            yield (found := _search(bucket, most))
            if found.lost:
                return
        return

    # A fork of a process that has used CUDA cannot use its libraries.
    spawn = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes, spawn, initializer=start, initargs=(device, spawn.Lock(), settings.teams())
    )
    own = set()
    try:
        futures = [pool.submit(_search, bucket, most) for bucket in buckets]
        own = set(multiprocessing.active_children()) - others
        for future in as_completed(futures):
            yield (found := future.result())
            if found.lost:
                return
    except BrokenProcessPool:
        raise DiedError("a process died, of a crash or for want of memory") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in own:
            process.terminate()


def _search(bucket: Bucket, most: int) -> Found:
    """One bucket's search in this process."""
    _lines.clear()
    facts = _searching.machine.facts
    problem = bucket.problem(facts, Policy(settings.teams()))
    known = [plan_for(problem).first, *shipped_for(bucket)]
    tried = candidates(bucket, facts.architecture, most, problem.most_members, known)
    try:
        return Found(bucket, _searching.tune(bucket, tried), tuple(_lines))
    except torch.OutOfMemoryError:
        failure = f"{bucket}: {NO_MEMORY}"
    # nothing right, a kernel that broke the context, or one that the compiler fails at
    except Exception as error:
        failure = f"{bucket}: {error}"
    try:
        _searching.synchronize()
    except RuntimeError as error:  # nothing more can run in this process
        return Found(bucket, None, tuple(_lines), f"{failure}; the CUDA context is lost: {error}", lost=True)
    return Found(bucket, None, tuple(_lines), failure)
