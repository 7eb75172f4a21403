# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""Which of quack's configs are timed: all near its heuristic's choice that may win, since its whole search space, 400
backwards of 4096 columns, would compile for minutes a cell."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any


def quack_neighbours(chosen: Any, cols: int) -> list[tuple[str, Any]]:
    """quack's configs near `chosen` that fit rows of `cols`, each with what differs: any combination of TMA, cluster
    and one reload, and each other knob alone."""
    is_backward = hasattr(chosen, "use_tma")
    reload = "reload_wdy" if is_backward else "reload_from"
    clusters = [chosen.cluster_n, *([chosen.cluster_n * 2] if cols >= 8192 else [])]
    clusters += [chosen.cluster_n // 2] if chosen.cluster_n > 1 else []
    values = {"cluster_n": clusters, reload: [None, "smem"] if is_backward else [None, "smem", "gmem"]}
    if is_backward:
        values["use_tma"] = [False, True]
    changes = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    if is_backward:
        changes += [{"reload_x": "smem"}, {"reload_x": "smem", "use_tma": True}]
        changes += [{"smem_stages": 3}, {"smem_stages": 3, "use_tma": True}]
    changes.append({"num_threads": 384 - chosen.num_threads})  # 128 or 256
    changes += [{"threads_per_row": threads} for threads in (chosen.threads_per_row * 2, 64)]
    found: dict[Any, str] = {}
    for change in changes:
        config = dataclasses.replace(chosen, **change)
        text = " ".join(f"{key}={value}" for key, value in change.items() if value != getattr(chosen, key))
        if config != chosen and _quack_fits(config, cols):
            found.setdefault(config, text)
    return [(text, config) for config, text in found.items()]


def quack_grids(chosen: Any, cols: int, usual: int, sm_count: int) -> list[tuple[str, Any, int]]:
    """Configs of the backward that differ from `chosen` in cluster and TMA alone, each with as many partial rows as
    leave an SM one block; where `chosen` has no cluster, none. usual: the partial rows that quack itself takes."""
    if chosen.cluster_n == 1:
        return []
    grids = []
    for cluster in (chosen.cluster_n // 2, chosen.cluster_n, chosen.cluster_n * 2):
        for use_tma in (False, True):
            config = dataclasses.replace(chosen, cluster_n=cluster, use_tma=use_tma)
            partial_rows = sm_count // cluster
            if partial_rows != usual and _quack_fits(config, cols):
                text = f"cluster_n={cluster} use_tma={use_tma} partial_rows={partial_rows}"
                grids.append((text, config, partial_rows))
    return grids


def _quack_fits(config: Any, cols: int) -> bool:
    fits = config.threads_per_row <= config.num_threads and config.cluster_n <= 16
    # Its TMA path copies multiples of 16 bytes of each row.
    fits &= not (getattr(config, "use_tma", False) and cols // config.cluster_n % 8)
    return fits and config.threads_per_row * config.cluster_n <= cols
