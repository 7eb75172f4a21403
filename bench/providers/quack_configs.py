# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Quack's configs to time: those near its heuristic's choice, since its whole search space, 400 backwards of 4096
columns, would compile for minutes a cell."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

# Of 16-bit rows of 2048 to 16384 columns: what was the fastest of all neighbours at some width on an H100 or an H200,
# in the results of plain ops in bfloat16 of 2026-11-24. Where there is no time for all, these are timed.
FASTEST = frozenset(
    (
        "cluster_n=2",
        "cluster_n=2 reload_wdy=smem use_tma=True",
        "cluster_n=2 use_tma=True",
        "num_threads=256 threads_per_row=256",
        "num_threads=256 threads_per_row=256 use_tma=True",
        "reload_from=smem",
        "reload_wdy=smem use_tma=True",
        "reload_x=smem use_tma=True",
        "threads_per_row=128",
        "threads_per_row=128 use_tma=True",
        "use_tma=True",
        "use_tma=True smem_stages=3",
    )
)


def quack_fastest(chosen: Any, cols: int, itemsize: int) -> list[tuple[str, Any]]:
    """Keep neighbours that are among FASTEST."""
    return [each for each in quack_neighbours(chosen, cols, itemsize) if each[0] in FASTEST]


def quack_neighbours(chosen: Any, cols: int, itemsize: int) -> list[tuple[str, Any]]:
    """quack's configs near `chosen` that fit rows of `cols`, each with what differs: any combination of TMA, cluster
    and one reload, and each other knob, of wide rows with TMA and without."""
    is_backward = hasattr(chosen, "use_tma")
    tma = {"use_tma": [False, True]} if is_backward else {}
    reload = {"reload_wdy": [None, "smem"]} if is_backward else {"reload_from": [None, "smem", "gmem"]}
    others: list[dict[str, Any]] = [{"num_threads": 384 - chosen.num_threads}]  # 128 or 256
    others += [
        {"num_threads": 256, "threads_per_row": 256},
        {"threads_per_row": 128},
        {"threads_per_row": 64},
    ]
    others += [{"reload_x": "smem"}, {"smem_stages": 3}] if is_backward else []
    changes = _combinations({"cluster_n": _clusters(chosen, cols)} | reload | tma)
    # Of narrow rows by TMA only the reload varies: each config compiles for seconds.
    changes += [other | each for other in others for each in _combinations(tma if cols >= 2048 else {})]
    found: dict[Any, str] = {}
    for change in changes:
        config = dataclasses.replace(chosen, **change)
        if config != chosen and _fits(config, cols, itemsize):
            found.setdefault(config, _text(chosen, config))
    return [(text, config) for config, text in found.items()]


def quack_grids(
    chosen: Any, cols: int, itemsize: int, usual: int, sm_count: int, rows: int
) -> list[tuple[str, Any, int]]:
    """Configs of the backward that differ from `chosen` in cluster and TMA alone, each with as many partial rows as
    leave an SM one block or two, or four where `chosen` has no cluster; never more than rows of x, of which each block
    has at least one. usual: the partial rows that quack takes, whatever the rows of x."""
    per_sm = (1, 2, 4) if chosen.cluster_n == 1 else (1, 2)
    clusters = [each for each in _clusters(chosen, cols) if each <= chosen.cluster_n]
    grids: dict[tuple[Any, int], str] = {}
    for cluster, use_tma, blocks in itertools.product(clusters, (False, True), per_sm):
        config = dataclasses.replace(chosen, cluster_n=cluster, use_tma=use_tma)
        partial_rows = max(1, min(rows, sm_count * blocks // cluster))
        if partial_rows != usual and _fits(config, cols, itemsize):
            grids[config, partial_rows] = f"{_text(chosen, config)} partial_rows={partial_rows}".strip()
    return [(text, config, partial_rows) for (config, partial_rows), text in grids.items()]


def _clusters(chosen: Any, cols: int) -> list[int]:
    """Its heuristic's, down to a quarter of that, and where rows are wide twice that."""
    fewer = [chosen.cluster_n // part for part in (2, 4) if chosen.cluster_n >= part]
    return [chosen.cluster_n, *fewer, *([chosen.cluster_n * 2] if cols >= 8192 else [])]


def _combinations(values: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def _text(chosen: Any, config: Any) -> str:
    before, after = dataclasses.asdict(chosen), dataclasses.asdict(config)
    return " ".join(f"{key}={value}" for key, value in after.items() if value != before[key])


def _fits(config: Any, cols: int, itemsize: int) -> bool:
    fits = config.threads_per_row <= config.num_threads and config.cluster_n <= 16
    # Its TMA path copies multiples of 16 bytes of each row.
    fits &= not (getattr(config, "use_tma", False) and cols // config.cluster_n * itemsize % 16)
    return fits and config.threads_per_row * config.cluster_n <= cols
