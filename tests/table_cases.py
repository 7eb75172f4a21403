# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the tests of tuned tables share: one target, one bucket, one entry; and the configs of the tables that ship."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilegym_rmsnorm.backends.cutile.plans import problem, select, tables
from tilegym_rmsnorm.backends.cutile.plans.kernel_config import Config
from tilegym_rmsnorm.backends.cutile.plans.problem import Bucket
from tilegym_rmsnorm.backends.cutile.plans.tables import Entry, Target, Timing

TARGET = Target("NVIDIA H100 80GB HBM3", 90, "1.7.0", "13.4.92")
MACHINE = SimpleNamespace(target=TARGET, architecture=90, most_members=16)
BUCKET = Bucket("backward", 4096, "bfloat16", "large")
ENTRY = Entry(Config("rows", 4096, 4, 1, 3, short=True), (Timing(16384, 140.0, 130.5),))


def chosen(bucket: Bucket = BUCKET, machine=MACHINE) -> Config:
    dtype = getattr(torch, bucket.dtype)
    return select.chosen_config(bucket.op, machine, bucket.n, dtype, bucket.size)


def without_reason(config: Config) -> Config:
    return replace(config, reason="")


def shipped_configs(op: str, dtype: str) -> list[tuple[int, Bucket, Config]]:
    """Architecture, bucket and config of all that the tables that ship give to `dtype`, but for what other tests have:
    the rules' configs, and what another entry of that width beside such a weight has too."""
    found = {}
    for path in sorted(tables.SHIPPED_FOLDER.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        target = Target(**{name: json.loads(text)[name] for name in Target._fields})
        for bucket, entry in serving(tables.parse(text, target), op, dtype).items():
            rule = select.config_of_rules(bucket, target.architecture)
            config = without_reason(entry.config)
            if config != replace(rule, reason="", spills=""):
                found.setdefault((target.architecture, bucket.n, bucket.weight, config), bucket)
    return [(architecture, bucket, config) for (architecture, *_, config), bucket in found.items()]


def entries_that_ship(machine, op: str, dtype: str) -> list[tuple[Bucket, Entry]]:
    """Those of the table that ships for this GPU and toolkit which serve `op` on tensors of `dtype`, in order. Skips
    the test where there are none."""
    found = tables.tables_of(machine.target)
    [table] = [table for path, table in found.items() if path.parent == tables.SHIPPED_FOLDER] or [{}]
    entries = sorted(serving(table, op, dtype).items())
    if not entries:
        pytest.skip(f"no table ships with entries of {op} and {dtype} for {machine.target} and this toolkit")
    return entries


def serving(table: tables.Table, op: str, dtype: str) -> tables.Table:
    """The entries that serve tensors of `dtype`, those that it takes from another dtype among them."""
    lenders = problem.SHARED.get(dtype, ())
    lent = {b._replace(dtype=dtype): entry for b, entry in table.items() if b.op == op and b.dtype in lenders}
    return lent | {b: entry for b, entry in table.items() if (b.op, b.dtype) == (op, dtype)}
