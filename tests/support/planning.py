# SPDX-FileCopyrightText: Copyright (c) 2026 tilegym_rmsnorm contributors
# SPDX-License-Identifier: MIT
"""Problems and plans as tests ask for them."""

from types import ModuleType
from typing import Any

import torch

from tilegym_rmsnorm.backends.cutile.plans.partition import MOST_MEMBERS
from tilegym_rmsnorm.backends.cutile.plans.plan import Plan, plan_of
from tilegym_rmsnorm.backends.cutile.plans.problem import Device, Problem, Target
from tilegym_rmsnorm.backends.cutile.plans.rope import RopeProblem, tile_of_heads
from tilegym_rmsnorm.backends.cutile.plans.select import Choice, Tables, choose
from tilegym_rmsnorm.backends.cutile.plans.variant import Variant
from tilegym_rmsnorm.backends.cutile.runtime.tables import tables_of

H100, H200 = (Target(gpu, 90, "1.7.0", "13.4.92") for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"))


def name_of(dtype: torch.dtype | str | None) -> str | None:
    """A dtype's name as problems have it."""
    return dtype if dtype is None else str(dtype).removeprefix("torch.")


def device(
    architecture: int = 90,
    sm_count: int = 132,
    most_members: int = MOST_MEMBERS,
    target: Target | None = None,
) -> Device:
    return Device(architecture, sm_count, most_members, target)


def problem(
    op: str,
    n: int,
    dtype: torch.dtype | str = torch.bfloat16,
    size: str = "large",
    weight: torch.dtype | str | None = "same",
    facts: Device | None = None,
    architecture: int = 90,
    **others: Any,
) -> Problem:
    """weight: its dtype, "same" for x's, None for none. others: fields of Problem."""
    weight = dtype if weight == "same" else weight
    facts = device(architecture) if facts is None else facts
    return Problem(op, n, name_of(dtype), name_of(weight), size, facts, **others)


def rules_of(architecture: int = 90) -> Tables:
    """The rules of an architecture, without any entry."""
    return tables_of(architecture, None, None)


def by_rules(op: str, n: int, *arguments: Any, **options: Any) -> Choice:
    """Choose by the rules the first kernel of `problem(op, n, *arguments, **options)`."""
    asked = problem(op, n, *arguments, **options)
    return choose(asked, rules_of(asked.device.architecture))


def by_tables(asked: Problem) -> Choice:
    """Choose for a problem on its device by rules and the entries that ship."""
    return choose(asked, tables_of(asked.device.architecture, asked.device.target, None))


def plan(first: Variant | Choice, op: str, n: int, *arguments: Any, **options: Any) -> Plan:
    """The plan of `problem(op, n, *arguments, **options)` whose first kernel is given."""
    asked = problem(op, n, *arguments, **options)
    return plan_of(asked, *first) if isinstance(first, Choice) else plan_of(asked, first)


def classes_of(module: ModuleType) -> dict[str, type[Variant]]:
    """The settings of kernels that a module of plans/ defines, by their classes' names."""
    return {
        name: each
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, Variant) and hasattr(each, "kernel")
    }


def rope_problem(
    n: int = 128, rotary_dim: int = 128, heads: tuple[int, int] = (32, 8), **others: Any
) -> RopeProblem:
    """heads: of q and of k. others: fields of RopeProblem."""
    q_heads, k_heads = (tile_of_heads(n, each) for each in heads)
    defaults = {
        "interleaved": False,
        "itemsize": 2,
        "is_scattered": False,
        "has_one_step": False,
        "has_full_tables": True,
        "has_positions": False,
        "per_head": False,
        "casting": "once",
        "rounding": "end",
        "architecture": 90,
    }
    return RopeProblem(n, rotary_dim, heads=q_heads, k_heads=k_heads, **(defaults | others))
