# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Sum the device's time of a step by kind of kernel."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

OURS = "ours"
COMMUNICATION = "communication"
SHARDING = "sharding"  # FSDP's copies between parameters and what it communicates
KINDS = ("matmul", "attention", OURS, "other norms", "Inductor", COMMUNICATION, SHARDING, "copies", "other")
APART = ("matmul", "attention", COMMUNICATION, SHARDING)  # what no norm changes
# The first that is found in a kernel's name says its kind.
PATTERNS = (
    (COMMUNICATION, re.compile(r"nccl", re.IGNORECASE)),
    (SHARDING, re.compile(r"chunk_cat|split_with_sizes_copy")),
    ("copies", re.compile(r"^Mem(cpy|set)")),
    ("Inductor", re.compile(r"^triton_")),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|cudnn::fusion", re.IGNORECASE)),
    ("other norms", re.compile(r"layer_norm|rms_norm|GammaBeta")),
    ("matmul", re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitK", re.IGNORECASE)),
)
CUTILE = re.compile(r"_Kt\d+_.*$")
# In Triton a kernel is named by its argument KERNEL (backends/triton/rows.py), or by its function.
TRITON = ("forward_rows", "forward_reread", "forward_vllm", "backward_dx", "backward_dx_reread", "backward_c")
TRITON += ("rope_forward", "rope_backward", "sum_partials")


class Kernel(NamedTuple):
    """One run of a kernel: its times in microseconds, and its stream."""

    name: str
    start: float
    end: float
    stream: int


def our_names() -> frozenset[str]:
    """Collect the names of this package's kernels, of cutile and triton."""
    names = set(TRITON)
    try:
        from tilegym_rmsnorm.backends.cutile.kernels import KERNELS

        names.update(KERNELS)
    except ImportError:
        pass
    return frozenset(names)


def short_name(name: str) -> str:
    """Cut off the types of arguments that cuTile adds to the name of a kernel."""
    return CUTILE.sub("", name)


def kind_of(name: str, ours: frozenset[str]) -> str:
    if name in ours:
        return OURS
    return next((kind for kind, pattern in PATTERNS if pattern.search(name)), "other")


def profiled(run: Callable[[], Any]) -> list[Kernel]:
    """Run a function, and return the kernels that ran meanwhile."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return [
        Kernel(short_name(each.name), each.time_range.start, each.time_range.end, each.device_resource_id)
        for each in profile.events()
        if each.device_type == DeviceType.CUDA
    ]


def alone(kernels: Iterable[Kernel]) -> list[tuple[Kernel, float]]:
    """Return each kernel with the microseconds in which no earlier one of its stream runs: kernels that are launched
    programmatically begin while the one before ends, and wait for it."""
    ends: dict[int, float] = defaultdict(float)
    found = []
    for each in sorted(kernels, key=lambda each: each.start):
        found.append((each, max(0.0, each.end - max(each.start, ends[each.stream]))))
        ends[each.stream] = max(ends[each.stream], each.end)
    return found


def by_kind(kernels: Iterable[Kernel], ours: frozenset[str], repeats: int) -> dict[str, Any]:
    """Sum the milliseconds of one of `repeats` steps.

    Returns device_ms: by kind. norm_kernels: how often each of ours ran. kernels: the longest, with kind, count and
    milliseconds. exposed_ms: communication while nothing else ran, None without any.
    """
    kernels = list(kernels)
    times, counts = defaultdict(float), defaultdict(int)
    for each, us in alone(kernels):
        times[each.name] += us / 1e3 / repeats
        counts[each.name] += 1
    kinds = {name: kind_of(name, ours) for name in times}
    longest = sorted(times, key=lambda name: -times[name])
    device = {
        kind: round(sum(times[name] for name in times if kinds[name] == kind), 4)
        for kind in KINDS
        if kind in kinds.values()
    }
    return {
        "device_ms": device,
        "exposed_ms": round(exposed(kernels, kinds) / 1e3 / repeats, 4) if COMMUNICATION in device else None,
        "norm_kernels": {name: counts[name] / repeats for name in longest if kinds[name] == OURS},
        "kernels": [
            [name[:120], kinds[name], counts[name] / repeats, round(times[name], 4)] for name in longest[:30]
        ],
    }


def exposed(kernels: Iterable[Kernel], kinds: dict[str, str]) -> float:
    """Sum the microseconds in which kernels communicate and no other one runs."""
    edges = []
    for each in kernels:
        is_communication = kinds[each.name] == COMMUNICATION
        edges += [(each.start, 1, is_communication), (each.end, -1, is_communication)]
    running = {True: 0, False: 0}
    total = before = 0.0
    for time, change, is_communication in sorted(edges):
        if running[True] and not running[False]:
            total += time - before
        running[is_communication] += change
        before = time
    return total
