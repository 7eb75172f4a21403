# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Sweeps of tests beside the rules for a weight of x's dtype: the rules beside a float32 weight, and the entries that
ship."""

import itertools
from typing import NamedTuple

import planning
import torch

from tilegym_rmsnorm.backends.cutile.plans.problem import FLOAT32, ITEMSIZE, SAME, WEIGHTS, Bucket
from tilegym_rmsnorm.backends.cutile.plans.select import SHARED, Choice
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime import tables


class Shipped(NamedTuple):
    """Choice of an entry that ships, for a bucket."""

    architecture: int
    bucket: Bucket
    choice: Choice

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
    """List the choices of the records of `op` that ship for a GPU model and tensors of `dtype`, at the ends of their
    ranges, with those that `dtype` takes from another dtype or weight. Choices that other tests have are left out:
    those of the rules, and those that another record of that width beside such a weight has too."""
    found: dict[tuple[int, int, str, Variant], Shipped] = {}
    for target in (planning.H100, planning.H200):
        facts = planning.device(target.architecture, target=target)
        lenders = (dtype, *SHARED.get(dtype, ()))
        served = dict.fromkeys(
            (n, size)
            for each in tables.shipped_records(target.architecture)
            if target.gpu in each.gpus and op in each.ops and not set(lenders).isdisjoint(each.dtypes)
            for n in (each.first, each.last)
            for size in each.sizes
        )
        for (n, size), weight in itertools.product(served, WEIGHTS if ITEMSIZE[dtype] == 2 else (SAME,)):
            asked = planning.problem(op, n, dtype, size, FLOAT32 if weight == FLOAT32 else dtype, facts)
            choice = planning.by_tables(asked)
            if choice.first != planning.by_rules(op, n, dtype, size, asked.weight, facts).first:
                key = target.architecture, n, weight, choice.first
                found.setdefault(key, Shipped(target.architecture, asked.bucket, choice))
    return list(found.values())


def beside_float32(op: str, n: int, size: str) -> Choice | None:
    """Choose by the rules of sm_90 that hold beside a float32 weight alone; None: by those beside one of x's dtype."""
    asked = planning.problem(op, n, torch.bfloat16, size, torch.float32)
    for rules in planning.rules_of().rules:
        if found := rules.find(asked.bucket, asked.most_members, asked.is_aligned):
            return Choice(found[1], f"a rule up to {found[0].last} columns", found[0].spills)
    return None
