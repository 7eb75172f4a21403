# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT

"""What the tests of tuned tables share: one target, one bucket, one entry."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from tilegym_rmsnorm.backends.cutile import tables
from tilegym_rmsnorm.backends.cutile.config import Config
from tilegym_rmsnorm.backends.cutile.tables import Bucket, Entry, Target, Timing

TARGET = Target("NVIDIA H100 80GB HBM3", 90, "1.7.0", "13.4.92")
MACHINE = SimpleNamespace(model=TARGET.gpu, architecture=90)
BUCKET = Bucket("backward", 4096, "bfloat16", "large")
ENTRY = Entry(Config("rows", 4096, 4, 1, 3, short=True), (Timing(16384, 140.0, 130.5),))


def chosen(bucket: Bucket = BUCKET, machine=MACHINE) -> Config:
    dtype = getattr(torch, bucket.dtype)
    return tables.chosen_config(bucket.op, machine, bucket.n, dtype, bucket.size)


def without_reason(config: Config) -> Config:
    return replace(config, reason="")
