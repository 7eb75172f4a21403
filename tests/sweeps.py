# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""What tests sweep beside the rules for a weight of x's dtype: the rules beside a float32 weight, and the entries that
ship."""

from __future__ import annotations

from typing import NamedTuple

import planning
import torch

from tilegym_rmsnorm.backends.cutile.plans import tables
from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, Bucket
from tilegym_rmsnorm.backends.cutile.plans.select import SHARED, Choice
from tilegym_rmsnorm.backends.cutile.plans.variants import Variant


class Shipped(NamedTuple):
    """An entry that ships, as it serves one bucket."""

    architecture: int
    bucket: Bucket
    choice: Choice
    m: int  # the most rows that it was measured at

    @property
    def n(self) -> int:
        return self.bucket.n

    @property
    def variant(self) -> Variant:
        return self.choice.first

    @property
    def weight_dtype(self) -> torch.dtype:
        return torch.float32 if self.bucket.weight == FLOAT32 else getattr(torch, self.bucket.dtype)


def shipped_entries(op: str, dtype: str) -> list[Shipped]:
    """What the entries that ship give to tensors of `dtype`, those that it takes from another dtype among them, but for
    what other tests have: what the rules choose, and what another entry of that width beside such a weight has too."""
    found: dict[tuple[int, int, str, Variant], Shipped] = {}
    for target in tables.shipped_targets():
        own = [record for record in tables.shipped_records(target.architecture) if target.gpu in record.gpus]
        serving = {}
        for lender in (*SHARED.get(dtype, ()), dtype):  # its own take the place of those that it borrows
            for record in own:
                for bucket in record.buckets():
                    if (bucket.op, bucket.dtype) == (op, lender):
                        serving[bucket._replace(dtype=dtype)] = record
        for bucket, record in serving.items():
            choice = Choice(record.variant(bucket.n), f"an entry for {target.gpu}", record.spills)
            most = max(measured["m"] for measured in record.evidence)
            each = Shipped(target.architecture, bucket, choice, most)
            asked = op, bucket.n, dtype, bucket.size, each.weight_dtype
            if each.variant != planning.by_rules(*asked, architecture=target.architecture).first:
                found.setdefault((target.architecture, bucket.n, bucket.weight, each.variant), each)
    return list(found.values())


def beside_float32(op: str, n: int, size: str) -> Choice | None:
    """What the rules of sm_90 choose beside a float32 weight alone; None: what they choose beside one of x's dtype."""
    asked = planning.problem(op, n, torch.bfloat16, size, torch.float32)
    for rules in planning.rules_of().rules:
        if found := rules.find(asked.bucket, asked.most_members, asked.is_aligned):
            return Choice(found[1], f"a rule up to {found[0].last} columns", found[0].spills)
    return None
