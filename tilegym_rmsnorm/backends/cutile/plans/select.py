# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""The selector: by which config a call runs on a GPU.

The first that has an entry decides: the table in the user's cache, the table that ships for this GPU, the rules of
rules.py. float16 takes bfloat16's entries where it has none of its own; dx alone, where no table has an entry of it,
takes a backward's, if that `serves_dx_alone`. Rows of 2-byte elements beside a float32 weight take entries of such a
weight, then the rules for it, and only then what serves beside a weight of x's dtype.

Neither torch nor cuda.tile is imported.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config
from tilegym_rmsnorm.backends.cutile.plans.limits import WALKS_ROWS
from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, ITEMSIZE, SERVED_BY, SHARED, Bucket, Facts
from tilegym_rmsnorm.backends.cutile.plans.rules import backward_config, beside_float32_config, forward_config
from tilegym_rmsnorm.backends.cutile.plans.tables import tables_of
from tilegym_rmsnorm.backends.cutile.plans.wide import MOST_MEMBERS

RULES: dict[str, Callable[..., Config]] = {
    "forward": forward_config,
    "backward": backward_config,
    "dx": functools.partial(backward_config, has_dw=False),
}


def chosen_config(
    op: str,
    machine: Facts,
    n: int,
    dtype: Any,
    size: str,
    weight_dtype: Any = None,
) -> Config:
    """The config that serves rows of n elements, for problems of one size class, on this machine. weight_dtype: None
    without a weight."""
    bucket = Bucket(op, n, str(dtype).removeprefix("torch."), size)
    if weight_dtype is not None and weight_dtype.itemsize > dtype.itemsize:
        numbers = n, dtype.itemsize, machine.architecture, size, machine.most_members
        beside = _entry_of(bucket._replace(weight=FLOAT32), machine) or beside_float32_config(op, *numbers)
        if beside is not None:
            return beside
    return _entry_of(bucket, machine) or config_of_rules(bucket, machine.architecture, machine.most_members)


def _entry_of(bucket: Bucket, machine: Facts) -> Config | None:
    """The config of the first entry that serves a bucket on this machine."""
    found = tables_of(machine.target).values()
    dtypes = (bucket.dtype, *SHARED.get(bucket.dtype, ()))
    for its_op, table, its_dtype in itertools.product(SERVED_BY[bucket.op], found, dtypes):
        entry = table.get(bucket._replace(op=its_op, dtype=its_dtype))
        if entry is None or entry.config.members > machine.most_members:
            continue
        if its_op == bucket.op or serves_dx_alone(entry.config):
            return entry.config
    return None


def config_of_rules(bucket: Bucket, architecture: int, most_members: int = MOST_MEMBERS) -> Config:
    """What the rules of rules.py give to a bucket."""
    numbers = bucket.n, ITEMSIZE[bucket.dtype], architecture, bucket.size
    if bucket.weight == FLOAT32 and (config := beside_float32_config(bucket.op, *numbers, most_members)):
        return config
    return RULES[bucket.op](*numbers, most_members=most_members)


def serves_dx_alone(config: Config) -> bool:
    """Whether a backward that needs no dw takes the config of one that does: not of kernels that read x and dy once
    more for dw, nor of teams by TMA, some of which take more than 200 bytes of stack without dw (entries of dx may be
    such)."""
    return config.kernel in WALKS_ROWS and not (config.kernel == "teams" and config.tma)
